"""All fuzz targets by name. A new decoder gets a target here, and a folder in corpus/."""

from __future__ import annotations

from pathlib import Path

from fuzz import block_targets, file_targets, http_targets, record_targets, trust_targets
from fuzz.target import Target

CORPUS = Path(__file__).parent / "corpus"

TARGETS: dict[str, Target] = {
    target.name: target
    for room in (block_targets, file_targets, record_targets, trust_targets, http_targets)
    for target in room.TARGETS
}


def corpus_of(name: str) -> list[Path]:
    return sorted((CORPUS / name).glob("*.input"))
