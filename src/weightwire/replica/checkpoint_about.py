"""weightwire.json: which version a checkpoint made by weightwire holds."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from weightwire.replica.workdir import to_json
from weightwire.system import read_regular
from weightwire.weights import ABOUT_FILE

__all__ = ["CheckpointAbout"]


@dataclass(frozen=True)
class CheckpointAbout:
    """The run and version that a checkpoint holds. `shares_blocks`: in a replica, whether it shares disk blocks."""

    run: str
    version: int
    commit: str  # the SHA-256 of the version's commit record
    state: str
    shares_blocks: bool | None = None

    @classmethod
    def read(cls, checkpoint: Path) -> Self:
        """Raises OSError or ValueError if the file is missing or malformed."""
        try:
            value = json.loads(read_regular(checkpoint / ABOUT_FILE))
            return cls(value["run"], value["version"], value["commit"], value["state"], value.get("shares_blocks"))
        except (LookupError, TypeError, AttributeError, RecursionError) as problem:
            raise ValueError(f"{checkpoint / ABOUT_FILE}: does not name a run and version") from problem

    def to_json(self, **more: int | None) -> bytes:
        """`more` are entries for other programs, which `read` ignores."""
        return to_json({key: value for key, value in asdict(self).items() if value is not None} | more)
