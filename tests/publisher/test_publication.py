"""The outcome of one publish."""

from __future__ import annotations

import threading
from itertools import pairwise
from types import SimpleNamespace

import pytest

from support.records import chain_of
from weightwire.errors import Unavailable
from weightwire.publisher.publication import Publication
from weightwire.system import deadline


class TestPending:
    def test_pending_publication_has_no_outcome(self) -> None:
        one = Publication(step=3)
        assert not one.done
        assert (one.version, one.commit, one.superseded_by, one.error) == (None, None, None, None)

    def test_wait_for_a_pending_publication_times_out(self) -> None:
        with pytest.raises(TimeoutError, match=r"step 3: not committed after 0.01 s"):
            Publication(step=3).wait(0.01)

    def test_wait_with_no_time_left_times_out_at_once(self) -> None:
        with pytest.raises(TimeoutError):
            Publication().wait(0)


class TestCommitted:
    def test_committed_publication_has_a_version(self) -> None:
        one = Publication()
        one.succeed(chain_of(8)[7].record)
        assert one.done
        assert one.version == one.wait() == one.wait(0) == 7
        assert one.commit == chain_of(8)[7].record

    def test_commit_wakes_waiting_threads(self) -> None:
        one, versions = Publication(), list[int]()
        waiting = [threading.Thread(target=lambda: versions.append(one.wait(60))) for _ in range(3)]
        for thread in waiting:
            thread.start()
        one.succeed(chain_of(8)[7].record)
        for thread in waiting:
            thread.join()
        assert versions == [7, 7, 7]


class TestFailed:
    def test_wait_for_a_failed_publication_raises_the_failure(self) -> None:
        one, problem = Publication(), Unavailable("the bucket is gone")
        one.fail(problem)
        assert one.done
        assert one.error is problem
        assert not one.raised
        for _ in range(2):
            with pytest.raises(Unavailable, match="the bucket is gone"):
                one.wait()
            assert one.raised


class TestSuperseded:
    def test_superseded_publication_is_done_without_a_version(self) -> None:
        one, newer = Publication(step=1), Publication(step=2)
        one.supersede(newer)
        assert one.done
        assert one.superseded_by is newer
        assert one.version is None

    def test_superseded_publication_waits_for_the_newer_one(self) -> None:
        one, newer = Publication(step=1), Publication(step=2)
        one.supersede(newer)
        with pytest.raises(TimeoutError, match="step 1"):
            one.wait(0.01)
        newer.succeed(chain_of(8)[7].record)
        assert one.wait() == 7

    def test_a_long_chain_of_superseded_publications_is_followed(self) -> None:
        row = [Publication(step=step) for step in range(5000)]
        for one, newer in pairwise(row):
            one.supersede(newer)
        row[-1].succeed(chain_of(4)[3].record)
        assert row[0].wait() == 3

    def test_superseded_publication_fails_with_the_newer_one(self) -> None:
        one, newer = Publication(step=1), Publication(step=2)
        one.supersede(newer)
        newer.fail(Unavailable("gone"))
        with pytest.raises(Unavailable):
            one.wait()

    def test_the_timeout_covers_all_superseding_publications(self, monkeypatch: pytest.MonkeyPatch) -> None:
        one, newer, now, waited = Publication(step=1), Publication(step=2), [100.0], list[float]()
        monkeypatch.setattr(deadline, "time", SimpleNamespace(monotonic=lambda: now[0]))

        def wait(seconds: float) -> bool:
            """Of 0.5 s the first takes 0.4."""
            waited.append(seconds)
            now[0] += min(seconds, 0.4)
            one.supersede(newer)
            return len(waited) == 1

        monkeypatch.setattr(one, "_wait", wait)
        monkeypatch.setattr(newer, "_wait", wait)
        with pytest.raises(TimeoutError, match=r"step 1: not committed after 0.5 s"):
            one.wait(0.5)
        assert waited == pytest.approx([0.5, 0.1])


def test_repr_of_a_publication_shows_its_outcome() -> None:
    one, newer = Publication(step=3), Publication()
    assert repr(one) == "<Publication of step 3: not committed yet>"
    assert repr(newer) == "<Publication of weights without a step: not committed yet>"
    one.supersede(newer)
    assert repr(one) == "<Publication of step 3: superseded by weights without a step>"
    newer.succeed(chain_of(8)[7].record)
    assert repr(newer) == "<Publication of weights without a step: version 7, delta of 100 bytes>"
    failed = Publication(step=4)
    failed.fail(Unavailable("the bucket is gone"))
    assert repr(failed) == "<Publication of step 4: failed (the bucket is gone)>"


def test_publications_compare_by_identity() -> None:
    assert Publication(step=1) != Publication(step=1)
    assert len({Publication(), Publication()}) == 2
