// The page around the charts: cards, alerts, the table of replicas; and the polling of a live run.
//
// An exported page holds its snapshot of the run in the document. A live page requests a new one every second.
"use strict";

const POLL_EVERY = 1000; // milliseconds
const FEW = 3; // replicas named in an alert
const LONG_PAUSE = 1; // seconds: more than a patch usually takes
const find = (selector) => document.querySelector(selector);

const embedded = find("#snapshot");
const view = { timeline: "ten", chain: "newest", metric: null, theme: stored("weightwire-theme") ?? "auto" };
let snapshot = null;
let tag = null;
let lost = ""; // why updates of the snapshot stopped
let skew = 0; // seconds that the server's clock is ahead of this one
const drawn = new Map(); // what each element shows now

// --- elements ----------------------------------------------------------------------------------------------------

function stored(key) {
  try {
    return localStorage.getItem(key);
  } catch {
    return null; // storage is disabled
  }
}

function store(key, value) {
  try {
    localStorage.setItem(key, value);
  } catch {
    // Storage is disabled: the choice lasts until the page is closed.
  }
}

/** An element with children. A string becomes text, never HTML. */
function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

/** Replaces the children of an element, unless they are the same: a selection or a screen reader would lose its place. */
function fill(place, elements) {
  const next = elements.map((one) => one.outerHTML).join("");
  if (drawn.get(place) === next) return;
  drawn.set(place, next);
  place.replaceChildren(...elements);
}

function say(place, text) {
  if (place.textContent !== text) place.textContent = text;
}

function now() {
  return embedded ? snapshot.at : Date.now() / 1000 + skew;
}

// --- colours -----------------------------------------------------------------------------------------------------

const THEMES = ["auto", "light", "dark"];

function applyTheme() {
  if (view.theme === "auto") document.documentElement.removeAttribute("data-theme");
  else document.documentElement.setAttribute("data-theme", view.theme);
  say(find("#theme"), { auto: "Auto", light: "Light", dark: "Dark" }[view.theme]);
  find("#theme").setAttribute("aria-label", `Theme: ${view.theme}`);
}

/** The colours of the style sheet in the form that plotly takes. */
function colours() {
  const probe = element("span");
  document.body.append(probe);
  const read = (name) => {
    probe.style.color = `var(--${name}, var(--faint))`; // a new stage may not have a colour yet
    return getComputedStyle(probe).color;
  };
  const faded = (colour, alpha) => colour.replace(/^rgb\((.*)\)$/, `rgba($1, ${alpha})`);
  const theme = {};
  for (const name of ["ink", "soft", "faint", "line", "grid", "card", "accent", "good", "pause"]) theme[name] = read(name);
  for (const { name } of snapshot.stages) theme[name] = read(name);
  theme.replicas = ["r0", "r1", "r2", "r3", "r4", "r5"].map(read);
  theme.scale = ["h0", "h1", "h2", "h3", "h4"].map((name, index) => [index / 4, read(name)]);
  theme.wash = faded(theme.accent, 0.1);
  theme.greyWash = faded(theme.faint, 0.08);
  theme.accentLine = faded(theme.accent, 0.35);
  probe.remove();
  theme.narrow = window.innerWidth <= 560;
  theme.touch = matchMedia("(pointer: coarse)").matches;
  return theme;
}

// --- texts -------------------------------------------------------------------------------------------------------

function head() {
  return snapshot.versions[snapshot.versions.length - 1];
}

function behind(replica) {
  return Math.max(0, head().version - replica.reached);
}

function figureCard(name, value, more, look = "") {
  return element("div", { class: `figure ${look}` }, element("div", { class: "name" }, name),
    element("div", { class: "value" }, value), element("div", { class: "more" }, more));
}

function cards(rows) {
  const newest = head();
  const deltas = snapshot.versions.filter((one) => one.kind === "delta");
  const delta = deltas[deltas.length - 1];
  const total = sums(snapshot).pop();
  const when = newest.time === null ? "" : ago(now() - newest.time);
  const step = newest.step === null ? (newest.kind === "delta" ? "" : newest.kind) : `step ${newest.step}`;
  const smaller = delta && delta.nbytes ? `${compared(delta.nbytes, snapshot.nbytes)} than all ${bytes(snapshot.nbytes)}` : "no weight changed";
  return [
    figureCard("Newest version", String(newest.version), [step, when].filter(Boolean).join(", "), "accent"),
    figureCard("Newest delta", delta ? bytes(delta.nbytes) : "\u2013", delta ? smaller : "no delta yet"),
    figureCard("Weights changed", delta ? percent(delta.changed / snapshot.parameters) : "\u2013",
      delta ? `${large(delta.changed)} of ${large(snapshot.parameters)}` : "no delta yet"),
    figureCard("Saved so far", delta && total.sent ? times(total.full / total.sent) : "\u2013",
      delta && total.sent ? `${bytes(total.sent)} instead of ${bytes(total.full)}` : "no delta yet"),
    replicaCard(rows),
    pauseCard(),
  ];
}

function replicaCard(rows) {
  const all = rows.length + snapshot.unshown;
  const alive = rows.filter(({ status }) => status !== "stopped" && status !== "no heartbeat");
  if (!all) return figureCard("Replicas", "none", "no replica follows this run yet");
  const attention = tally(rows, (status) => ATTENTION.has(status));
  if (!alive.length) return figureCard("Replicas", `0 of ${all}`, attention || "none is alive", attention ? "bad" : "");
  const most = Math.max(...alive.map(({ replica }) => behind(replica)));
  const lag = most ? `at most ${counted(most, "version")} behind` : "all up to date";
  return figureCard("Replicas", `${alive.length} of ${all}`, attention || `alive, ${lag}`, attention ? "bad" : "");
}

function pauseCard() {
  const pauses = snapshot.replicas.flatMap((one) => one.spans.filter((span) => span.stage === "swap"));
  const last = pauses.length
    ? pauses.reduce((latest, one) => (one.start > latest.start ? one : latest)).seconds
    : Math.max(-1, ...snapshot.replicas.map((one) => one.pause ?? -1));
  if (last < 0) return figureCard("Last pause", "\u2013", "no engine has swapped yet");
  const longest = pauses.reduce((most, one) => Math.max(most, one.seconds), last);
  const more = pauses.length > 1 ? `longest of ${counted(pauses.length, "swap")}: ${duration(longest)}` : "of one engine";
  return figureCard("Last pause", duration(last), more, last > LONG_PAUSE ? "pause" : "");
}

function notice(bad, title, text) {
  return element("div", { class: bad ? "alert bad" : "alert" }, element("b", {}, title), ` ${plain(text)}`);
}

function alerts(rows) {
  const made = [];
  const add = (...all) => made.push(notice(...all));
  if (lost) add(true, "Not live.", lost);
  if (snapshot.trouble) add(true, "Cannot read the bucket. This page shows what it read last.", snapshot.trouble);
  const troubled = rows.filter(({ replica }) => replica.trouble);
  for (const { replica } of troubled.slice(0, FEW)) add(true, `${plain(replica.name)} is in trouble:`, replica.trouble);
  if (troubled.length > FEW) add(true, `${counted(troubled.length - FEW, "more replica")} in trouble:`, "see the table of replicas.");
  const complaints = rows.map((row) => [row, complaint(row, head()?.version)]).filter(([, text]) => text);
  if (complaints.length) add(false, "Check these replicas:", several(complaints.map(([{ replica }, text]) => `${plain(replica.name, 40)} ${text}`), FEW));
  for (const note of snapshot.notes) add(false, "", note);
  if (snapshot.mode !== "strict") add(false, "Single-writer mode:", "the store cannot lock out a second publisher. Make sure that only one runs.");
  return made;
}

function replicaTable(rows) {
  const troubled = rows.some(({ replica }) => replica.trouble);
  const names = ["replica", "status", "version", "serves", "behind", "heartbeat", "last pause", "host", ...(troubled ? ["trouble"] : [])];
  const number = new Set(["version", "serves", "behind", "heartbeat", "last pause"]);
  const cell = (name, content, extra = "") => element(name === "replica" ? "th" : "td", {
    class: `${number.has(name) ? "number" : "text"} ${extra}`, "data-name": name, ...(name === "replica" ? { scope: "row" } : {}),
  }, ...[content].flat());
  const lines = rows.map(({ replica, index, status }) => {
    const dot = element("span", { class: "dot", style: `background: var(--r${index % 6})`, "aria-hidden": "true" });
    return element("tr", { class: status === "stopped" || status === "no heartbeat" ? "gone" : "" },
      cell("replica", [dot, plain(replica.name, 40)]),
      cell("status", status, ATTENTION.has(status) ? "attention" : ""),
      cell("version", replica.version < 0 ? "\u2013" : String(replica.version)),
      cell("serves", replica.served === null ? "\u2013" : replica.served < 0 ? "none" : String(replica.served)),
      cell("behind", replica.reached < 0 ? "\u2013" : behind(replica).toLocaleString("en")),
      cell("heartbeat", ago(now() - replica.heard)),
      cell("last pause", replica.pause === null ? "\u2013" : duration(replica.pause)),
      cell("host", plain(replica.host || "\u2013", 40)),
      ...(troubled ? [cell("trouble", plain(replica.trouble || "\u2013"), replica.trouble ? "attention" : "none")] : []));
  });
  const heading = element("tr", {}, ...names.map((name) => element("th", { scope: "col", class: number.has(name) ? "number" : "" }, name)));
  return element("table", { class: rows.length > MANY_REPLICAS ? "compact" : "" }, element("thead", {}, heading), element("tbody", {}, ...lines));
}

function replicaCaption(rows) {
  if (!rows.length) return `No replica follows this run yet. Start one with: weightwire follow ${plain(snapshot.url)} --into DIR`;
  const stale = rows.some(({ status }) => status === "stale") ? " Stale: misses a version that was committed more than a minute ago." : "";
  const more = snapshot.unshown ? ` ${counted(snapshot.unshown, "more replica")} with older heartbeats not shown.` : "";
  return `${tally(rows)}.${stale}${more}`;
}

/** The next step for a run without weights. */
function welcome() {
  const publisher = snapshot.publisher;
  const who = publisher ? `Publisher ${plain(publisher.host || "on an unknown host", 60)} (epoch ${publisher.epoch})` : "A publisher";
  return [
    element("strong", {}, snapshot.run ? "No weights have been published yet." : "Nothing has been published here yet."),
    element("p", {}, snapshot.run ? `${who} has opened this run. Publish with:` : "Publish with:"),
    element("code", {}, `weightwire publish DIR ${plain(snapshot.url)}`),
    element("p", {}, embedded ? "" : "The first version appears on this page when it is committed."),
  ];
}

function footer() {
  const publisher = snapshot.publisher;
  return [
    `run ${snapshot.run.slice(0, 12)}`, snapshot.started === null ? "" : `started ${day(snapshot.started)}`,
    `${counted(snapshot.tensors, "tensor")}, ${large(snapshot.parameters)} weights, ${bytes(snapshot.nbytes)}`,
    publisher ? `publisher ${plain(publisher.host || "unknown", 60)}, epoch ${publisher.epoch}` : "",
    snapshot.keys.length ? `signed by ${snapshot.keys.join(", ")}` : "not signed: anyone who can write to the bucket can publish weights",
    snapshot.older ? `versions before ${snapshot.older} are not shown` : "",
  ].filter(Boolean).join(" \u00b7 ");
}

function writeTexts() {
  const rows = listed(snapshot, now());
  say(find("#where"), plain(snapshot.url));
  find("#where").title = plain(snapshot.url);
  const state = find("#state");
  state.className = lost || snapshot.trouble ? "lost" : embedded ? "" : "live";
  say(state, embedded ? `as of ${day(snapshot.at)}` : lost ? "not live" : "live");
  document.title = head() ? `${head().version} \u00b7 weightwire` : "weightwire";
  fill(find("#alerts"), alerts(rows));
  const started = hasWeights();
  find("#welcome").hidden = started;
  for (const section of document.querySelectorAll("main > .card, #cards")) section.hidden = !started;
  say(find("#foot"), snapshot.run ? footer() : "");
  if (!started) {
    fill(find("#welcome"), welcome());
    return;
  }
  fill(find("#cards"), cards(rows));
  say(find("#replicas .caption"), replicaCaption(rows));
  fill(find("#replicas .table"), rows.length ? [replicaTable(rows)] : []);
}

// --- charts ------------------------------------------------------------------------------------------------------

function hasWeights() {
  return snapshot.versions.some((one) => one.kind !== "fence");
}

function drawCharts() {
  if (!hasWeights()) return;
  const theme = colours();
  const metrics = metricNames(snapshot);
  if (!metrics.includes(view.metric)) view.metric = metrics[0] ?? null;
  chooseMetric(metrics);
  legend();
  draw("timeline", timeline(snapshot, theme, view.timeline));
  draw("stairs", stairs(snapshot, theme));
  draw("metrics", metric(snapshot, theme, view.metric));
  draw("bytes", bytesPerVersion(snapshot, theme));
  draw("saving", saving(snapshot, theme));
  draw("heat", heatMap(snapshot, theme));
  draw("chain", chain(snapshot, theme, view.chain));
}

function draw(id, made) {
  const plot = find(`#${id} .plot`);
  say(find(`#${id} .caption`), made.caption ?? "");
  const key = JSON.stringify([made.traces, made.layout, made.empty, plot.clientWidth]);
  if (drawn.get(plot) === key) return;
  drawn.set(plot, key);
  if (made.empty) {
    if (plot.data) Plotly.purge(plot);
    plot.replaceChildren(element("p", { class: "empty" }, made.empty));
    plot.removeAttribute("role");
    plot.removeAttribute("aria-label");
    return;
  }
  if (!plot.data) plot.replaceChildren();
  plot.setAttribute("role", "img");
  plot.setAttribute("aria-label", `${find(`#${id} h2`).textContent}. ${made.caption ?? ""}`);
  Plotly.react(plot, made.traces, { ...made.layout, width: plot.clientWidth }, { displayModeBar: false, showTips: false });
}

function legend() {
  const stages = stagesIn(snapshot, lanesOf(snapshot));
  fill(find("#timeline .legend"), stages.map(({ name, label: called }) => {
    return element("li", {}, element("i", { style: `background: var(--${name}, var(--faint))` }), called);
  }));
}

function chooseMetric(names) {
  const select = find("#metric");
  select.hidden = !names.length;
  const options = names.map((name) => element("option", { value: name }, plain(name, 100)));
  fill(select, options);
  if (names.length) select.value = view.metric;
}

function choices(id, all) {
  const place = find(`.choices[data-for="${id}"]`);
  const buttons = all.map(([choice, text]) => {
    const button = element("button", { type: "button", "aria-pressed": String(view[id] === choice) }, text);
    button.addEventListener("click", () => {
      view[id] = choice;
      for (const one of buttons) one.setAttribute("aria-pressed", String(one === button));
      drawn.delete(find(`#${id} .plot`));
      drawCharts();
    });
    return button;
  });
  place.replaceChildren(...buttons);
}

// --- polling -----------------------------------------------------------------------------------------------------

function show(next) {
  snapshot = next;
  writeTexts();
  drawCharts();
}

async function poll() {
  let answer = null, next = null;
  try {
    answer = await fetch("run.json", { cache: "no-store", headers: tag ? { "If-None-Match": tag } : {} });
    if (answer.status === 200) next = await answer.json();
    else await answer.arrayBuffer();
    const date = Date.parse(answer.headers.get("Date") ?? "");
    const off = (date - Date.now()) / 1000;
    skew = Math.abs(off) > 3 ? off : 0; // the header has whole seconds only
    lost = answer.ok || answer.status === 304 ? "" : `The server answered with status ${answer.status}.`;
  } catch {
    lost = "`weightwire page` has stopped or cannot be reached. This page shows what it received last.";
  }
  try {
    if (next) {
      tag = null; // if drawing fails, the next poll gets this snapshot again
      show(next);
      tag = answer.headers.get("ETag");
    } else if (snapshot) {
      writeTexts();
    }
  } catch (problem) {
    console.error(problem);
    find("#state").className = "lost";
    say(find("#state"), "not live");
    fill(find("#alerts"), [notice(true, "This page has a bug, and parts of it may be out of date:", String(problem))]);
  }
}

async function watch() {
  for (;;) {
    if (!document.hidden) await poll();
    await new Promise((done) => setTimeout(done, POLL_EVERY));
  }
}

function start() {
  applyTheme();
  choices("timeline", [["one", "Newest"], ["ten", "10 versions"], ["minute", "Minute"], ["all", "All"]]);
  choices("chain", [["newest", "Newest"], ["all", "All"]]);
  find("#theme").addEventListener("click", () => {
    view.theme = THEMES[(THEMES.indexOf(view.theme) + 1) % THEMES.length] ?? "auto";
    store("weightwire-theme", view.theme);
    applyTheme();
    if (snapshot) drawCharts();
  });
  find("#metric").addEventListener("change", (event) => {
    view.metric = event.target.value;
    drawCharts();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => snapshot && drawCharts());
  let resizing = 0;
  addEventListener("resize", () => {
    clearTimeout(resizing);
    resizing = setTimeout(() => snapshot && drawCharts(), 120);
  });
  if (embedded) {
    show(JSON.parse(embedded.textContent));
    return;
  }
  watch();
}

start();
