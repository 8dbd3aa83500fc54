"""When the next anchor is due."""

from __future__ import annotations

from weightwire.chain import ANCHOR, DELTA, Commit, DataFile, Shortcut, data_path
from weightwire.publisher.anchor_schedule import AnchorSchedule

RUN, HASH = "0" * 32, "0" * 64
WEIGHTS = 1000
"""The size of all weights in bytes."""


def files(kind: str, nbytes: int) -> tuple[DataFile, ...]:
    return (DataFile(data_path(kind, 1, 1, 0, HASH), nbytes, HASH, 0),) if nbytes else ()


def commit(kind: str, nbytes: int = 0) -> Commit:
    fields = {"run": RUN, "version": 1, "epoch": 1, "write_id": RUN, "parent": HASH, "before": HASH, "after": HASH}
    return Commit(**fields, kind=kind, files=files(kind, nbytes))  # type: ignore[arg-type]


def shortcut(nbytes: int) -> Shortcut:
    return Shortcut(run=RUN, version=1, kind="anchor", after=HASH, files=files(ANCHOR, nbytes))


def test_an_anchor_is_due_after_every_n_deltas_of_any_size() -> None:
    schedule = AnchorSchedule(every=2)
    assert not schedule.is_due(WEIGHTS)
    schedule = schedule.after_commit(commit(DELTA, 10**9))
    assert not schedule.is_due(WEIGHTS)
    schedule = schedule.after_commit(commit(DELTA))
    assert schedule.is_due(WEIGHTS)
    assert not schedule.after_commit(commit(ANCHOR, 1)).is_due(WEIGHTS)
    assert not schedule.restarted().is_due(WEIGHTS)


def test_an_anchor_is_due_when_deltas_add_up_to_half_its_size() -> None:
    schedule = AnchorSchedule().after_commit(commit(ANCHOR, 600)).after_commit(commit(DELTA, 300))
    assert not schedule.is_due(WEIGHTS)
    assert schedule.after_commit(commit(DELTA, 1)).is_due(WEIGHTS)


def test_the_first_anchor_is_estimated_at_two_thirds_of_the_weights() -> None:
    schedule = AnchorSchedule().after_commit(commit(DELTA, 330))
    assert not schedule.is_due(WEIGHTS)
    assert schedule.after_commit(commit(DELTA, 1)).is_due(WEIGHTS)


def test_deltas_during_an_upload_count_towards_the_next_anchor() -> None:
    schedule = AnchorSchedule(every=1).after_commit(commit(DELTA, 5)).restarted().after_commit(commit(DELTA, 7))
    schedule = schedule.after_shortcut(shortcut(400), "shortcuts/1/anchor-x.json")
    assert schedule == AnchorSchedule(1, 400, 7, 1, "shortcuts/1/anchor-x.json")
    assert schedule.is_due(WEIGHTS)
