"""CPU time that other processes use while a benchmark runs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def processor_seconds_of_others() -> float:
    """CPU seconds of the machine so far, stolen time included, without this process and its descendants."""
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(
        int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    )
    ours = sum(ticks(process) for process in descendants(os.getpid()))
    return (user + nice + system + irq + softirq + steal - ours) / os.sysconf("SC_CLK_TCK")


def descendants(process: int) -> Iterator[int]:
    """The process and all its descendants. vLLM's workers are grandchildren."""
    yield process
    with suppress(OSError):
        for thread in Path(f"/proc/{process}/task").iterdir():
            for child in (thread / "children").read_text().split():
                yield from descendants(int(child))


def ticks(process: int) -> int:
    """CPU ticks of a process and of its children that have exited."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has just exited
        return 0
    return sum(map(int, fields[11:15]))
