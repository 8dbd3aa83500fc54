"""Who plays in the demo: which programs, with which words on their command lines. They are told URLs and nothing else.

Knows the programs' options; starts nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from weightwire.engines.registry import Program, find_engine
from weightwire.errors import CheckpointError, EngineError

__all__ = [
    "OWN_SERVER",
    "ReplicaProgram",
    "environment",
    "find_example",
    "needed_modules",
    "replica",
    "trainer",
]

OWN_SERVER = "torch"  # `weightwire serve`, which follows by itself; any other engine is one of the registry

Word = str | Path

# Several processes share the cores: one thread each is fastest, and on one core nothing else works.
_ONE_THREAD = {"OMP_NUM_THREADS": "1"}


@dataclass(frozen=True)
class ReplicaProgram:
    """A server, and where it answers; where the server is none of ours, a follower beside it."""

    name: str
    url: str
    into: Path
    server: Program
    follower: Program | None = None


def find_example() -> Path:
    """The folder of the example: in the wheel beside this package, in the repository beside its sources."""
    package = Path(__file__).parent.parent
    for folder in (package / "examples" / "wordle", package.parent.parent / "examples" / "wordle"):
        if (folder / "policy" / "config.json").is_file():
            return folder
    raise CheckpointError("the example is not part of this installation", hint="clone the repository, and `make demo`")


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
    """What must be installed to start it. Raises an EngineError where the demo does not know how."""
    if engine == OWN_SERVER:
        return ()
    _launcher(engine)
    return find_engine(engine).needs


def _launcher(engine: str) -> Callable[[Path, int], Program]:
    launch = find_engine(engine).launch
    if launch is None:
        raise EngineError(f"the demo cannot start engine {engine!r}", hint=f"choose {OWN_SERVER}")
    return launch


def trainer(
    example: Path, run: str, environment_url: str, replicas: Sequence[ReplicaProgram], steps: int, seed: int, save: Path
) -> Program:
    rollouts = [word for one in replicas for word in ("--rollout", one.url)]
    where = ["--bucket", run, "--environment", environment_url, *rollouts]
    how: list[Word] = ["--steps", str(steps), "--seed", str(seed), "--save", save]
    return Program([sys.executable, example / "train.py", *where, *how], _ONE_THREAD)
