// The chain: versions, the anchors beside them, and the version of each replica. Pure, as charts.js is.
"use strict";

function chain(snapshot, theme, choice) {
  const versions = snapshot.versions;
  if (!versions.length) return { empty: "No version has been committed yet." };
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
  const there = snapshot.anchors.filter((one) => one.version >= versions[0].version);
  const traces = [
    { type: "scatter", mode: "lines", name: "chain", x: [versions[0].version, head], y: [1, 1], hoverinfo: "skip", line: { width: 2, color: theme.line } },
    {
      type: "scatter", mode: "lines", name: "shortcuts", hoverinfo: "skip", line: { width: 1, color: theme.faint, dash: "dot" },
      x: there.flatMap((one) => [one.version, one.version, null]), y: there.flatMap(() => [1, 2, null]),
    },
    node("delta", "circle", theme.accent, 0.8, "a delta"),
    node("base", "square", theme.ink, 1.2, "the base: a checkpoint that followers already have"),
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
        `<b>${label(one.kind)}</b> of version ${one.version}, ${bytes(one.nbytes)}`, one.there ? "" : "no longer in the bucket",
      )),
    },
  ];
  const many = snapshot.replicas.length > MANY_REPLICAS;
  const pins = (many ? groupsOf : pinsOf)(snapshot, first, head, span * (many ? (theme.narrow ? 0.09 : 0.025) : 0.3));
  const depth = Math.max(0, ...pins.map((pin) => pin.level));
  traces.push(...(many ? [groupTrace(pins, theme)] : pins.map((pin) => pinTrace(pin, theme, head, pin.shown > first + span / 2))));
  const low = pins.length ? -0.3 - depth * 0.62 : 0.5;
  const gone = snapshot.below > versions[0].version;
  return {
    traces,
    caption: "Dots are deltas, diamonds are anchors, bars are fences. The upper row has the anchors beside the chain, for late joiners. "
      + (many ? "Circles count the replicas that hold or serve a version." : "Pins mark the version that each replica holds or serves."),
    layout: layoutOf(theme, 118 + (pins.length ? 30 + depth * 27 : 0), {
      uirevision: `chain ${choice}`, margin: { l: theme.narrow ? 14 : 20, r: 16, t: 8 },
      xaxis: { ...versionAxis(versions, theme), range: [first - span * 0.02 - 0.4, head + span * 0.02 + 0.4] },
      yaxis: { range: [low, 2.5], visible: false, fixedrange: true },
      shapes: gone ? [{
        type: "rect", layer: "below", x0: versions[0].version - 0.5, x1: snapshot.below - 0.5, yref: "paper", y0: 0, y1: 1,
        fillcolor: theme.grid, line: { width: 0 },
      }] : [],
      annotations: gone && snapshot.below > first ? [{
        x: (Math.max(first, versions[0].version) + snapshot.below - 1) / 2, y: 2.42, yanchor: "top", showarrow: false,
        text: "data may be deleted", font: { size: 12, color: theme.faint },
      }] : [],
    }),
  };
}

/** Puts pins that would overlap on different levels. A pin outside of the range is at its edge. */
function placed(pins, first, head, gap) {
  const done = [];
  for (const pin of pins) {
    pin.level = 0;
    pin.shown = Math.min(head, Math.max(first, pin.version));
    while (done.some((one) => one.level === pin.level && Math.abs(one.shown - pin.shown) < gap)) pin.level++;
    done.push(pin);
  }
  return done;
}

/** A pin for each replica. The outer pin of a pair is the lower one: its line does not cross the other's name. */
function pinsOf(snapshot, first, head, gap) {
  const pins = snapshot.replicas.map((one, index) => ({ name: one.name, version: one.reached, verb: one.served === null ? "holds" : "serves", index }));
  const outward = (pin) => Math.abs(pin.version - (first + head) / 2);
  return placed(pins.filter((one) => one.version >= 0).sort((a, b) => outward(a) - outward(b)), first, head, gap);
}

/** A pin for each version that replicas hold or serve. All versions before `first` share one. */
function groupsOf(snapshot, first, head, gap) {
  const groups = new Map();
  for (const one of snapshot.replicas.filter((one) => one.reached >= 0)) {
    const version = Math.max(first, one.reached);
    if (!groups.has(version)) groups.set(version, { version, members: [] });
    groups.get(version).members.push(one);
  }
  return placed([...groups.values()].sort((a, b) => b.version - a.version), first, head, gap);
}

function levelY(pin) {
  return 0.2 - pin.level * 0.62;
}

function pinTrace(pin, theme, head, left) {
  const look = lookOf(pin.index, theme);
  const text = label(pin.shown === pin.version ? pin.name : `${pin.name} (${pin.version})`, 32);
  return {
    type: "scatter", mode: "lines+markers+text", name: label(pin.name), x: [pin.shown, pin.shown], y: [0.86, levelY(pin)],
    text: ["", left ? `${text}\u2002` : `\u2002${text}`],
    textposition: left ? "middle left" : "middle right", textfont: { size: 12, color: look.color },
    line: { width: 1.4, color: look.color }, marker: { size: [0, 9], symbol: "circle", color: look.color }, cliponaxis: false,
    customdata: [pin.version, pin.version], hoverinfo: "text",
    hovertext: ["", `<b>${label(pin.name)}</b> ${pin.verb} version ${pin.version}${pin.version < head ? `, ${head - pin.version} behind` : ""}`],
  };
}

/** Circles with the number of replicas that hold or serve each version. */
function groupTrace(pins, theme) {
  const named = ({ members }) => members.slice(0, 10).map((one) => `${label(one.name, 32)}: version ${one.reached}`);
  return {
    type: "scatter", mode: "markers+text", name: "replicas", x: pins.map((one) => one.shown), y: pins.map(levelY),
    text: pins.map(({ members }) => String(members.length)), textfont: { size: 11, color: theme.card },
    marker: { size: 21, color: theme.good, opacity: 1, symbol: "circle" }, cliponaxis: false,
    customdata: pins.map(({ members }) => members.map((one) => one.name)), hoverinfo: "text",
    hovertext: pins.map((pin) => lines(
      `<b>${counted(pin.members.length, "replica")}</b>`, ...named(pin), pin.members.length > 10 ? `and ${pin.members.length - 10} more` : "",
    )),
  };
}
