"""Measures the extra memory of a diff, a patch or a publisher, beyond its inputs and the delta.

    python benchmarks/memory.py diff OLD NEW DELTA      # two checkpoint directories; writes DELTA
    python benchmarks/memory.py patch BASE DELTA        # in place, on a copy of BASE in memory
    python benchmarks/memory.py publish RECORDING BUCKET            # all checkpoints in turn
    python benchmarks/memory.py publish-blocking RECORDING BUCKET

Prints bytes. The figure is the peak of anonymous memory: RssAnon in /proc/self/status, which excludes mapped files. A
thread samples it every millisecond; the codec's kernel releases the GIL, so the thread gets to run. Peak resident
memory would also count the pages of the mapped inputs.

- diff: the delta that it made is subtracted.
- patch: the copy of the weights that it changes is subtracted. The delta is a file, and the patch digests its base.
- publish: the memory that the process had before it made the publisher is subtracted, which includes the trainer's
  weights, and so is the largest delta. It makes anchors and deltas.

The interpreter, its libraries and freed memory that the allocator keeps all count. All use the default number of
threads.

Needs Linux.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

from arguments import absolute_path, recording_path
from flat_weights import flat_copy
from recording import read_checkpoint
from training import Training

import weightwire
from weightwire.publisher.publisher import Publisher

EVERY = 0.001  # seconds
PUBLISHES = 5


class AnonymousPeak:
    """The peak of this process's anonymous memory inside the block, in `bytes`."""

    def __init__(self) -> None:
        self.bytes = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            last = self._done.wait(EVERY)
            self.bytes = max(self.bytes, anonymous_memory())
            if last:
                return


def anonymous_memory() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no RssAnon: this needs Linux 4.5 or later")


def extra_memory_of_diff(old: Path, new: Path, out: Path) -> int:
    with AnonymousPeak() as peak:
        delta = weightwire.diff(old, new)
        delta.write(out)
    return peak.bytes - delta.nbytes


def extra_memory_of_patch(base: Path, delta: Path) -> int:
    target = flat_copy(read_checkpoint(base))
    with AnonymousPeak() as peak:
        weightwire.patch(target.bf16, delta)
    return peak.bytes - int(target.flat.nbytes)


def extra_memory_of_publisher(recording: Path, bucket: Path, blocking: bool) -> int:
    training = Training(recording)
    before = anonymous_memory()
    with AnonymousPeak() as peak, Publisher(bucket, blocking=blocking, anchor_every=2) as publisher:
        for _ in range(PUBLISHES):
            publisher.publish(training.live.bf16)
            publisher.wait()
            training.step()
    deltas = [path.stat().st_size for path in bucket.glob("deltas/*/*.safetensors")]
    return peak.bytes - before - max(deltas)


def main() -> None:
    match sys.argv[1:]:
        case ["diff", old, new, out]:
            print(extra_memory_of_diff(*map(absolute_path, (old, new, out))))
        case ["patch", base, delta]:
            print(extra_memory_of_patch(*map(absolute_path, (base, delta))))
        case ["publish" | "publish-blocking" as how, recording, bucket]:
            print(
                extra_memory_of_publisher(recording_path(recording), absolute_path(bucket), how == "publish-blocking")
            )
        case _:
            sys.exit("usage: memory.py diff OLD NEW DELTA | patch BASE DELTA | publish[-blocking] RECORDING BUCKET")


if __name__ == "__main__":
    main()
