// Replicas in words: the status of each, and the order in which the table lists them. Pure, as charts.js is.
"use strict";

const STALE_AFTER = 60; // seconds
// The order of the table: the first three need attention.
const STATUSES = ["in trouble", "no heartbeat", "stale", "late heartbeat", "no version yet", "catching up", "up to date", "stopped"];
const ATTENTION = new Set(STATUSES.slice(0, 3));

/** The status of a replica at a time, in seconds since 1970. A replica sends four heartbeats in a lease. */
function statusOf(replica, versions, time) {
  const silence = time - replica.heard;
  if (replica.lease === 0) return "stopped";
  if (silence >= replica.lease) return "no heartbeat";
  if (replica.trouble) return "in trouble";
  if (silence > replica.lease / 2) return "late heartbeat";
  if (replica.reached < 0) return "no version yet";
  const missing = firstMissing(replica.reached, versions);
  if (!missing) return "up to date";
  return missing.time !== null && time - missing.time > STALE_AFTER ? "stale" : "catching up";
}

/** The oldest version with weights that a replica does not serve yet. */
function firstMissing(reached, versions) {
  let at = versions.length;
  while (at > 0 && versions[at - 1].version > reached) at--;
  return versions.slice(at).find((one) => one.kind !== "fence");
}

/** All replicas with their status and index, those that need attention first, then by name. */
function listed(snapshot, time) {
  const rows = snapshot.replicas.map((replica, index) => ({ replica, index, status: statusOf(replica, snapshot.versions, time) }));
  const rank = ({ status }) => (ATTENTION.has(status) || status === "stopped" ? STATUSES.indexOf(status) : ATTENTION.size);
  return rows.sort((a, b) => rank(a) - rank(b) || a.index - b.index);
}

/** "1 stale, 1 stopped, 38 up to date": how many replicas have each status. */
function tally(rows, which = () => true) {
  const counts = STATUSES.filter(which).map((status) => [rows.filter((row) => row.status === status).length, status]);
  return counts.filter(([count]) => count).map(([count, status]) => `${count} ${status}`).join(", ");
}

/** Why a replica needs attention, to follow its name. Trouble has its own alert. */
function complaint({ replica, status }, head) {
  if (status === "stale") return `is stale: ${counted(head - replica.reached, "version")} behind`;
  return status === "no heartbeat" ? `has sent no heartbeat since ${clock(replica.heard)}` : "";
}

/** The first few texts, and how many more there are. */
function several(texts, most) {
  const more = texts.length - most;
  return texts.slice(0, most).join("; ") + (more > 0 ? `; and ${more} more, listed below` : "");
}
