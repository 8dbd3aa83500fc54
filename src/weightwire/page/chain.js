// The chain: versions, anchors beside them, and where each replica stands. Pure, as charts.js is.
"use strict";

function chain(picture, theme, choice) {
  const versions = picture.versions;
  if (!versions.length) return { empty: "No version yet." };
  const head = versions[versions.length - 1].version;
  const first = choice === "all" ? versions[0].version : Math.max(versions[0].version, head - (theme.narrow ? 24 : 60));
  const span = Math.max(head - first, 4);
  const size = span <= 80 ? 10 : span <= 400 ? 6 : 4;
  const at = (kind) => versions.filter((one) => one.kind === kind && one.version >= first);
  const node = (kind, symbol, color, scale, text) => ({
    type: "scatter", mode: "markers", name: kind, x: at(kind).map((one) => one.version), y: at(kind).map(() => 1),
    marker: { symbol, size: size * scale, color, line: { width: symbol === "line-ns-open" ? 2.5 : 1, color: symbol === "line-ns-open" ? color : theme.card } },
    hoverinfo: "text",
    hovertext: at(kind).map((one) => lines(
      `<b>version ${one.version}</b>, ${text}`, one.nbytes ? bytes(one.nbytes) : "", one.time === null ? "" : clock(one.time),
    )),
  });
  const there = picture.anchors.filter((one) => one.version >= versions[0].version);
  const traces = [
    { type: "scatter", mode: "lines", name: "chain", x: [versions[0].version, head], y: [1, 1], hoverinfo: "skip", line: { width: 2, color: theme.line } },
    {
      type: "scatter", mode: "lines", name: "ways", hoverinfo: "skip", line: { width: 1, color: theme.faint, dash: "dot" },
      x: there.flatMap((one) => [one.version, one.version, null]), y: there.flatMap(() => [1, 2, null]),
    },
    node("delta", "circle", theme.accent, 0.8, "a delta"),
    node("base", "square", theme.ink, 1.2, "the base that followers have already"),
    node("anchor", "diamond", theme.ink, 1.4, "an anchor: all weights"),
    node("fence", "line-ns-open", theme.pause, 1.6, "a fence: a publisher took over"),
    {
      type: "scatter", mode: "markers", name: "beside", x: there.map((one) => one.version), y: there.map(() => 2),
      marker: {
        symbol: there.map((one) => (one.kind === "anchor" ? "diamond" : "triangle-right") + (one.there ? "" : "-open")),
        size: Math.max(size, 6) * 1.3, color: theme.ink, line: { width: 1, color: theme.ink },
      },
      hoverinfo: "text",
      hovertext: there.map((one) => lines(
        `<b>${label(one.kind)}</b> of version ${one.version}, ${bytes(one.nbytes)}`, one.there ? "" : "its data is no longer in the bucket",
      )),
    },
  ];
  const pins = pinsOf(picture, first, head, span);
  const depth = Math.max(0, ...pins.map((pin) => pin.level));
  for (const pin of pins) {
    const look = lookOf(pin.index, theme), y = 0.2 - pin.level * 0.62;
    traces.push({
      type: "scatter", mode: "lines+markers+text", name: label(pin.name), x: [pin.shown, pin.shown], y: [0.86, y],
      text: ["", label(pin.shown < pin.version || pin.shown > pin.version ? `${pin.name} (${pin.version})` : pin.name, 32)],
      textposition: pin.shown > first + span / 2 ? "middle left" : "middle right", textfont: { size: 12, color: look.color },
      line: { width: 1.4, color: look.color }, marker: { size: [0, 9], symbol: "circle", color: look.color }, cliponaxis: false,
      customdata: [pin.version, pin.version], hoverinfo: "text",
      hovertext: ["", `<b>${label(pin.name)}</b> is at version ${pin.version}${pin.version < head ? `, ${head - pin.version} behind` : ""}`],
    });
  }
  const low = (pins.length ? 0.2 - depth * 0.62 : 1) - 0.5;
  const gone = picture.below > versions[0].version;
  return {
    traces,
    caption: "Diamonds are anchors, dots deltas, bars fences. Anchors on the upper line lie beside the chain, for those who start from nothing. Replicas are pinned where they stand.",
    layout: layoutOf(theme, 118 + (pins.length ? 30 + depth * 27 : 0), {
      uirevision: `chain ${choice}`, margin: { l: theme.narrow ? 14 : 20, r: 16, t: 8 },
      xaxis: { ...versionAxis(versions, theme), range: [first - span * 0.02 - 0.4, head + span * 0.02 + 0.4] },
      yaxis: { range: [low, 2.5], visible: false, fixedrange: true },
      shapes: gone ? [{
        type: "rect", layer: "below", x0: versions[0].version - 0.5, x1: picture.below - 0.5, yref: "paper", y0: 0, y1: 1,
        fillcolor: theme.grid, line: { width: 0 },
      }] : [],
      annotations: gone && picture.below > first ? [{
        x: (Math.max(first, versions[0].version) + picture.below - 1) / 2, y: 2.42, yanchor: "top", showarrow: false,
        text: "data may be gone", font: { size: 12, color: theme.faint },
      }] : [],
    }),
  };
}

/** Where replicas stand, lower ones under higher ones where their names would meet. Off the edge: at the edge. */
function pinsOf(picture, first, head, span) {
  const pins = picture.replicas.map((one, index) => ({ name: one.name, version: one.reached, index, level: 0 }));
  const placed = [];
  for (const pin of pins.filter((one) => one.version >= 0)) {
    pin.shown = Math.min(head, Math.max(first, pin.version));
    while (placed.some((one) => one.level === pin.level && Math.abs(one.shown - pin.shown) < span * 0.3)) pin.level++;
    placed.push(pin);
  }
  return placed;
}
