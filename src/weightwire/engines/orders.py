"""The messages between a follower and the workers of a server: orders and answers.

Orders travel in the server's own requests for weight updates. Answers are files in a directory named by the order, one
per worker, because the server's replies cannot carry them.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from weightwire.engines.engine import ServedVersion
from weightwire.system import read_regular

__all__ = ["Action", "Answer", "Order", "check_place", "read_answers", "write_answer"]

Action = Literal["status", "adopt", "check", "stage", "swap", "undo", "forget", "reload"]


@dataclass(frozen=True)
class Order:
    """`file` is a patch or checkpoint that leads to `run`, `version` and `state`.

    `model` is empty for the model that a server serves, or names another one in its workers.
    """

    action: str
    directory: str
    token: str
    file: str = ""
    run: str = ""
    version: int = -1
    state: str = ""
    model: str = ""

    @property
    def target(self) -> ServedVersion:
        return ServedVersion(self.run, self.version, self.state)


@dataclass(frozen=True)
class Answer:
    """The result of an order in one worker, and the version it then holds. `problem` is the reason of a failure."""

    holding: ServedVersion | None
    done: bool = True
    mixed: bool = False  # its weights may be a mixture, so it must not serve
    problem: str = ""
    hint: str = ""
    unpatchable: str = ""  # the reason why it cannot be patched, only reloaded
    not_kept: str = ""  # the reason why running requests cannot keep their KV cache


def check_place(directory: str, token: str) -> None:
    """Restricts answers to directories of this user's followers: anyone who reaches the port can send orders."""
    path = Path(directory)
    if not (path.name.startswith("weightwire-") and path.is_dir() and os.getuid() in (0, path.stat().st_uid)):
        raise ValueError(f"{directory!r} is not a directory of a follower of this user")
    if not token.isalnum():
        raise ValueError("the token is malformed")


def write_answer(directory: Path, token: str, worker: str, answer: Answer) -> None:
    """Writes an answer atomically."""
    partial = directory / f".{token}.{worker}"
    partial.write_text(json.dumps(asdict(answer)))
    os.replace(partial, directory / f"{token}.{worker}.json")


def read_answers(directory: Path, token: str) -> list[Answer]:
    """The answers written so far."""
    return [_parse(json.loads(read_regular(path))) for path in sorted(directory.glob(f"{token}.*.json"))]


def _parse(fields: dict[str, Any]) -> Answer:
    holding = fields.pop("holding")
    return Answer(None if holding is None else ServedVersion(**holding), **fields)
