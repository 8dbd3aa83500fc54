"""Samples of what processes and directories use over time, and whether that grows."""

from __future__ import annotations

import os
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Growth", "ResourceLog", "Series", "Usage", "disk_use", "processes", "read_usage"]

PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Usage:
    """What a process uses now."""

    rss: int  # bytes
    handles: int
    threads: int


def read_usage(process: int) -> Usage | None:
    """None if the process is gone."""
    base = Path(f"/proc/{process}")
    try:
        return Usage(
            rss=int((base / "statm").read_text().split()[1]) * PAGE,
            handles=len(os.listdir(base / "fd")),
            threads=len(os.listdir(base / "task")),
        )
    except (OSError, IndexError):
        return None


def processes(root: int) -> Iterator[int]:
    """All descendants of a process."""
    try:
        for task in os.listdir(f"/proc/{root}/task"):
            for child in Path(f"/proc/{root}/task/{task}/children").read_text().split():
                yield int(child)
                yield from processes(int(child))
    except OSError:
        return


def disk_use(folder: Path) -> tuple[int, int]:
    """The number of files below a folder, and their bytes on disk. Files may vanish meanwhile."""
    files = size = 0
    waiting = [folder]
    while waiting:
        try:
            for entry in os.scandir(waiting.pop()):
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(Path(entry.path))
                    continue
                files += 1
                size += entry.stat(follow_symlinks=False).st_blocks * 512
        except OSError:
            continue
    return files, size


# --- growth ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Growth:
    """The lower quartiles of the first and the last third of a series after its warm-up.

    A leak lifts them. Idle connections and threads of a pool, and an anchor in the making, come and go above them.
    """

    first: float
    last: float
    seconds: float  # between the two

    @property
    def value(self) -> float:
        return self.last - self.first


@dataclass
class Series:
    """A value over time."""

    times: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def add(self, at: float, value: float) -> None:
        self.times.append(at)
        self.values.append(value)

    @property
    def life(self) -> float:
        """Seconds from the first to the last sample."""
        return self.times[-1] - self.times[0] if self.times else 0.0

    @property
    def peak(self) -> float:
        return max(self.values, default=0.0)

    @property
    def final(self) -> float:
        return self.values[-1] if self.values else 0.0

    def growth(self, warm_up: float, at_least: int = 12) -> Growth | None:
        """None if fewer samples than `at_least` follow the first `warm_up` seconds."""
        warm = [index for index, at in enumerate(self.times) if at - self.times[0] >= warm_up]
        if len(warm) < at_least:
            return None
        third = len(warm) // 3
        first, last = warm[:third], warm[-third:]
        between = statistics.mean(self.times[index] for index in last) - statistics.mean(
            self.times[index] for index in first
        )
        return Growth(self._floor(first), self._floor(last), between)

    def _floor(self, indexes: list[int]) -> float:
        return sorted(self.values[index] for index in indexes)[len(indexes) // 4]


@dataclass
class ResourceLog:
    """Series by measure and owner. A process that was started again is another owner: (name, process id)."""

    series: dict[str, dict[tuple[str, int], Series]] = field(default_factory=lambda: defaultdict(dict))
    clock: float = field(default_factory=time.monotonic)

    def add(self, measure: str, owner: str, value: float, life: int = 0) -> None:
        self.series[measure].setdefault((owner, life), Series()).add(time.monotonic() - self.clock, value)

    def add_process(self, owner: str, process: int) -> None:
        usage = read_usage(process)
        if usage is not None:
            self.add("memory", owner, usage.rss, process)
            self.add("handles", owner, usage.handles, process)
            self.add("threads", owner, usage.threads, process)

    def worst(self, measure: str, warm_up: float, life: float = 0.0) -> tuple[str, Growth] | None:
        """The owner whose value grew most, among lives of at least `life` seconds. None if there is none."""
        found = [
            (owner, growth)
            for (owner, _), series in self.series[measure].items()
            if series.life >= life and (growth := series.growth(warm_up)) is not None
        ]
        return max(found, key=lambda one: one[1].value, default=None)

    def peak(self, measure: str, prefix: str = "") -> float:
        chosen = [series for (owner, _), series in self.series[measure].items() if owner.startswith(prefix)]
        return max((series.peak for series in chosen), default=0.0)

    def final(self, measure: str, prefix: str = "") -> float:
        """The largest last value of the owners, each in its last life."""
        last = {owner: series for (owner, _), series in self.series[measure].items() if owner.startswith(prefix)}
        return max((series.final for series in last.values()), default=0.0)
