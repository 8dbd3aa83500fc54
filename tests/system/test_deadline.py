"""The time left until a deadline."""

from __future__ import annotations

from weightwire.system.deadline import Deadline


def test_time_left_shrinks_to_zero() -> None:
    deadline = Deadline(1000.0)
    first, second = deadline.left, deadline.left
    assert first is not None
    assert second is not None
    assert 0 < second <= first <= 1000.0
    assert Deadline(-1.0).left == 0.0


def test_no_timeout_means_no_deadline() -> None:
    assert Deadline(None).left is None
