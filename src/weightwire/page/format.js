// Formats numbers and times for people, and escapes names. Knows nothing of runs.
//
// All strings from a bucket are untrusted text. They enter the document through textContent, and a plot only through
// label(), because plotly interprets some HTML in its texts. Never use plotly's templates ("%{x}") with such strings.
"use strict";

const HIDDEN = /[\u0000-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]/g;
const LONGEST = 60;
const GAP = "\u00a0"; // keeps a number and its unit on one line

/** A text on one line: invisible and direction-changing characters are escaped, long texts are cut. */
function plain(text, most = 400) {
  const spelled = String(text).replace(HIDDEN, (sign) => "\\u" + sign.charCodeAt(0).toString(16).padStart(4, "0"));
  const signs = Array.from(spelled);
  return signs.length > most ? signs.slice(0, most - 1).join("") + "\u2026" : spelled;
}

/** A text for plotly, with HTML escaped. */
function label(text, most = LONGEST) {
  return plain(text, most).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
}

/** 1 kB is 1000 bytes, as on disks and networks. */
function bytes(count) {
  let size = count, unit = "B";
  for (const larger of ["kB", "MB", "GB", "TB", "PB"]) {
    if (size >= 999.5) [size, unit] = [size / 1000, larger];
  }
  return `${size.toFixed(size < 9.95 && unit !== "B" ? 1 : 0)}${GAP}${unit}`;
}

function duration(seconds) {
  if (seconds >= 172800) return `${Math.round(seconds / 86400)}${GAP}days`;
  if (seconds >= 7200) return `${Math.round(seconds / 3600)}${GAP}h`;
  if (seconds >= 120) return `${Math.round(seconds / 60)}${GAP}min`;
  if (seconds >= 9.95) return `${Math.round(seconds)}${GAP}s`;
  if (seconds >= 0.9995) return `${seconds.toFixed(1)}${GAP}s`;
  if (seconds >= 0.00995) return `${Math.round(seconds * 1000)}${GAP}ms`;
  return seconds >= 0.00005 ? `${(seconds * 1000).toFixed(1)}${GAP}ms` : `0${GAP}ms`;
}

function ago(seconds) {
  if (seconds < 1) return "just now";
  return `${seconds < 10 ? `${Math.floor(seconds)}${GAP}s` : duration(seconds)} ago`;
}

/** A fraction above 0 is never shown as 0%, nor one below 1 as 100%. */
function percent(fraction) {
  if (fraction === 0 || fraction === 1) return `${fraction * 100}%`;
  const share = fraction * 100;
  if (share < 0.001) return "<0.001%";
  if (share < 0.1) return `${share.toFixed(3)}%`;
  return share < 10 ? `${share.toFixed(2)}%` : `${Math.min(share, 99.9).toFixed(1)}%`;
}

function times(ratio) {
  return `${ratio >= 9.95 ? Math.round(ratio).toLocaleString("en") : ratio.toFixed(1)}\u00d7`;
}

/** "3.2× smaller", or "larger" if `size` exceeds `whole`. */
function compared(size, whole) {
  return size <= whole ? `${times(whole / size)} smaller` : `${times(size / whole)} larger`;
}

function counted(count, thing) {
  return `${count.toLocaleString("en")} ${thing}${count === 1 ? "" : "s"}`;
}

function large(count) {
  for (const [size, unit] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]]) {
    if (count >= size) return `${(count / size).toFixed(count < 10 * size ? 1 : 0)}${unit}`;
  }
  return String(count);
}

function figure(number, digits = 4) {
  const size = Math.abs(number);
  if (size !== 0 && (size < 0.001 || size >= 1e6)) return number.toExponential(2);
  return String(Number(number.toPrecision(digits)));
}

// Created once: creation is much slower than use.
const TIME = new Intl.DateTimeFormat([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });

/** A time of day in the reader's time zone. */
function clock(seconds) {
  return TIME.format(seconds * 1000);
}

function day(seconds) {
  return new Date(seconds * 1000).toLocaleString([], { dateStyle: "medium", timeStyle: "short", hourCycle: "h23" });
}

/** A time on plotly's axes, which have no time zones: the local time as if it were UTC, in milliseconds. */
function place(seconds) {
  const date = new Date(seconds * 1000);
  return seconds * 1000 - date.getTimezoneOffset() * 60000;
}
