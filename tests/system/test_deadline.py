"""Deadline: what is left of a timeout."""

from __future__ import annotations

from weightwire.system.deadline import Deadline


def test_what_is_left_shrinks_but_never_below_nothing() -> None:
    deadline = Deadline(1000.0)
    first, second = deadline.left, deadline.left
    assert first is not None
    assert second is not None
    assert 0 < second <= first <= 1000.0
    assert Deadline(-1.0).left == 0.0


def test_without_a_timeout_there_is_no_end() -> None:
    assert Deadline(None).left is None
