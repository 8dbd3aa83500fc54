"""How long the stages of each version took, as a follower's heartbeats tell it."""

from __future__ import annotations

from collections.abc import Mapping

from weightwire.chain import PassedVersion, StageTiming

__all__ = ["StageTimings"]

_RECENT = 100  # versions that a heartbeat tells of


class StageTimings:
    """How long the stages took: the latest of each, and those of the newest versions."""

    def __init__(self) -> None:
        self.latest: dict[str, StageTiming] = {}
        self.before: tuple[PassedVersion, ...] | None = None  # what was said before a restart, once it is known
        self._by_version: dict[int, dict[str, StageTiming]] = {}

    def add(self, version: int | None, stages: Mapping[str, StageTiming]) -> None:
        self.latest.update(stages)
        if version is not None and stages:
            self._by_version.setdefault(version, {}).update(stages)
            while len(self._by_version) > _RECENT:
                del self._by_version[min(self._by_version)]

    def recent(self, head: int) -> tuple[PassedVersion, ...]:
        """The newest versions, the oldest first."""
        # None that is ahead of the run: somebody else wrote it, and it would push out what is ours.
        known = {
            one.version: one.stages
            for one in self.before or ()
            if one.version >= 0 and (head < 0 or one.version <= head)
        }
        newest = sorted({**known, **self._by_version}.items())[-_RECENT:]
        return tuple(PassedVersion(version, stages) for version, stages in newest)
