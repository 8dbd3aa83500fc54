// The pictures: from the data of a run to what plotly draws. Pure: touches no document.
//
// Each function returns { traces, layout, caption }, or { empty } with what to say where there is nothing to draw.
"use strict";

const PUBLISHING = ["capture", "encode", "upload"];
const FOLLOWING = ["discover", "fetch", "verify", "apply", "stage", "swap"];
const STAGES = [...PUBLISHING, ...FOLLOWING];
const DASHES = ["solid", "dash", "dot", "dashdot"];
const MANY_SPANS = 4000; // more than this is drawn only within the window
const FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif';

// --- what all of them share --------------------------------------------------------------------------------------

function layoutOf(theme, height, rest = {}) {
  const { margin, xaxis, yaxis, ...others } = rest;
  const axis = {
    gridcolor: theme.grid, linecolor: theme.line, zeroline: false, tickfont: { size: 12 }, automargin: false,
    title: { font: { size: 12 }, standoff: 6 },
  };
  return {
    height, autosize: true, showlegend: false, hovermode: "closest", dragmode: theme.touch ? false : "zoom",
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    margin: { l: theme.narrow ? 52 : 62, r: 12, t: 10, b: 38, ...margin },
    font: { family: FONT, size: 12, color: theme.soft },
    hoverlabel: {
      bgcolor: theme.card, bordercolor: theme.line, align: "left", namelength: -1,
      font: { family: FONT, size: 13, color: theme.ink },
    },
    xaxis: { ...axis, showgrid: false, ...xaxis },
    yaxis: { ...axis, ...yaxis },
    ...others,
  };
}

const byTime = { type: "date", hoverformat: "%H:%M:%S.%L", tickangle: 0 };

function versionAxis(versions, theme) {
  const first = versions[0].version, last = versions[versions.length - 1].version;
  const pad = Math.max(0.6, (last - first) * 0.02);
  return {
    title: { text: "version", font: { size: 12, color: theme.faint }, standoff: 4 },
    range: [first - pad, last + pad], tickformat: "d", nticks: theme.narrow ? 5 : 9,
    ...(last - first < 6 ? { dtick: 1 } : {}),
  };
}

/** Round numbers of bytes up to a size. */
function byteTicks(most) {
  const rough = Math.max(most, 1) / 4, unit = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((one) => one * unit >= rough) * unit;
  const values = [];
  for (let value = 0; value <= most * 1.001; value += step) values.push(value);
  return { tickmode: "array", tickvals: values, ticktext: values.map(bytes) };
}

function logTicks(least, most) {
  const values = [];
  const between = most / least < 30 ? [1, 2, 5] : [1];
  for (let power = Math.floor(Math.log10(least)); power <= Math.ceil(Math.log10(most)); power++) {
    values.push(...between.map((one) => one * 10 ** power));
  }
  return { tickmode: "array", tickvals: values, ticktext: values.map(bytes) };
}

function lines(...texts) {
  return texts.filter((text) => text).join("<br>");
}

/** One colour and one kind of line for each replica, the same in all pictures. */
function lookOf(index, theme) {
  const count = theme.replicas.length;
  return { color: theme.replicas[index % count], dash: DASHES[Math.floor(index / count) % DASHES.length] };
}

function weightsOf(versions) {
  return versions.filter((one) => one.kind === "delta" || one.kind === "anchor");
}

// --- the timeline ------------------------------------------------------------------------------------------------

/** All spans, each with its lane: 0 the trainer, 1 the bucket, then the replicas. */
function lanesOf(picture) {
  const own = picture.spans.map((span) => ({ ...span, lane: span.stage === "upload" ? 1 : 0 }));
  return own.concat(...picture.replicas.map((one, index) => one.spans.map((span) => ({ ...span, lane: index + 2 }))));
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
  const traces = STAGES.filter((stage) => drawn.some((one) => one.stage === stage)).map((stage) => {
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
        `<b>${stage === "swap" ? "swap: the pause" : stage}</b> of version ${one.version}, ${label(names[one.lane])}`,
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

// --- versions over time ------------------------------------------------------------------------------------------

function stairs(picture, theme) {
  const dated = picture.versions.filter((one) => one.time !== null);
  if (!dated.length) return { empty: "No version yet." };
  const heard = picture.replicas.map((one) => one.heard);
  const last = dated[dated.length - 1];
  const known = Math.max(last.time, ...heard);
  // A little further than the last that is known, but not for days after the end of a run.
  const end = Math.max(known, Math.min(picture.at, known + Math.max(2, (known - dated[0].time) * 0.05)));
  const traces = [{
    type: "scatter", mode: "lines", name: "trainer", line: { shape: "hv", width: 2.5, color: theme.accent },
    x: [...dated.map((one) => place(one.time)), place(end)], y: [...dated.map((one) => one.version), last.version],
    fill: "tozeroy", fillcolor: theme.wash, hoverinfo: "text",
    hovertext: [...dated, last].map((one) => lines(`<b>trainer</b>: version ${one.version}`, clock(one.time))),
  }];
  picture.replicas.forEach((one, index) => {
    const steps = one.steps.filter(([, version]) => version >= picture.older);
    const points = [...steps, ...(one.reached >= picture.older ? [[one.heard, one.reached]] : [])].sort((a, b) => a[0] - b[0]);
    if (!points.length) return;
    const look = lookOf(index, theme);
    traces.push({
      type: "scatter", mode: points.length < 3 ? "lines+markers" : "lines", name: label(one.name),
      line: { shape: "hv", width: 1.8, color: look.color, dash: look.dash },
      marker: { size: 6, color: look.color },
      x: points.map(([time]) => place(time)), y: points.map(([, version]) => version), hoverinfo: "text",
      hovertext: points.map(([time, version]) => {
        const behind = Math.max(0, versionAt(dated, time) - version);
        const lag = behind ? `${counted(behind, "version")} behind` : "up to date";
        return lines(`<b>${label(one.name)}</b>: version ${version}, ${lag}`, clock(time));
      }),
    });
    const [since, version] = points[points.length - 1];
    if (end - since > 1) traces.push({  // what it serves as far as is known: it may have gone
      type: "scatter", mode: "lines", name: `${label(one.name)}, not heard of since`, showlegend: false, hoverinfo: "skip",
      line: { width: 1.8, color: look.color, dash: "dot" }, x: [place(since), place(end)], y: [version, version],
    });
  });
  const first = dated[0], pad = Math.max(0.5, (end - first.time) * 0.02);
  return {
    traces,
    caption: picture.replicas.length
      ? "What the trainer has committed, and what each replica serves: the gap is its lag."
      : "What the trainer has committed. No replica has been heard of yet.",
    layout: layoutOf(theme, 290, {
      showlegend: picture.replicas.length > 0 && picture.replicas.length <= 8,
      legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { size: 12, color: theme.soft } },
      margin: { t: picture.replicas.length ? 30 : 10 }, uirevision: "stairs",
      xaxis: { ...byTime, range: [place(first.time - pad), place(end + pad)], nticks: theme.narrow ? 3 : 6 },
      yaxis: {
        title: { text: "version", font: { size: 12, color: theme.faint }, standoff: 6 }, tickformat: "d", nticks: 6,
        ...(last.version - first.version < 6 ? { dtick: 1 } : {}),
        range: [first.version - 0.3, last.version + Math.max(0.5, (last.version - first.version) * 0.06)],
      },
    }),
  };
}

/** The newest version at a time. */
function versionAt(dated, time) {
  let low = 0, high = dated.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (dated[middle].time <= time) low = middle + 1;
    else high = middle;
  }
  return low ? dated[low - 1].version : dated[0].version;
}

// --- metrics -----------------------------------------------------------------------------------------------------

/** The names of all metrics, what people look for first. */
function metricNames(picture) {
  const names = [...new Set(picture.versions.flatMap((one) => Object.keys(one.metrics)))];
  const rank = (name) => (name === "reward" ? 0 : /reward/i.test(name) ? 1 : 2);
  return names.sort((a, b) => rank(a) - rank(b) || (a < b ? -1 : 1)).slice(0, 200);
}

function metric(picture, theme, name) {
  const own = picture.versions.filter((one) => Object.hasOwn(one.metrics, name ?? ""));
  const known = own.filter((one) => one.metrics[name] !== null);
  if (!known.length) return { empty: "The trainer publishes no metrics: publish(..., metrics={\"reward\": ...}) puts them here." };
  const values = known.map((one) => one.metrics[name]);
  const mean = (some) => some.reduce((sum, one) => sum + one, 0) / some.length;
  const traces = [{
    type: "scatter", mode: known.length > 300 ? "lines" : "lines+markers", name: label(name),
    x: own.map((one) => one.version), y: own.map((one) => one.metrics[name]), opacity: known.length < 10 ? 1 : 0.45,
    line: { width: 1.2, color: theme.accent }, marker: { size: known.length > 100 ? 3 : 5, color: theme.accent },
    hoverinfo: "text",
    hovertext: own.map((one) => lines(
      `<b>${label(name)}</b> ${one.metrics[name] === null ? "is no number" : figure(one.metrics[name])}`,
      `version ${one.version}${one.step === null ? "" : `, step ${one.step}`}`, one.time === null ? "" : clock(one.time),
    )),
  }];
  let caption = `${counted(known.length, "version")} so far.`;
  if (known.length >= 10) {
    const reach = Math.max(2, Math.round(known.length / 20)), fifth = Math.floor(known.length / 5);
    traces.push({
      type: "scatter", mode: "lines", name: "average", hoverinfo: "skip", line: { width: 2.6, color: theme.accent },
      x: known.map((one) => one.version),
      y: values.map((_, at) => mean(values.slice(Math.max(0, at - reach), at + reach + 1))),
    });
    caption = `On average ${figure(mean(values.slice(0, fifth)), 3)} in the first fifth, ${figure(mean(values.slice(-fifth)), 3)} in the last.`;
  }
  return {
    traces, caption,
    layout: layoutOf(theme, 290, { xaxis: versionAxis(picture.versions, theme), yaxis: { nticks: 6 }, uirevision: `metric ${name}` }),
  };
}

// --- bytes -------------------------------------------------------------------------------------------------------

function bytesPerVersion(picture, theme) {
  const sent = weightsOf(picture.versions).filter((one) => one.nbytes > 0);
  if (!sent.length || !picture.nbytes) return { empty: "No weights have been published yet." };
  const least = Math.min(...sent.map((one) => one.nbytes)), most = Math.max(picture.nbytes, ...sent.map((one) => one.nbytes));
  const traces = ["delta", "anchor"].map((kind) => ({ kind, own: sent.filter((one) => one.kind === kind) }))
    .filter(({ own }) => own.length).map(({ kind, own }) => ({
      type: "scatter", mode: kind === "anchor" ? "markers" : own.length > 400 ? "lines" : "lines+markers", name: kind,
      x: own.map((one) => one.version), y: own.map((one) => one.nbytes),
      line: { width: 1, color: own.length > 400 ? theme.accent : theme.accentLine },
      marker: {
        size: kind === "anchor" ? 10 : own.length > 200 ? 4 : 6, symbol: kind === "anchor" ? "diamond" : "circle",
        color: kind === "anchor" ? theme.ink : theme.accent,
      },
      hoverinfo: "text",
      hovertext: own.map((one) => lines(
        `<b>${bytes(one.nbytes)}</b>, ${kind} of version ${one.version}`,
        `${compared(one.nbytes, picture.nbytes)} than all weights`,
        kind === "delta" ? `${percent(one.changed / picture.parameters)} of the weights changed` : "",
      )),
    }));
  const deltas = sent.filter((one) => one.kind === "delta");
  const mean = deltas.reduce((sum, one) => sum + one.nbytes, 0) / (deltas.length || 1);
  return {
    traces,
    caption: deltas.length
      ? `A delta is ${bytes(mean)} on average, ${compared(mean, picture.nbytes)} than all weights.`
      : "Only an anchor so far: deltas come with the next versions.",
    layout: layoutOf(theme, 290, {
      uirevision: "bytes", xaxis: versionAxis(picture.versions, theme),
      yaxis: { type: "log", range: [Math.log10(least) - 0.25, Math.log10(most) + 0.3], ...logTicks(least, most) },
      shapes: [{
        type: "line", xref: "paper", x0: 0, x1: 1, y0: picture.nbytes, y1: picture.nbytes,
        line: { color: theme.soft, width: 1.5, dash: "dash" },
      }],
      annotations: [{
        xref: "paper", x: 1, xanchor: "right", y: Math.log10(picture.nbytes), yanchor: "bottom", showarrow: false,
        text: `all weights: ${bytes(picture.nbytes)}`, font: { size: 12, color: theme.soft },
      }],
    }),
  };
}

/** What was sent, and what it would have been without deltas, up to each version. */
function sums(picture) {
  const beside = new Map(picture.anchors.map((one) => [one.version, one.nbytes]));
  let sent = 0, full = 0, anchors = 0;
  return picture.versions.map((one) => {
    sent += one.nbytes;
    anchors += beside.get(one.version) ?? 0;
    full += one.kind === "delta" || one.kind === "anchor" ? picture.nbytes : 0;
    return { version: one.version, sent, full, stored: sent + anchors };
  });
}

function saving(picture, theme) {
  const rows = sums(picture);
  const end = rows[rows.length - 1];
  if (!end || !end.sent) return { empty: "No weights have been published yet." };
  const area = (name, key, line, fillcolor, text) => ({
    type: "scatter", mode: "lines", name, x: rows.map((one) => one.version), y: rows.map((one) => one[key]),
    line, hoverinfo: "text", hovertext: rows.map((one) => lines(`<b>${bytes(one[key])}</b> ${text}`, `up to version ${one.version}`)),
    ...(fillcolor ? { fill: "tozeroy", fillcolor } : {}),
  });
  const traces = [
    area("all weights each time", "full", { width: 1.5, color: theme.soft, dash: "dash" }, theme.greyWash, "with all weights each time"),
    area("sent", "sent", { width: 2.5, color: theme.accent }, theme.wash, "sent"),
  ];
  if (picture.anchors.length) {
    traces.push(area("with anchors beside", "stored", { width: 1.2, color: theme.accent, dash: "dot" }, "", "with the anchors beside the chain"));
  }
  const since = picture.older ? `Since version ${picture.older}: ` : "";
  return {
    traces,
    caption: `${since}${bytes(end.sent)} instead of ${bytes(end.full)} to each replica, ${compared(end.sent, end.full)}.`,
    layout: layoutOf(theme, 290, {
      uirevision: "saving", showlegend: true, xaxis: versionAxis(picture.versions, theme), margin: { t: 30 },
      legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { size: 12, color: theme.soft } },
      yaxis: { range: [0, Math.max(end.full, end.stored) * 1.06], ...byteTicks(Math.max(end.full, end.stored)) },
    }),
  };
}

// --- layers ------------------------------------------------------------------------------------------------------

function heatMap(picture, theme) {
  const { rows, versions, columns, every } = picture.heat;
  const there = columns.filter((one) => one !== null);
  if (!there.length) {
    return { empty: weightsOf(picture.versions).length > 1 ? "The deltas of these versions are no longer in the bucket." : "Comes with the first delta." };
  }
  const sorted = there.flat().sort((a, b) => a - b);
  const most = sorted[Math.floor((sorted.length - 1) * 0.99)] || sorted[sorted.length - 1] || 1e-6;
  const names = shortened(rows);
  const z = rows.map((_, row) => columns.map((column) => (column === null ? null : column[row])));
  const step = Math.ceil(rows.length / (theme.narrow ? 18 : 28));
  const shown = rows.map((_, index) => index).filter((index) => index % step === 0);
  const wide = Math.max(...shown.map((index) => Array.from(names[index]).length));
  const ticks = [0, most / 2, most];
  const kinds = new Map(picture.versions.map((one) => [one.version, one.kind]));
  const gone = versions.filter((version, index) => columns[index] === null && kinds.get(version) === "delta").length;
  return {
    traces: [{
      type: "heatmap", name: "changed", x: versions, y: rows.map((_, index) => index), z,
      zmin: 0, zmax: most, colorscale: theme.scale, hoverongaps: false,
      xgap: versions.length <= 80 && !theme.narrow ? 1 : 0, ygap: rows.length <= 40 ? 1 : 0, hoverinfo: "text",
      hovertext: rows.map((name, row) => versions.map((version, column) => (columns[column] === null ? "" : lines(
        `<b>${percent(columns[column][row])}</b> of ${label(name)} changed`, `version ${version}, ${large(picture.heat.parameters[row])} weights`,
      )))),
      colorbar: {
        thickness: 9, outlinewidth: 0, tickmode: "array", tickvals: ticks, ticktext: ticks.map(percent), tickfont: { size: 12 },
        ...(theme.narrow ? { orientation: "h", y: -0.18, yanchor: "top", len: 0.9 } : { len: 0.9, x: 1.01 }),
      },
    }],
    caption: [
      "The fraction of each layer's weights whose bits changed.",
      every > 1 ? `One version in ${every} is shown.` : "",
      gone ? `${counted(gone, "delta")} no longer in the bucket: a gap.` : "",
    ].filter(Boolean).join(" "),
    layout: layoutOf(theme, Math.min(620, Math.max(190, 78 + rows.length * 19)) + (theme.narrow ? 40 : 0), {
      margin: { l: Math.min(theme.narrow ? 118 : 190, 16 + wide * 6.8), r: theme.narrow ? 12 : 62, b: theme.narrow ? 78 : 40 }, uirevision: "heat",
      xaxis: { ...versionAxis(picture.versions, theme), range: [versions[0] - every / 2, versions[versions.length - 1] + every / 2] },
      yaxis: {
        range: [rows.length - 0.5, -0.5], tickmode: "array", tickvals: shown, showgrid: false,
        ticktext: shown.map((index) => label(names[index], theme.narrow ? 16 : 26)),
      },
    }),
  };
}

/** Without what all names begin with. */
function shortened(names) {
  const first = names[0].split(".");
  let same = 0;
  while (names.length > 1 && same < first.length - 1 && names.every((name) => name.split(".").length > same + 1 && name.split(".")[same] === first[same])) same++;
  const cut = names.map((name) => name.split(".").slice(same).join("."));
  return cut.map((name) => plain(/^model\./.test(name) ? name.slice(6) : name, 26));
}

// --- the chain ---------------------------------------------------------------------------------------------------

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
