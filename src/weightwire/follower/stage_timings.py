"""How long the stages of each version took, for a follower's heartbeats."""

from __future__ import annotations

from collections.abc import Mapping

from weightwire.chain import PassedVersion, StageTiming

__all__ = ["StageTimings"]

_RECENT = 100  # versions in a heartbeat


class StageTimings:
    """The latest timing of each stage, and all timings of the newest versions."""

    def __init__(self) -> None:
        self.latest: dict[str, StageTiming] = {}
        self.before: tuple[PassedVersion, ...] | None = None  # from the heartbeat before a restart, once it is read
        self._by_version: dict[int, dict[str, StageTiming]] = {}

    def add(self, version: int | None, stages: Mapping[str, StageTiming]) -> None:
        self.latest.update(stages)
        if version is not None and stages:
            self._by_version.setdefault(version, {}).update(stages)
            while len(self._by_version) > _RECENT:
                del self._by_version[min(self._by_version)]

    def recent(self, head: int) -> tuple[PassedVersion, ...]:
        """The newest versions, the oldest first."""
        # Versions ahead of the run are foreign, and would displace our own.
        known = {
            one.version: one.stages
            for one in self.before or ()
            if one.version >= 0 and (head < 0 or one.version <= head)
        }
        newest = sorted({**known, **self._by_version}.items())[-_RECENT:]
        return tuple(PassedVersion(version, stages) for version, stages in newest)
