// The pictures: from the data of a run to what plotly draws. Pure: touches no document.
//
// Each function returns { traces, layout, caption }, or { empty } with what to say where there is nothing to draw.
"use strict";

const DASHES = ["solid", "dash", "dot", "dashdot"];
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
