"""A follower that keeps a vLLM server up to date, in a process of its own: pause.py starts it.

    python benchmarks/keeper.py URL INTO BASE ENGINE

What `weightwire follow URL --into INTO --base BASE --engine vllm=ENGINE` does, and says what it did, and when, in JSON
lines. A line of its input wakes it; it ends with its input.
"""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path

from receiver import say, tell

from weightwire import Follower
from weightwire.engines import Keeper, open_engine


def main() -> None:
    url, into, base, engine = sys.argv[1:]
    with (
        Follower(url, into=into, base=Path(base), on_event=tell) as follower,
        closing(Keeper(follower, [open_engine(f"vllm={engine}")], on_event=tell)) as keeper,
    ):
        keeper.start()
        say(stage="following")
        for _ in sys.stdin:
            follower.wake()


if __name__ == "__main__":
    main()
