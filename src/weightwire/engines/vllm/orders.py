"""What a follower tells an engine to do, and what the engine answers. Pure.

Orders travel as the update info of vLLM's weight transfer. Answers are files in a directory that the order names, one
per worker: vLLM's own have no room for them.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from weightwire.engines.engine import ServedVersion

__all__ = ["Action", "Answer", "check_place", "read_answers", "write_answer"]

Action = Literal["adopt", "check", "stage", "swap", "undo", "reload"]


@dataclass(frozen=True)
class Answer:
    """What came of an order in one worker, and what it holds since. `problem` says why it was not done."""

    holding: ServedVersion | None
    done: bool = True
    torn: bool = False  # that it must not serve: its weights may be a mixture
    problem: str = ""
    hint: str = ""
    unpatchable: str = ""  # why nothing can be patched in place: only whole reloads can be done


def check_place(directory: str, token: str) -> None:
    """Answers go only to who may leave patches here: whoever reaches the server's port could ask for more."""
    path = Path(directory)
    if not (path.name.startswith("weightwire-") and path.is_dir() and os.getuid() in (0, path.stat().st_uid)):
        raise ValueError(f"{directory!r} is no directory of a follower of this user")
    if not token.isalnum():
        raise ValueError("no token")


def write_answer(directory: Path, token: str, worker: str, answer: Answer) -> None:
    """Appears all at once."""
    partial = directory / f".{token}.{worker}"
    partial.write_text(json.dumps(asdict(answer)))
    os.replace(partial, directory / f"{token}.{worker}.json")


def read_answers(directory: Path, token: str) -> list[Answer]:
    """Those that are there."""
    return [_parse(json.loads(path.read_text())) for path in sorted(directory.glob(f"{token}.*.json"))]


def _parse(fields: dict[str, Any]) -> Answer:
    holding = fields.pop("holding")
    return Answer(None if holding is None else ServedVersion(**holding), **fields)
