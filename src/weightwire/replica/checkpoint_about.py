"""weightwire.json: what a checkpoint that weightwire made says of itself."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from weightwire.replica.workdir import to_json
from weightwire.weights import ABOUT_FILE

__all__ = ["CheckpointAbout"]


@dataclass(frozen=True)
class CheckpointAbout:
    """Which version of which run a checkpoint holds; of one in a replica, whether it shares blocks with its work."""

    run: str
    version: int
    commit: str  # the SHA-256 of the version's commit record
    state: str
    shares_blocks: bool | None = None

    @classmethod
    def read(cls, checkpoint: Path) -> Self:
        """Raises OSError or ValueError if the checkpoint does not say."""
        value = json.loads((checkpoint / ABOUT_FILE).read_bytes())
        try:
            return cls(value["run"], value["version"], value["commit"], value["state"], value.get("shares_blocks"))
        except (LookupError, TypeError, AttributeError) as problem:
            raise ValueError(f"{checkpoint / ABOUT_FILE}: does not say which version of a run this is") from problem

    def to_json(self) -> bytes:
        return to_json({key: value for key, value in asdict(self).items() if value is not None})
