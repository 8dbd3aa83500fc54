// The page around the pictures: figures, replicas, what is wrong; and looking again while a run goes on.
//
// The picture lies in the document where it was exported, and is asked for every second where it is live.
"use strict";

const LOOK_EVERY = 1000; // milliseconds
const find = (selector) => document.querySelector(selector);

const embedded = find("#picture");
const view = { timeline: "ten", chain: "newest", metric: null, theme: stored("weightwire-theme") ?? "auto" };
let picture = null;
let tag = null;
let lost = ""; // why the picture is no longer brought up to date
let skew = 0; // seconds that the server's clock is ahead of this one
const drawn = new Map(); // what each plot was drawn from

// --- small things ------------------------------------------------------------------------------------------------

function stored(key) {
  try {
    return localStorage.getItem(key);
  } catch {
    return null; // a browser that keeps nothing
  }
}

function store(key, value) {
  try {
    localStorage.setItem(key, value);
  } catch {
    // then it is asked again the next time
  }
}

/** An element with texts and elements in it. Texts are never taken for HTML. */
function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

/** Puts elements in the place of others, unless they say the same: so that a reader is not disturbed. */
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
  return embedded ? picture.at : Date.now() / 1000 + skew;
}

// --- colours -----------------------------------------------------------------------------------------------------

const WAYS = ["auto", "light", "dark"];

function applyTheme() {
  if (view.theme === "auto") document.documentElement.removeAttribute("data-theme");
  else document.documentElement.setAttribute("data-theme", view.theme);
  say(find("#theme"), { auto: "Auto", light: "Light", dark: "Dark" }[view.theme]);
  find("#theme").setAttribute("aria-label", `Colours: ${view.theme}. Change`);
}

/** The colours of the style sheet, as plotly wants them. */
function colours() {
  const probe = element("span");
  document.body.append(probe);
  const read = (name) => {
    probe.style.color = `var(--${name}, var(--faint))`; // a stage may have no colour of its own
    return getComputedStyle(probe).color;
  };
  const faded = (colour, alpha) => colour.replace(/^rgb\((.*)\)$/, `rgba($1, ${alpha})`);
  const theme = {};
  for (const name of ["ink", "soft", "faint", "line", "grid", "card", "accent", "pause"]) theme[name] = read(name);
  for (const { name } of picture.stages) theme[name] = read(name);
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

// --- what is said in words ---------------------------------------------------------------------------------------

function head() {
  return picture.versions[picture.versions.length - 1];
}

function isAlive(replica) {
  return now() - replica.heard < replica.lease;
}

function isStopped(replica) {
  return replica.lease === 0;
}

/** That it has missed heartbeats, of which there are four in a lease. */
function isSilent(replica) {
  return !isStopped(replica) && now() - replica.heard > replica.lease / 2;
}

function health(replica) {
  if (isStopped(replica)) return ", stopped";
  if (!isAlive(replica)) return ", gone";
  return isSilent(replica) ? ", silent" : "";
}

function behind(replica) {
  return Math.max(0, head().version - replica.reached);
}

function figureCard(name, value, more, look = "") {
  return element("div", { class: `figure ${look}` }, element("div", { class: "name" }, name),
    element("div", { class: "value" }, value), element("div", { class: "more" }, more));
}

function cards() {
  const newest = head();
  if (!newest) return [];
  const deltas = picture.versions.filter((one) => one.kind === "delta");
  const delta = deltas[deltas.length - 1];
  const total = sums(picture).pop();
  const when = newest.time === null ? "" : ago(now() - newest.time);
  const step = newest.step === null ? (newest.kind === "delta" ? "" : newest.kind) : `step ${newest.step}`;
  const smaller = delta && delta.nbytes ? `${compared(delta.nbytes, picture.nbytes)} than all ${bytes(picture.nbytes)}` : "nothing changed";
  return [
    figureCard("Newest version", String(newest.version), [step, when].filter(Boolean).join(", "), "accent"),
    figureCard("Newest delta", delta ? bytes(delta.nbytes) : "\u2013", delta ? smaller : "no delta yet"),
    figureCard("Weights changed", delta ? percent(delta.changed / picture.parameters) : "\u2013",
      delta ? `${large(delta.changed)} of ${large(picture.parameters)}` : `of ${large(picture.parameters)}`),
    figureCard("Saved so far", total.sent ? times(total.full / total.sent) : "\u2013",
      total.sent ? `${bytes(total.sent)}, not ${bytes(total.full)}` : "nothing sent yet"),
    replicaCard(),
    pauseCard(),
  ];
}

function replicaCard() {
  const all = picture.replicas.length + picture.unshown, alive = picture.replicas.filter(isAlive);
  const gone = picture.replicas.some((one) => !isAlive(one) && !isStopped(one));
  if (!all) return figureCard("Replicas", "none", "nobody follows this run yet");
  const most = Math.max(0, ...alive.map(behind));
  if (!alive.length) return figureCard("Replicas", `0 of ${all}`, "none is alive");
  const lag = most ? `at most ${counted(most, "version")} behind` : "all up to date";
  return figureCard("Replicas", `${alive.length} of ${all}`, `alive, ${lag}`, gone ? "bad" : "");
}

function pauseCard() {
  const pauses = picture.replicas.flatMap((one) => one.spans.filter((span) => span.stage === "swap"));
  const last = pauses.sort((a, b) => a.start - b.start).pop()?.seconds
    ?? Math.max(-1, ...picture.replicas.map((one) => one.pause ?? -1));
  if (last < 0) return figureCard("Last pause", "\u2013", "no engine has swapped yet");
  const longest = Math.max(last, ...pauses.map((one) => one.seconds));
  return figureCard("Last pause", duration(last), pauses.length ? `longest of ${pauses.length + 1}: ${duration(longest)}` : "of an engine", "pause");
}

function notice(bad, title, text) {
  return element("div", { class: bad ? "alert bad" : "alert" }, element("b", {}, title), ` ${plain(text)}`);
}

function alerts() {
  const made = [];
  const add = (...all) => made.push(notice(...all));
  if (lost) add(true, "No longer live.", lost);
  if (picture.trouble) add(true, "The bucket cannot be read just now; this is what was there before.", picture.trouble);
  for (const one of picture.replicas) if (one.trouble) add(true, `${plain(one.name)}:`, one.trouble);
  for (const note of picture.notes) add(false, "", note);
  if (picture.mode !== "strict") add(false, "Single-writer mode:", "nothing stops a second publisher, so see to it that there is only one.");
  return made;
}

function replicaTable() {
  const names = ["replica", "version", "behind", "heard", "last pause", "host", "trouble"];
  const number = new Set(["version", "behind", "heard", "last pause"]);
  const cell = (name, content, extra = "") => element("td", { class: `${number.has(name) ? "number" : "text"} ${extra}`, ...(name === "replica" ? {} : { "data-name": name }) }, ...[content].flat());
  const rows = picture.replicas.map((one, index) => {
    const dot = element("span", { class: "dot", style: `background: var(--r${index % 6})` });
    return element("tr", { class: isAlive(one) ? "" : "gone" },
      cell("replica", [dot, plain(one.name, 40)]),
      cell("version", one.reached < 0 ? "none yet" : String(one.reached)),
      cell("behind", head() && one.reached >= 0 ? String(behind(one)) : "\u2013"),
      cell("heard", `${ago(now() - one.heard)}${health(one)}`, isSilent(one) ? "trouble" : ""),
      cell("last pause", one.pause === null ? "\u2013" : duration(one.pause)),
      cell("host", plain(one.host || "\u2013", 40)),
      cell("trouble", plain(one.trouble || "none"), one.trouble ? "trouble" : ""));
  });
  const heading = element("tr", {}, ...names.map((name) => element("th", number.has(name) ? { class: "number" } : {}, name)));
  return element("table", {}, element("thead", {}, heading), element("tbody", {}, ...rows));
}

function words() {
  const known = picture.run !== "";
  say(find("#where"), plain(picture.url));
  find("#where").title = plain(picture.url);
  const state = find("#state");
  state.className = lost || picture.trouble ? "lost" : embedded ? "" : "live";
  say(state, embedded ? `as of ${day(picture.at)}` : lost ? "not live" : "live");
  document.title = head() ? `${head().version} \u00b7 weightwire` : "weightwire";
  fill(find("#alerts"), alerts());
  const started = known && picture.versions.length;
  find("#welcome").hidden = Boolean(started);
  if (!started) {
    const text = known ? "The run has begun, but no version has been committed yet." : "Nothing has been published there yet.";
    fill(find("#welcome"), [element("strong", {}, text), element("span", {}, "This page shows the first version as soon as it is there.")]);
  }
  for (const section of document.querySelectorAll("main > .card, #cards")) section.hidden = !started;
  if (!started) return;
  fill(find("#cards"), cards());
  say(find("#replicas .caption"), picture.replicas.length ? (picture.unshown ? `${counted(picture.unshown, "other")} not shown: these were heard of last.` : "") : "No replica has been heard of yet: `weightwire follow` starts one.");
  fill(find("#replicas .table"), picture.replicas.length ? [replicaTable()] : []);
  const publisher = picture.publisher;
  say(find("#foot"), [
    `run ${picture.run.slice(0, 12)}`, picture.started === null ? "" : `started ${day(picture.started)}`,
    `${counted(picture.tensors, "tensor")}, ${large(picture.parameters)} weights, ${bytes(picture.nbytes)}`,
    publisher ? `publisher ${plain(publisher.host || "unknown", 60)}, epoch ${publisher.epoch}` : "",
    picture.older ? `versions before ${picture.older} are not shown` : "",
  ].filter(Boolean).join(" \u00b7 "));
}

// --- pictures ----------------------------------------------------------------------------------------------------

function pictures() {
  if (!picture.versions.length) return;
  const theme = colours();
  const metrics = metricNames(picture);
  if (!metrics.includes(view.metric)) view.metric = metrics[0] ?? null;
  chooseMetric(metrics);
  legend();
  draw("timeline", timeline(picture, theme, view.timeline));
  draw("stairs", stairs(picture, theme));
  draw("metrics", metric(picture, theme, view.metric));
  draw("bytes", bytesPerVersion(picture, theme));
  draw("saving", saving(picture, theme));
  draw("heat", heatMap(picture, theme));
  draw("chain", chain(picture, theme, view.chain));
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
    return;
  }
  if (!plot.data) plot.replaceChildren();
  plot.setAttribute("role", "img");
  plot.setAttribute("aria-label", made.caption ?? "");
  Plotly.react(plot, made.traces, { ...made.layout, width: plot.clientWidth }, { displayModeBar: false, showTips: false });
}

function legend() {
  const stages = stagesIn(picture, lanesOf(picture));
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
      pictures();
    });
    return button;
  });
  place.replaceChildren(...buttons);
}

// --- looking again -----------------------------------------------------------------------------------------------

function show(next) {
  picture = next;
  words();
  pictures();
}

async function look() {
  let answer = null, next = null;
  try {
    answer = await fetch("run.json", { cache: "no-store", headers: tag ? { "If-None-Match": tag } : {} });
    if (answer.status === 200) next = await answer.json();
    else await answer.arrayBuffer();
    const date = Date.parse(answer.headers.get("Date") ?? "");
    const off = (date - Date.now()) / 1000;
    skew = Math.abs(off) > 3 ? off : 0; // the header knows whole seconds only
    lost = answer.ok || answer.status === 304 ? "" : `The server answered ${answer.status}.`;
  } catch {
    lost = "`weightwire page` has ended, or cannot be reached; this is what it showed last.";
  }
  try {
    if (next) {
      tag = null; // what could not be drawn is asked for again
      show(next);
      tag = answer.headers.get("ETag");
    } else if (picture) {
      words();
    }
  } catch (problem) {
    console.error(problem);
    find("#state").className = "lost";
    say(find("#state"), "not live");
    fill(find("#alerts"), [notice(true, "A fault of this page: not all of it is up to date.", String(problem))]);
  }
}

async function watch() {
  for (;;) {
    if (!document.hidden) await look();
    await new Promise((done) => setTimeout(done, LOOK_EVERY));
  }
}

function start() {
  applyTheme();
  choices("timeline", [["one", "Newest"], ["ten", "10 versions"], ["minute", "Minute"], ["all", "All"]]);
  choices("chain", [["newest", "Newest"], ["all", "All"]]);
  find("#theme").addEventListener("click", () => {
    view.theme = WAYS[(WAYS.indexOf(view.theme) + 1) % WAYS.length] ?? "auto";
    store("weightwire-theme", view.theme);
    applyTheme();
    if (picture) pictures();
  });
  find("#metric").addEventListener("change", (event) => {
    view.metric = event.target.value;
    pictures();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => picture && pictures());
  let resizing = 0;
  addEventListener("resize", () => {
    clearTimeout(resizing);
    resizing = setTimeout(() => picture && pictures(), 120);
  });
  if (embedded) {
    show(JSON.parse(embedded.textContent));
    return;
  }
  watch();
}

start();
