// The charts: from a snapshot of a run to plotly's traces and layouts. Pure: does not touch the document.
//
// Each function returns { traces, layout, caption }, or { empty } with a text if there is nothing to draw.
"use strict";

const MANY_REPLICAS = 8; // more than this: no legend, and pins are grouped
const DASHES = ["solid", "dash", "dot", "dashdot"];
const NO_DELTA = "No delta yet. The next version with changed weights adds one.";
const FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif';

// --- shared parts ------------------------------------------------------------------------------------------------

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

/** Ticks at round numbers of bytes, from 0 to `most`. */
function byteTicks(most) {
  const rough = Math.max(most, 1) / 4, unit = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((one) => one * unit >= rough) * unit;
  const values = [];
  for (let value = 0; value <= most * 1.001; value += step) values.push(value);
  return { tickmode: "array", tickvals: values, ticktext: values.map(bytes) };
}

/** Ticks at powers of ten. `zero`, if it is not 0, is the place of 0 bytes below all others. */
function logTicks(least, most, zero) {
  const values = [];
  const between = most / least < 30 ? [1, 2, 5] : [1];
  for (let power = Math.floor(Math.log10(least)); power <= Math.ceil(Math.log10(most)); power++) {
    values.push(...between.map((one) => one * 10 ** power));
  }
  const shown = zero ? [zero, ...values.filter((value) => value > zero * 2)] : values;
  return { tickmode: "array", tickvals: shown, ticktext: shown.map((value) => bytes(value === zero ? 0 : value)) };
}

function lines(...texts) {
  return texts.filter((text) => text).join("<br>");
}

/** The colour and dash of a replica, the same in all charts. */
function lookOf(index, theme) {
  const count = theme.replicas.length;
  return { color: theme.replicas[index % count], dash: DASHES[Math.floor(index / count) % DASHES.length] };
}

function weightsOf(versions) {
  return versions.filter((one) => one.kind === "delta" || one.kind === "anchor");
}

// --- versions over time ------------------------------------------------------------------------------------------

function stairs(snapshot, theme) {
  const dated = snapshot.versions.filter((one) => one.time !== null);
  if (!dated.length) return { empty: "No version has a valid time." };
  const heard = snapshot.replicas.map((one) => one.heard);
  const last = dated[dated.length - 1];
  const known = Math.max(last.time, ...heard);
  // A little past the last event, but not days past the end of a run.
  const end = Math.max(known, Math.min(snapshot.at, known + Math.max(2, (known - dated[0].time) * 0.05)));
  const many = snapshot.replicas.length > MANY_REPLICAS;
  const traces = [{
    type: "scatter", mode: "lines", name: "trainer", line: { shape: "hv", width: 2.5, color: theme.accent },
    x: [...dated.map((one) => place(one.time)), place(end)], y: [...dated.map((one) => one.version), last.version],
    fill: "tozeroy", fillcolor: theme.wash, hoverinfo: "text",
    hovertext: [...dated, last].map((one) => lines(`<b>trainer</b>: version ${one.version}`, clock(one.time))),
  }];
  snapshot.replicas.forEach((one, index) => {
    const steps = one.steps.filter(([, version]) => version >= snapshot.older);
    const points = [...steps, ...(one.reached >= snapshot.older ? [[one.heard, one.reached]] : [])].sort((a, b) => a[0] - b[0]);
    if (!points.length) return;
    const look = lookOf(index, theme);
    traces.push({
      type: "scatter", mode: points.length < 3 ? "lines+markers" : "lines", name: label(one.name),
      line: { shape: "hv", width: many ? 1 : 1.8, color: look.color, dash: look.dash },
      marker: { size: 6, color: look.color },
      x: points.map(([time]) => place(time)), y: points.map(([, version]) => version), hoverinfo: "text",
      hovertext: points.map(([time, version]) => {
        const behind = Math.max(0, versionAt(dated, time) - version);
        const lag = behind ? `${counted(behind, "version")} behind` : "up to date";
        return lines(`<b>${label(one.name)}</b>: version ${version}, ${lag}`, clock(time));
      }),
    });
    const [since, version] = points[points.length - 1];
    if (end - since > 1) traces.push({  // since its last heartbeat, the replica may have moved on or died
      type: "scatter", mode: "lines", name: `${label(one.name)}, after its last heartbeat`, showlegend: false, hoverinfo: "skip",
      line: { width: 1.8, color: look.color, dash: "dot" }, x: [place(since), place(end)], y: [version, version],
    });
  });
  const first = dated[0], pad = Math.max(0.5, (end - first.time) * 0.02);
  return {
    traces,
    caption: snapshot.replicas.length
      ? `Versions that the trainer committed and that each replica holds or serves. The gap is a replica's lag.${many ? " Each thin line is a replica." : ""}`
      : "Versions that the trainer committed. No replica follows this run yet.",
    layout: layoutOf(theme, 290, {
      showlegend: snapshot.replicas.length > 0 && !many,
      legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { size: 12, color: theme.soft } },
      margin: { t: snapshot.replicas.length && !many ? 30 : 10 }, uirevision: "stairs",
      xaxis: { ...byTime, range: [place(first.time - pad), place(end + pad)], nticks: theme.narrow ? 3 : 6 },
      yaxis: {
        title: { text: "version", font: { size: 12, color: theme.faint }, standoff: 6 }, tickformat: "d", nticks: 6,
        ...(last.version - first.version < 6 ? { dtick: 1 } : {}),
        range: [first.version - 0.3, last.version + Math.max(0.5, (last.version - first.version) * 0.06)],
      },
    }),
  };
}

/** The newest version at a given time. */
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

/** The names of all metrics, rewards first. */
function metricNames(snapshot) {
  const names = [...new Set(snapshot.versions.flatMap((one) => Object.keys(one.metrics)))];
  const rank = (name) => (name === "reward" ? 0 : /reward/i.test(name) ? 1 : 2);
  return names.sort((a, b) => rank(a) - rank(b) || (a < b ? -1 : 1)).slice(0, 200);
}

function metric(snapshot, theme, name) {
  const own = snapshot.versions.filter((one) => Object.hasOwn(one.metrics, name ?? ""));
  const known = own.filter((one) => one.metrics[name] !== null);
  if (!known.length) return { empty: "The trainer has published no metrics. To see them here: publish(..., metrics={\"reward\": 0.5})" };
  const values = known.map((one) => one.metrics[name]);
  const mean = (some) => some.reduce((sum, one) => sum + one, 0) / some.length;
  const traces = [{
    type: "scatter", mode: known.length > 300 ? "lines" : "lines+markers", name: label(name),
    x: own.map((one) => one.version), y: own.map((one) => one.metrics[name]), opacity: known.length < 10 ? 1 : 0.45,
    line: { width: 1.2, color: theme.accent }, marker: { size: known.length > 100 ? 3 : 5, color: theme.accent },
    hoverinfo: "text",
    hovertext: own.map((one) => lines(
      `<b>${label(name)}</b> ${one.metrics[name] === null ? "is not a number" : figure(one.metrics[name])}`,
      `version ${one.version}${one.step === null ? "" : `, step ${one.step}`}`, one.time === null ? "" : clock(one.time),
    )),
  }];
  let caption = `${counted(known.length, "version")} with this metric so far.`;
  if (known.length >= 10) {
    const reach = Math.max(2, Math.round(known.length / 20)), fifth = Math.floor(known.length / 5);
    traces.push({
      type: "scatter", mode: "lines", name: "average", hoverinfo: "skip", line: { width: 2.6, color: theme.accent },
      x: known.map((one) => one.version),
      y: values.map((_, at) => mean(values.slice(Math.max(0, at - reach), at + reach + 1))),
    });
    caption = `Average: ${figure(mean(values.slice(0, fifth)), 3)} in the first fifth of the versions, ${figure(mean(values.slice(-fifth)), 3)} in the last.`;
  }
  return {
    traces, caption,
    layout: layoutOf(theme, 290, { xaxis: versionAxis(snapshot.versions, theme), yaxis: { nticks: 6 }, uirevision: `metric ${name}` }),
  };
}

// --- bytes -------------------------------------------------------------------------------------------------------

function bytesPerVersion(snapshot, theme) {
  const sent = weightsOf(snapshot.versions);
  const deltas = sent.filter((one) => one.kind === "delta");
  if (!deltas.length || !snapshot.nbytes) return { empty: NO_DELTA };
  const sizes = sent.map((one) => one.nbytes).filter((nbytes) => nbytes > 0);
  const least = Math.min(snapshot.nbytes, ...sizes), most = Math.max(snapshot.nbytes, ...sizes);
  const empty = sizes.length < sent.length;
  const zero = least / 3; // where 0 bytes are drawn: the axis is logarithmic
  const traces = ["delta", "anchor"].map((kind) => ({ kind, own: sent.filter((one) => one.kind === kind) }))
    .filter(({ own }) => own.length).map(({ kind, own }) => ({
      type: "scatter", mode: kind === "anchor" ? "markers" : own.length > 400 ? "lines" : "lines+markers", name: kind,
      x: own.map((one) => one.version), y: own.map((one) => one.nbytes || zero),
      line: { width: 1, color: own.length > 400 ? theme.accent : theme.accentLine },
      marker: {
        size: kind === "anchor" ? 10 : own.length > 200 ? 4 : 6, symbol: kind === "anchor" ? "diamond" : "circle",
        color: kind === "anchor" ? theme.ink : theme.accent,
      },
      hoverinfo: "text",
      hovertext: own.map((one) => lines(
        `<b>${bytes(one.nbytes)}</b>, ${kind} of version ${one.version}`,
        one.nbytes ? `${compared(one.nbytes, snapshot.nbytes)} than all weights` : "",
        kind === "delta" ? `${percent(one.changed / snapshot.parameters)} of the weights changed` : "",
      )),
    }));
  const mean = deltas.reduce((sum, one) => sum + one.nbytes, 0) / deltas.length;
  return {
    traces,
    caption: `Average delta: ${bytes(mean)}${mean ? `, ${compared(mean, snapshot.nbytes)} than all weights` : ""}.`,
    layout: layoutOf(theme, 290, {
      uirevision: "bytes", xaxis: versionAxis(snapshot.versions, theme),
      showlegend: traces.length > 1, margin: { t: traces.length > 1 ? 30 : 10 },
      legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { size: 12, color: theme.soft } },
      yaxis: { type: "log", range: [Math.log10(empty ? zero : least) - 0.25, Math.log10(most) + 0.3], ...logTicks(least, most, empty ? zero : 0) },
      shapes: [{
        type: "line", xref: "paper", x0: 0, x1: 1, y0: snapshot.nbytes, y1: snapshot.nbytes,
        line: { color: theme.soft, width: 1.5, dash: "dash" },
      }],
      annotations: [{
        xref: "paper", x: 1, xanchor: "right", y: Math.log10(snapshot.nbytes), yanchor: "bottom", showarrow: false,
        text: `all weights: ${bytes(snapshot.nbytes)}`, font: { size: 12, color: theme.soft },
      }],
    }),
  };
}

/** Bytes sent up to each version, and the bytes of a full sync for each version instead. */
function sums(snapshot) {
  const beside = new Map(snapshot.anchors.map((one) => [one.version, one.nbytes]));
  let sent = 0, full = 0, anchors = 0;
  return snapshot.versions.map((one) => {
    sent += one.nbytes;
    anchors += beside.get(one.version) ?? 0;
    full += one.kind === "delta" || one.kind === "anchor" ? snapshot.nbytes : 0;
    return { version: one.version, sent, full, stored: sent + anchors };
  });
}

function saving(snapshot, theme) {
  const rows = sums(snapshot);
  const end = rows[rows.length - 1];
  if (!end || !end.sent || !snapshot.versions.some((one) => one.kind === "delta")) return { empty: NO_DELTA };
  const area = (name, key, line, fillcolor, text) => ({
    type: "scatter", mode: "lines", name, x: rows.map((one) => one.version), y: rows.map((one) => one[key]),
    line, hoverinfo: "text", hovertext: rows.map((one) => lines(`<b>${bytes(one[key])}</b> ${text}`, `up to version ${one.version}`)),
    ...(fillcolor ? { fill: "tozeroy", fillcolor } : {}),
  });
  const traces = [
    area("full sync", "full", { width: 1.5, color: theme.soft, dash: "dash" }, theme.greyWash, "with a full sync of each version"),
    area("sent", "sent", { width: 2.5, color: theme.accent }, theme.wash, "sent"),
  ];
  if (snapshot.anchors.length) {
    traces.push(area("sent + anchors", "stored", { width: 1.2, color: theme.accent, dash: "dot" }, "", "with the anchors beside the chain"));
  }
  const since = snapshot.older ? `Since version ${snapshot.older}: ` : "";
  return {
    traces,
    caption: `${since}${bytes(end.sent)} sent to each replica instead of ${bytes(end.full)}, ${compared(end.sent, end.full)}.`,
    layout: layoutOf(theme, 290, {
      uirevision: "saving", showlegend: true, xaxis: versionAxis(snapshot.versions, theme), margin: { t: 30 },
      legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", font: { size: 12, color: theme.soft } },
      yaxis: { range: [0, Math.max(end.full, end.stored) * 1.06], ...byteTicks(Math.max(end.full, end.stored)) },
    }),
  };
}

// --- layers ------------------------------------------------------------------------------------------------------

function heatMap(snapshot, theme) {
  const { rows, versions, columns, every } = snapshot.heat;
  const there = columns.filter((one) => one !== null);
  if (!there.length) {
    return { empty: weightsOf(snapshot.versions).length > 1 ? "The deltas of these versions are no longer in the bucket." : NO_DELTA };
  }
  const sorted = there.flat().sort((a, b) => a - b);
  const most = sorted[Math.floor((sorted.length - 1) * 0.99)] || sorted[sorted.length - 1] || 1e-6;
  const names = shortened(rows);
  const z = rows.map((_, row) => columns.map((column) => (column === null ? null : column[row])));
  const step = Math.ceil(rows.length / (theme.narrow ? 18 : 28));
  const shown = rows.map((_, index) => index).filter((index) => index % step === 0);
  const wide = Math.max(...shown.map((index) => Array.from(names[index]).length));
  const height = Math.min(620, Math.max(190, 78 + rows.length * 19));
  const ticks = [0, most / 2, most];
  const kinds = new Map(snapshot.versions.map((one) => [one.version, one.kind]));
  const gone = versions.filter((version, index) => columns[index] === null && kinds.get(version) === "delta").length;
  return {
    traces: [{
      type: "heatmap", name: "changed", x: versions, y: rows.map((_, index) => index), z,
      zmin: 0, zmax: most, colorscale: theme.scale, hoverongaps: false,
      xgap: versions.length <= 80 && !theme.narrow ? 1 : 0, ygap: rows.length <= 40 ? 1 : 0, hoverinfo: "text",
      hovertext: rows.map((name, row) => versions.map((version, column) => (columns[column] === null ? "" : lines(
        `<b>${percent(columns[column][row])}</b> of ${label(name)} changed`, `version ${version}, ${large(snapshot.heat.parameters[row])} weights`,
      )))),
      colorbar: {
        thickness: 9, outlinewidth: 0, tickmode: "array", tickvals: ticks, ticktext: ticks.map(percent), tickfont: { size: 12 },
        ...(theme.narrow ? { orientation: "h", y: -40 / (height - 48), yanchor: "top", len: 0.9 } : { len: 0.9, x: 1.01 }),
      },
    }],
    caption: [
      "Share of each layer's weights whose bits changed.",
      every > 1 ? `One version in ${every} is shown.` : "",
      gone ? `Gaps: ${counted(gone, "delta")} no longer in the bucket.` : "",
    ].filter(Boolean).join(" "),
    layout: layoutOf(theme, height + (theme.narrow ? 40 : 0), {
      margin: { l: Math.min(theme.narrow ? 118 : 190, 16 + wide * 6.8), r: theme.narrow ? 12 : 62, b: theme.narrow ? 78 : 40 }, uirevision: "heat",
      xaxis: { ...versionAxis(snapshot.versions, theme), range: [versions[0] - every / 2, versions[versions.length - 1] + every / 2] },
      yaxis: {
        range: [rows.length - 0.5, -0.5], tickmode: "array", tickvals: shown, showgrid: false,
        ticktext: shown.map((index) => label(names[index], theme.narrow ? 16 : 26)),
      },
    }),
  };
}

/** Names without their common prefix. */
function shortened(names) {
  const first = names[0].split(".");
  let same = 0;
  while (names.length > 1 && same < first.length - 1 && names.every((name) => name.split(".").length > same + 1 && name.split(".")[same] === first[same])) same++;
  const cut = names.map((name) => name.split(".").slice(same).join("."));
  return cut.map((name) => plain(/^model\./.test(name) ? name.slice(6) : name, 26));
}
