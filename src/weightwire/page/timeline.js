// The timeline: each stage of each version, with a lane for each machine. Pure, as charts.js is.
"use strict";

const MANY_SPANS = 4000; // if there are more, those outside of the window are not drawn
const MOST_LANES = 48; // replicas

/** All spans, each with its lane: 0 is the trainer, 1 the bucket, then one for each replica. */
function lanesOf(snapshot) {
  const own = snapshot.spans.map((span) => ({ ...span, lane: span.stage === "upload" ? 1 : 0 }));
  return own.concat(...snapshot.replicas.slice(0, MOST_LANES).map((one, index) => one.spans.map((span) => ({ ...span, lane: index + 2 }))));
}

/** The stages of these spans, in pipeline order. */
function stagesIn(snapshot, spans) {
  return snapshot.stages.filter((stage) => spans.some((one) => one.stage === stage.name));
}

/** The first and last second to show: the newest version or versions, a minute, or everything. */
function windowOf(snapshot, spans, choice) {
  const dated = snapshot.versions.filter((one) => one.time !== null);
  const ends = spans.map((one) => one.start + one.seconds).concat(dated.map((one) => one.time));
  const last = ends.reduce((most, one) => Math.max(most, one), 0);
  const known = [...new Set(spans.map((one) => one.version))].sort((a, b) => a - b);
  const earliest = (some) => some.reduce((least, one) => Math.min(least, one.start), last);
  let first = earliest(spans);
  if (choice === "minute") first = last - 60;
  if (choice === "one" || choice === "ten") {
    const since = known[Math.max(0, known.length - (choice === "one" ? 1 : 10))];
    first = earliest(spans.filter((one) => one.version >= since && one.stage !== "discover"));
  }
  const pad = Math.max((last - first) * 0.03, 0.005);
  return [first - pad, last + pad];
}

/** The versions whose labels do not overlap, the newest first: they are at least `gap` seconds apart. */
function apart(commits, gap) {
  const kept = new Set();
  let last = Infinity;
  for (const one of [...commits].reverse()) {
    if (last - one.time < gap) continue;
    kept.add(one.version);
    last = one.time;
  }
  return kept;
}

function timeline(snapshot, theme, choice) {
  const spans = lanesOf(snapshot);
  const dated = snapshot.versions.filter((one) => one.time !== null);
  if (!spans.length) return { empty: "The published versions have no stage times." };
  const [from, to] = windowOf(snapshot, spans, choice);
  const near = (one) => one.start + one.seconds >= from && one.start <= to;
  const drawn = spans.length > MANY_SPANS ? spans.filter(near) : spans;
  const names = ["trainer", "bucket", ...snapshot.replicas.slice(0, MOST_LANES).map((one) => one.name)];
  const hidden = snapshot.replicas.length + 2 - names.length;
  const traces = stagesIn(snapshot, drawn).map(({ name: stage, label: called }) => {
    const own = drawn.filter((one) => one.stage === stage);
    return {
      type: "bar", orientation: "h", name: stage,
      y: own.map((one) => one.lane), base: own.map((one) => place(one.start)), x: own.map((one) => one.seconds * 1000),
      width: stage === "swap" ? 0.78 : stage === "discover" ? 0.14 : 0.46,
      // The outline keeps a few milliseconds visible in a window of minutes.
      marker: { color: theme[stage], line: { width: stage === "discover" ? 0 : 1.2, color: theme[stage] } },
      customdata: own.map((one) => [one.version, one.seconds, one.nbytes]),
      hoverinfo: "text",
      hovertext: own.map((one) => lines(
        `<b>${called}</b> of version ${one.version}, ${label(names[one.lane])}`,
        `${duration(one.seconds)}${one.nbytes ? `, ${bytes(one.nbytes)}` : ""}`, clock(one.start),
      )),
    };
  });
  const commits = dated.slice(-300);
  const numbered = apart(commits, (to - from) * (theme.narrow ? 0.15 : 0.05));
  traces.push({
    type: "scatter", mode: "markers+text", name: "commit",
    text: commits.map((one) => (numbered.has(one.version) ? `\u2002${one.version}` : "")), textposition: "middle right", textfont: { size: 11, color: theme.faint },
    x: commits.map((one) => place(one.time)), y: commits.map(() => 1),
    marker: {
      size: commits.map((one) => (one.kind === "delta" ? 8 : 11)), color: theme.ink,
      symbol: commits.map((one) => ({ delta: "diamond", fence: "line-ns-open" })[one.kind] ?? "diamond-wide"),
      line: { width: commits.map((one) => (one.kind === "fence" ? 2 : 1)), color: theme.card },
    },
    customdata: commits.map((one) => one.version), hoverinfo: "text",
    hovertext: commits.map((one) => lines(`<b>commit</b> of version ${one.version} (${one.kind})`, clock(one.time))),
  });
  const wide = Math.max(...names.map((name) => Array.from(plain(name, 18)).length));
  return {
    traces,
    caption: `Diamonds are commits: from then on, a version exists. Each lane uses its own machine's clock.${hidden ? ` ${counted(hidden, "more replica")} in the table.` : ""}`,
    layout: layoutOf(theme, 86 + names.length * (names.length > 16 ? 18 : names.length > 8 ? 28 : 46), {
      barmode: "overlay", bargap: 0, margin: { l: Math.min(150, 20 + wide * 7.2), b: 44 }, uirevision: choice,
      xaxis: { ...byTime, range: [place(from), place(to)], nticks: theme.narrow ? 3 : 9 },
      yaxis: {
        range: [names.length - 0.45, -0.55], tickmode: "array", tickvals: names.map((_, index) => index),
        ticktext: names.map((name) => label(name, 18)), fixedrange: true, showgrid: false, tickfont: { size: names.length > 16 ? 11 : 13, color: theme.ink },
      },
      shapes: names.slice(1).map((_, index) => ({
        type: "line", xref: "paper", x0: 0, x1: 1, y0: index + 0.5, y1: index + 0.5, line: { color: theme.grid, width: 1 },
      })),
    }),
  };
}
