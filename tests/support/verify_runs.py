"""Runs to verify, and ways to damage them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from support.clocked_bucket import Clocked, run
from weightwire.chain.record_paths import commit_path
from weightwire.chain.records import Commit, Sealed, seal, unseal
from weightwire.inspection.findings import Verification
from weightwire.inspection.verify import verify_run
from weightwire.system.runtime import Runtime

__all__ = ["FILES", "data_of", "edit", "flip_last", "only", "read", "rewrite", "said", "verified"]

FILES = {"config.json": b'{"model_type": "tiny"}', "tokenizer/vocab.txt": b"a\nb\n"}


def verified(bucket: Clocked, *, rebuild: bool = False, **more: Any) -> Verification:
    return run(verify_run(bucket, Runtime(), rebuild=rebuild, **more))


def said(found: Verification) -> list[str]:
    return [f"{one.path}: {one.what}" for one in found.problems]


def only(found: Verification) -> str:
    assert len(found.problems) == 1, found.problems
    return said(found)[0]


def read(bucket: Clocked, version: int) -> Sealed[Commit]:
    return unseal(run(bucket.get(commit_path(version))), Commit, "here")


def data_of(bucket: Clocked, version: int, kind: str = "deltas") -> str:
    return bucket.paths(f"{kind}/{version}/")[0]


def edit(bucket: Clocked, path: str, change: Callable[[bytearray], object]) -> None:
    data = bytearray(run(bucket.get(path)))
    change(data)
    bucket.write(path, bytes(data))


def flip_last(data: bytearray) -> None:
    data[-1] ^= 1


def rewrite(bucket: Clocked, version: int, **fields: Any) -> None:
    """Rewrites a commit and adapts all later ones, as an attacker with write access could."""
    head = max(int(path[8:28]) for path in bucket.paths("commits/"))
    commits = [read(bucket, number) for number in range(head + 1)]
    for number in range(version, head + 1):
        record, parent = commits[number].record, commits[number - 1]
        changed: dict[str, Any] = {"parent": parent.sha256, "before": parent.record.after}
        changed["back"] = [commits[number - (2 << k)].sha256 for k in range(len(record.back))]
        if record.kind == "fence":
            changed["after"] = parent.record.after
        commits[number] = seal(msgspec.structs.replace(record, **changed | (fields if number == version else {})))
        bucket.write(commit_path(number), commits[number].data)
