"""The one loop that gets past lost data: plan, try, and plan again without what turned out to be gone or damaged.

Followers, publishers and `weightwire restore` all use it, so that they get past the same damage.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from weightwire.catchup.fetch import LOST, Fetcher
from weightwire.catchup.plan import NoWay
from weightwire.errors import CorruptDelta, DataGone, NotFound, Truncated, WeightwireError

__all__ = ["LOST_FOR_GOOD", "around_lost_data"]

LOST_FOR_GOOD = (DataGone, CorruptDelta, Truncated)
"""What `around_lost_data` raises where no way leads past lost data."""


_NEXT_ANCHOR = "anchor_every=1 makes one of the next version"

Result = TypeVar("Result")


async def around_lost_data(
    fetcher: Fetcher, attempt: Callable[[], Awaitable[Result]], warn: Callable[[str], None]
) -> Result:
    """Repeats an attempt that plans a way without `fetcher.lost` and takes it, until one succeeds.

    Each failure must add a lost file, so this ends. What was lost on the way to success is passed to `warn`. Where no
    way is left, raises what is wrong with the file that blocks it.
    """
    passed: list[str] = []
    while True:
        known = len(fetcher.lost)
        try:
            result = await attempt()
        except NoWay as problem:
            raise _explain(problem, fetcher) from problem
        except LOST as problem:
            if len(fetcher.lost) == known:
                raise
            passed.append(problem.message)
        else:
            for message in passed:
                warn(f"{message}; there was another way")
            return result


def _explain(problem: NoWay, fetcher: Fetcher) -> WeightwireError:
    lost = fetcher.lost.get(problem.blocked_by)
    if lost is None:
        return DataGone(problem.message, hint=problem.hint)
    message = f"{lost.message}, and no anchor leads past it"
    if isinstance(lost, NotFound):
        return DataGone(message, hint=f"publish a new anchor, or a new run ({_NEXT_ANCHOR})")
    return lost.reworded(message, hint=f"run `weightwire verify`, and publish a new anchor ({_NEXT_ANCHOR})")
