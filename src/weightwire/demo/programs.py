"""The command lines of the demo's programs. The programs know each other only by URL.

Knows the programs' options. Starts nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from weightwire.engines.registry import Program, engine_names, find_engine
from weightwire.errors import CheckpointError, EngineError

__all__ = [
    "OWN_SERVER",
    "ReplicaProgram",
    "environment",
    "find_example",
    "needed_modules",
    "replica",
    "startable_engines",
    "trainer",
]

OWN_SERVER = "torch"  # `weightwire serve`, which has its own follower; other engines come from the registry

Word = str | Path

# Several processes share the cores: one thread each is fastest, and the only way that works on one core.
_ONE_THREAD = {"OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class ReplicaProgram:
    """A server and its URL. A server without its own follower has one beside it."""

    name: str
    url: str
    into: Path
    server: Program
    follower: Program | None = None


def find_example() -> Path:
    """The folder of the example: inside the package in a wheel, at the root of a repository."""
    package = Path(__file__).parent.parent
    for folder in (package / "examples" / "wordle", package.parent.parent / "examples" / "wordle"):
        if (folder / "policy" / "config.json").is_file():
            return folder
    raise CheckpointError(
        "the Wordle example is not part of this installation",
        hint="clone the repository and run `make demo`",
    )


def environment(example: Path, port: int) -> Program:
    return Program([sys.executable, example / "environment.py", "--port", str(port)])


def replica(engine: str, number: int, example: Path, run: str, root: Path, port: int) -> ReplicaProgram:
    name, url, into = f"replica-{number}", f"http://127.0.0.1:{port}", root / f"replica-{number}"
    following: list[Word] = ["--into", into, "--name", name]
    weightwire = [sys.executable, "-m", "weightwire"]
    if engine == OWN_SERVER:
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
        return ReplicaProgram(name, url, into, Program(words, _ONE_THREAD))
    server = _launcher(engine)(example / "policy", port)
    follower = Program([*weightwire, "follow", run, *following, "--engine", f"{engine}={url}"])
    return ReplicaProgram(name, url, into, Program(server.argv, {**_ONE_THREAD, **server.env}), follower)


def needed_modules(engine: str) -> tuple[str, ...]:
    """The modules that an engine needs. Raises EngineError if the demo cannot start this engine."""
    if engine == OWN_SERVER:
        return ()
    _launcher(engine)
    return find_engine(engine).needs


def startable_engines() -> list[str]:
    """The engines that the demo can start."""

    def can_start(name: str) -> bool:
        try:
            return find_engine(name).launch is not None
        except EngineError:  # of another package, which is broken
            return False

    return [OWN_SERVER, *filter(can_start, engine_names())]


def _launcher(engine: str) -> Callable[[Path, int], Program]:
    launch = find_engine(engine).launch
    if launch is None:
        raise EngineError(f"the demo cannot start engine {engine!r}", hint=f"use --engine {OWN_SERVER}")
    return launch


def trainer(
    example: Path, run: str, environment_url: str, replicas: Sequence[ReplicaProgram], steps: int, seed: int, save: Path
) -> Program:
    rollouts = [word for one in replicas for word in ("--rollout", one.url)]
    where = ["--bucket", run, "--environment", environment_url, *rollouts]
    how: list[Word] = ["--steps", str(steps), "--seed", str(seed), "--save", save]
    return Program([sys.executable, example / "train.py", *where, *how], _ONE_THREAD)
