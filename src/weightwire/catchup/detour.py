"""The loop that routes around lost data: plan, try, and plan again without files that are missing or damaged.

Followers, publishers and `weightwire restore` all use it, so they survive the same damage.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from weightwire.catchup.fetch import LOST, Fetcher
from weightwire.catchup.plan import NEED_ANCHOR, NoPath
from weightwire.errors import CorruptDelta, DataGone, NotFound, Truncated, WeightwireError

__all__ = ["LOST_FOR_GOOD", "around_lost_data"]

LOST_FOR_GOOD = (DataGone, CorruptDelta, Truncated)
"""Raised by `around_lost_data` if no path avoids the lost data."""

Result = TypeVar("Result")


async def around_lost_data(
    fetcher: Fetcher, attempt: Callable[[], Awaitable[Result]], warn: Callable[[str], None]
) -> Result:
    """Repeats an attempt, which plans a path without `fetcher.lost` and takes it, until it succeeds.

    Each failure must add a lost file, so this ends. After success, `warn` is called for each file that was lost. If no
    path is left, raises the problem of the file that blocks it.
    """
    passed: list[str] = []
    while True:
        known = len(fetcher.lost)
        try:
            result = await attempt()
        except NoPath as problem:
            raise _explain(problem, fetcher) from problem
        except LOST as problem:
            if len(fetcher.lost) == known:
                raise
            passed.append(problem.message)
        else:
            for message in passed:
                warn(f"{message}; took another path")
            return result


def _explain(problem: NoPath, fetcher: Fetcher) -> WeightwireError:
    lost = fetcher.lost.get(problem.blocked_by)
    if lost is None:
        return DataGone(problem.message, hint=problem.hint)
    message = f"{lost.message}, and no anchor leads past it"
    if isinstance(lost, NotFound):
        return DataGone(message, hint=NEED_ANCHOR)
    return lost.reworded(message, hint=f"run `weightwire verify URL` to see the damage, then {NEED_ANCHOR}")
