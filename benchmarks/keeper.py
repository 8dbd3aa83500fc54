"""A follower process that keeps a vLLM server up to date. pause.py and cache_policy.py start it.

    python benchmarks/keeper.py URL INTO BASE ENGINE CACHE

Does the same as `weightwire follow URL --into INTO --base BASE --engine vllm=ENGINE --cache CACHE`, and prints its
events as JSON lines. Each line on stdin wakes it. It exits when stdin closes.
"""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path

from receiver import print_event, print_json

from weightwire import Follower
from weightwire.engines import CachePolicy, Keeper, open_engine


def main() -> None:
    url, into, base, engine, cache = sys.argv[1:]
    policy: CachePolicy = "keep" if cache == "keep" else "flush"
    with (
        Follower(url, into=into, base=Path(base), on_event=print_event) as follower,
        closing(Keeper(follower, [open_engine(f"vllm={engine}", policy)], on_event=print_event)) as keeper,
    ):
        keeper.start()
        print_json(stage="following")
        for _ in sys.stdin:
            follower.wake()


if __name__ == "__main__":
    main()
