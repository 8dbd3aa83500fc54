"""Who plays in the demo: which programs, with which words on their command lines. They are told URLs and nothing else.

Knows the programs' options; starts nothing.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from weightwire.errors import CheckpointError

__all__ = ["ENGINES", "Command", "ReplicaProgram", "environment", "find_example", "replica", "trainer"]

ENGINES = ("torch", "vllm")

Word = str | Path

# Several processes share the cores: one thread each is fastest, and on one core nothing else works.
_ONE_THREAD = {"OMP_NUM_THREADS": "1"}
_VLLM = {
    "VLLM_SERVER_DEV_MODE": "1",  # the endpoints through which weights are updated
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    # For CPUs, and without effect elsewhere: gigabytes of cache, and no core for itself.
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


@dataclass(frozen=True)
class Command:
    words: Sequence[Word]
    env: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ReplicaProgram:
    """A server, and where it answers; where the server is none of ours, a follower beside it."""

    name: str
    url: str
    into: Path
    server: Command
    follower: Command | None = None


def find_example() -> Path:
    """The folder of the example: in the wheel beside this package, in the repository beside its sources."""
    package = Path(__file__).parent.parent
    for folder in (package / "examples" / "wordle", package.parent.parent / "examples" / "wordle"):
        if (folder / "policy" / "config.json").is_file():
            return folder
    raise CheckpointError("the example is not part of this installation", hint="clone the repository, and `make demo`")


def environment(example: Path, port: int) -> Command:
    return Command([sys.executable, example / "environment.py", "--port", str(port)])


def replica(engine: str, number: int, example: Path, run: str, root: Path, port: int) -> ReplicaProgram:
    name, url, into = f"replica-{number}", f"http://127.0.0.1:{port}", root / f"replica-{number}"
    following: list[Word] = ["--into", into, "--name", name]
    weightwire = [sys.executable, "-m", "weightwire"]
    if engine == "torch":
        words: list[Word] = [
            *weightwire,
            "serve",
            example / "policy",
            "--follow",
            run,
            *following,
            "--port",
            str(port),
            "--threads",
            "1",
        ]
        return ReplicaProgram(name, url, into, Command(words, _ONE_THREAD))
    # `vllm serve` is the same, where the distribution is named vllm.
    vllm: list[Word] = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", example / "policy"]
    sizes = ["--max-model-len", "128", "--max-num-seqs", "128", "--dtype", "bfloat16", "--enforce-eager"]
    transfer = ["--weight-transfer-config", json.dumps({"backend": "weightwire"})]
    server = Command([*vllm, "--host", "127.0.0.1", "--port", str(port), *sizes, *transfer], _ONE_THREAD | _VLLM)
    follower = Command([*weightwire, "follow", run, *following, "--engine", f"vllm={url}"])
    return ReplicaProgram(name, url, into, server, follower)


def trainer(
    example: Path, run: str, environment_url: str, replicas: Sequence[ReplicaProgram], steps: int, seed: int, save: Path
) -> Command:
    rollouts = [word for one in replicas for word in ("--rollout", one.url)]
    where = ["--bucket", run, "--environment", environment_url, *rollouts]
    how: list[Word] = ["--steps", str(steps), "--seed", str(seed), "--save", save]
    return Command([sys.executable, example / "train.py", *where, *how], _ONE_THREAD)
