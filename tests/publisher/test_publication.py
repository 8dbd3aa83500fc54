"""What became of one publish, for whoever asks and whenever."""

from __future__ import annotations

import threading
import time
from itertools import pairwise

import pytest

from support.records import chain_of
from weightwire.errors import Unavailable
from weightwire.publisher.publication import Publication


class TestBeforeItIsDone:
    def test_nothing_is_known(self) -> None:
        one = Publication(step=3)
        assert not one.done
        assert (one.version, one.commit, one.superseded_by, one.error) == (None, None, None, None)

    def test_waiting_ends_some_time(self) -> None:
        with pytest.raises(TimeoutError, match=r"step 3: not committed after 0.01 s"):
            Publication(step=3).wait(0.01)

    def test_waiting_may_take_no_time_at_all(self) -> None:
        with pytest.raises(TimeoutError):
            Publication().wait(0)


class TestCommitted:
    def test_has_a_version(self) -> None:
        one = Publication()
        one.succeed(chain_of(8)[7].record)
        assert one.done
        assert one.version == one.wait() == one.wait(0) == 7
        assert one.commit == chain_of(8)[7].record

    def test_wakes_who_waits(self) -> None:
        one, versions = Publication(), list[int]()
        waiting = [threading.Thread(target=lambda: versions.append(one.wait(10))) for _ in range(3)]
        for thread in waiting:
            thread.start()
        one.succeed(chain_of(8)[7].record)
        for thread in waiting:
            thread.join()
        assert versions == [7, 7, 7]


class TestFailed:
    def test_raises_what_went_wrong(self) -> None:
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
    def test_is_done_but_has_no_version_of_its_own(self) -> None:
        one, newer = Publication(step=1), Publication(step=2)
        one.supersede(newer)
        assert one.done
        assert one.superseded_by is newer
        assert one.version is None

    def test_waits_for_the_newer_one(self) -> None:
        one, newer = Publication(step=1), Publication(step=2)
        one.supersede(newer)
        with pytest.raises(TimeoutError, match="step 1"):
            one.wait(0.01)
        newer.succeed(chain_of(8)[7].record)
        assert one.wait() == 7

    def test_a_long_row(self) -> None:
        row = [Publication(step=step) for step in range(5000)]
        for one, newer in pairwise(row):
            one.supersede(newer)
        row[-1].succeed(chain_of(4)[3].record)
        assert row[0].wait() == 3

    def test_fails_with_the_newer_one(self) -> None:
        one, newer = Publication(step=1), Publication(step=2)
        one.supersede(newer)
        newer.fail(Unavailable("gone"))
        with pytest.raises(Unavailable):
            one.wait()

    def test_waits_no_longer_in_all_than_asked_for(self) -> None:
        one, newer = Publication(step=1), Publication(step=2)
        threading.Timer(0.4, one.supersede, [newer]).start()
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            one.wait(0.5)
        assert time.monotonic() - began < 0.8


def test_no_two_are_the_same() -> None:
    assert Publication(step=1) != Publication(step=1)
    assert len({Publication(), Publication()}) == 2
