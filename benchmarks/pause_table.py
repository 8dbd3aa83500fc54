"""The rows of pause.py's table."""

from __future__ import annotations

import statistics
from operator import itemgetter

from rounds import OTHERS, Spread, Times, range_of, ratio_row
from stream_gaps import Measured, gaps, gaps_before_pause, gaps_in, stalls, tokens_per_second
from table import BUSY, Bar, Row

__all__ = ["other_rows", "pause_rows", "stream_rows"]

OF_RELOAD, OF_PATCHES = Bar(0.09), Bar(1.0)
NONE_LOST = Bar(0.0)
PARTS = ["staged", "to pause", "to start", "to update", "to finish", "to resume", "read", "load"]
WAYS = {"ours": "ours", "patches": "vLLM's patches", "reload": "vLLM's reload"}


def pause_rows(measured: Measured, judge: bool) -> list[Row]:
    rows = []
    for what, name in WAYS.items():
        times = measured.times(what)
        rows.append(milliseconds_row(f"{name}: pause, ms", times, "pause"))
        rows.append(milliseconds_row(f"{name}: from the pause request on, ms", times, "ordered", parts_of(times)))
        rows.append(milliseconds_row(f"{name}: update without fetching, ms", times, "all"))
    rows.append(milliseconds_row("ours: commit to served, ms", measured.times("ours"), "commit to served"))
    rounds = [
        dict(zip(WAYS, (times["pause"] for times in same), strict=True))
        for same in zip(*map(measured.times, WAYS), strict=True)
    ]
    rows.append(ratio_row(rounds, "pause: ours / vLLM's reload", "ours", "reload", OF_RELOAD if judge else None))
    rows.append(ratio_row(rounds, "pause: ours / vLLM's patches", "ours", "patches", OF_PATCHES if judge else None))
    return rows


def parts_of(rounds: list[Times]) -> str:
    """The medians of the known parts, in milliseconds."""
    medians = {key: 1000 * Spread.of(rounds, itemgetter(key)).median for key in rounds[0]}
    return ", ".join(f"{key} {medians[key]:.0f}" for key in PARTS if key in medians)


def milliseconds_row(measure: str, rounds: list[Times], what: str, parts: str = "") -> Row:
    spread = Spread.of(rounds, lambda times: 1000 * times[what])
    note = range_of(spread, rounds, "{:.0f}")
    return Row(measure, spread.median, "{:.0f}", None, f"{note}; {parts}" if parts else note)


def stream_rows(measured: Measured, without: Measured) -> list[Row]:
    seen = gaps(measured)
    rows = [gap_row("no update", gaps_in(seen, measured.of("nothing")))]
    for what, name in WAYS.items():
        rows.append(gap_row(f"an update by {name}", gaps_in(seen, measured.of(what))))
    rows.append(gap_row("ours, from commit to pause", gaps_before_pause(seen, measured.of("ours"))))
    for what, name in WAYS.items():
        found = stalls(seen, measured.of(what))
        note = f"{1000 * min(found):.0f} to {1000 * max(found):.0f} in {len(found)} streams"
        rows.append(
            Row(f"{name}: gap that contains an update, ms", 1000 * statistics.median(found), "{:.0f}", None, note)
        )
    lost = [*measured.ended["wrong"], *without.ended["wrong"]]
    requests, tokens = (measured.ended[key] + without.ended[key] for key in ("requests", "tokens"))
    note = f"of {requests} with {tokens} tokens; {lost[0]}" if lost else f"of {requests} with {tokens} tokens"
    return [*rows, Row("requests with lost or repeated tokens", len(lost), "{:.0f}", NONE_LOST, note)]


def gap_row(when: str, seconds: list[float]) -> Row:
    middle, late = (1000 * seconds[int(part * (len(seconds) - 1))] for part in (0.5, 0.99))
    note = f"p50 {middle:.0f}, longest {1000 * seconds[-1]:.0f}, of {len(seconds)} gaps"
    return Row(f"gap between tokens, {when}: p99, ms", late, "{:.0f}", None, note)


def other_rows(measured: Measured, without: Measured) -> list[Row]:
    rates = [tokens_per_second(one) for one in (measured, without)]
    ours, plain = (Spread.of(rounds, itemgetter("rate")) for rounds in rates)
    reloads = without.times("reload")
    slots = [slot.times for slot in (*measured.slots, *without.slots)]
    others = Spread.of(slots, itemgetter(OTHERS))
    return [
        Row("tokens/s with our backend, weights unpacked", ours.median, "{:.1f}", None, range_of(ours, rates[0])),
        Row("tokens/s without, weights packed by vLLM", plain.median, "{:.1f}", None, range_of(plain, rates[1])),
        Row("tokens/s with / without", ours.median / plain.median, "{:.2f}", None),
        milliseconds_row("without our backend: vLLM's reload: pause, ms", reloads, "pause", parts_of(reloads)),
        Row("patch, MB", measured.patch_bytes / 1e6, "{:.1f}", None),
        Row(BUSY, others.median, "{:.2f}", None, range_of(others, slots)),
    ]
