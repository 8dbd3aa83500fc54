"""A follower process that keeps a vLLM server up to date. pause.py starts it.

    python benchmarks/keeper.py URL INTO BASE ENGINE

Does the same as `weightwire follow URL --into INTO --base BASE --engine vllm=ENGINE`, and prints its events as JSON
lines. Each line on stdin wakes it. It exits when stdin closes.
"""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path

from receiver import print_event, print_json

from weightwire import Follower
from weightwire.engines import Keeper, open_engine


def main() -> None:
    url, into, base, engine = sys.argv[1:]
    with (
        Follower(url, into=into, base=Path(base), on_event=print_event) as follower,
        closing(Keeper(follower, [open_engine(f"vllm={engine}")], on_event=print_event)) as keeper,
    ):
        keeper.start()
        print_json(stage="following")
        for _ in sys.stdin:
            follower.wake()


if __name__ == "__main__":
    main()
