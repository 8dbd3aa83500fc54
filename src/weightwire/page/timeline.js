// The timeline: every stage of every version, in a lane for each machine. Pure, as charts.js is.
"use strict";

const MANY_SPANS = 4000; // more than this is drawn only within the window

/** All spans, each with its lane: 0 the trainer, 1 the bucket, then the replicas. */
function lanesOf(picture) {
  const own = picture.spans.map((span) => ({ ...span, lane: span.stage === "upload" ? 1 : 0 }));
  return own.concat(...picture.replicas.map((one, index) => one.spans.map((span) => ({ ...span, lane: index + 2 }))));
}

/** The stages that some spans have, in the order of a version's way. */
function stagesIn(picture, spans) {
  return picture.stages.filter((stage) => spans.some((one) => one.stage === stage.name));
}

/** From when to when, in seconds: some of the newest versions, a minute, or all there is. */
function windowOf(picture, spans, choice) {
  const dated = picture.versions.filter((one) => one.time !== null);
  const ends = spans.map((one) => one.start + one.seconds).concat(dated.map((one) => one.time));
  const last = Math.max(...ends);
  const known = [...new Set(spans.map((one) => one.version))].sort((a, b) => a - b);
  let first = Math.min(...spans.map((one) => one.start), last);
  if (choice === "minute") first = last - 60;
  if (choice === "one" || choice === "ten") {
    const since = known[Math.max(0, known.length - (choice === "one" ? 1 : 10))];
    first = Math.min(...spans.filter((one) => one.version >= since && one.stage !== "discover").map((one) => one.start));
  }
  const pad = Math.max((last - first) * 0.03, 0.005);
  return [first - pad, last + pad];
}

function timeline(picture, theme, choice) {
  const spans = lanesOf(picture);
  const dated = picture.versions.filter((one) => one.time !== null);
  if (!spans.length) return { empty: "No stage times yet: they come with the first version that is published." };
  const [from, to] = windowOf(picture, spans, choice);
  const near = (one) => one.start + one.seconds >= from && one.start <= to;
  const drawn = spans.length > MANY_SPANS ? spans.filter(near) : spans;
  const names = ["trainer", "bucket", ...picture.replicas.map((one) => one.name)];
  const traces = stagesIn(picture, drawn).map(({ name: stage, label: called }) => {
    const own = drawn.filter((one) => one.stage === stage);
    return {
      type: "bar", orientation: "h", name: stage,
      y: own.map((one) => one.lane), base: own.map((one) => place(one.start)), x: own.map((one) => one.seconds * 1000),
      width: stage === "swap" ? 0.78 : stage === "discover" ? 0.14 : 0.46,
      // The outline is what keeps a few milliseconds visible in a minute.
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
  const numbered = commits.filter((one) => one.time >= from && one.time <= to).length <= (theme.narrow ? 5 : 16);
  traces.push({
    type: "scatter", mode: "markers+text", name: "commit",
    text: commits.map((one) => (numbered ? `\u2002${one.version}` : "")), textposition: "middle right", textfont: { size: 11, color: theme.faint },
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
    caption: "Each by the clock of its own machine. The diamonds are commits: from then on a version exists.",
    layout: layoutOf(theme, 74 + names.length * (names.length > 8 ? 30 : 46), {
      barmode: "overlay", bargap: 0, margin: { l: Math.min(150, 20 + wide * 7.2), b: 32 }, uirevision: choice,
      xaxis: { ...byTime, range: [place(from), place(to)], nticks: theme.narrow ? 3 : 9 },
      yaxis: {
        range: [names.length - 0.45, -0.55], tickmode: "array", tickvals: names.map((_, index) => index),
        ticktext: names.map((name) => label(name, 18)), fixedrange: true, showgrid: false, tickfont: { size: 13, color: theme.ink },
      },
      shapes: names.slice(1).map((_, index) => ({
        type: "line", xref: "paper", x0: 0, x1: 1, y0: index + 0.5, y1: index + 0.5, line: { color: theme.grid, width: 1 },
      })),
    }),
  };
}
