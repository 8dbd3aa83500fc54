"""A run to attack, and the attacks of whoever can write to its bucket.

A follower holds version 3, the fence of a second publisher. Version 4 is attacked. Version 5 comes afterwards.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from support.failing_bucket import in_memory
from support.followers import Trainer, copy_of
from support.memory_s3 import MemoryS3
from support.small_run import Bits
from weightwire.chain.record_paths import HEAD, RUN, commit_path, data_path, gc_path, heartbeat_path
from weightwire.chain.records import Commit, DataFile, HeadHint, Heartbeat, Shortcut, seal, shortcut_path, unseal
from weightwire.errors import BrokenChain, BucketError, CorruptDelta, DataGone, WeightwireError, WrongBase

__all__ = ["ATTACKS", "BAD", "HELD", "NEXT", "Attack", "DirectoryRun", "StoreRun", "published_run"]

HELD, BAD, NEXT = 3, 4, 5
FILES = Path(__file__).parent / "files"
TENSORS = ["../../escape", "/escape", "..", "a/../../../escape", "\x1b[2Jescape\r\n\0"]
"""Names that would lead out of a directory, or move a cursor."""


@cache
def published_run() -> tuple[dict[str, bytes], dict[int, Bits]]:
    """The objects of a run with such names, and the bits of its versions. Its only anchors are versions 1 and 2."""
    bucket = in_memory()
    trainer = Trainer(bucket.inner, files={"config.json": b"{}"}, anchor_every=2)
    trainer.weights |= {name: trainer.weights["norm"].copy() for name in TENSORS}
    trainer.publish(2)
    trainer.restart()
    trainer.publish(2)
    trainer.close()
    later = tuple(f"{folder}/{version}/" for folder in ("anchors", "shortcuts") for version in (HELD, BAD, NEXT))
    return {path: data for path, data in copy_of(bucket).items() if not path.startswith(later)}, trainer.bits


def objects_of(newest: int) -> dict[str, bytes]:
    """The objects of the run, as they were when `newest` was published."""
    later = {HEAD, *(commit_path(version) for version in range(newest + 1, NEXT + 1))}
    return {path: data for path, data in published_run()[0].items() if path not in later}


class DirectoryRun:
    """The run in a directory."""

    def __init__(self, root: Path) -> None:
        self.root, self.url = root, str(root)

    def show(self, newest: int) -> None:
        """Publishes up to this version. Removes all attacks."""
        shutil.rmtree(self.root, ignore_errors=True)
        for path, data in objects_of(newest).items():
            self.put(path, data)

    def read(self, path: str) -> bytes:
        return (self.root / path).read_bytes()

    def put(self, path: str, data: bytes) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_bytes(data)

    @property
    def commit(self) -> Commit:
        """The commit that is attacked."""
        return unseal(self.read(COMMIT), Commit, "").record

    def store(self, kind: str, data: bytes) -> DataFile:
        """Puts a data file of the attacked version."""
        sha256 = hashlib.sha256(data).hexdigest()
        path = data_path(kind, BAD, self.commit.epoch, 0, sha256)
        self.put(path, data)
        return DataFile(path, len(data), sha256)


class StoreRun:
    """The same in a store that this process serves."""

    def __init__(self, store: MemoryS3) -> None:
        self.store, self.url = store, store.url

    def show(self, newest: int) -> None:
        self.store.calm()
        self.store.objects = objects_of(newest)


@dataclass(frozen=True)
class Attack:
    """`error` is that of a follower that holds version 3; None if it is not harmed and reaches version 4."""

    name: str
    plant: Callable[[Any], None]
    """Attacks a `DirectoryRun`, or a `StoreRun` if `in_store`."""
    error: type[WeightwireError] | None = None
    says: str = ""
    in_store: bool = False
    waits: bool = False
    """Whether readers wait for a timeout."""

    def __str__(self) -> str:
        return self.name


# --- ways to attack ----------------------------------------------------------------------------------------------

Plant = Callable[[DirectoryRun], None]
COMMIT = commit_path(BAD)
DEEP = "[" * 100_000 + "]" * 100_000


def edited(path: str, change: Callable[[bytes], bytes]) -> Plant:
    return lambda run: run.put(path, change(run.read(path)))


def with_field(path: str, name: str, text: str) -> Plant:
    """Appends a field to a record, as raw JSON. A field of this name may be there already."""
    return edited(path, lambda data: data[:-1] + f',"{name}":{text}}}'.encode())


def rewritten(**fields: Any) -> Plant:
    return lambda run: run.put(COMMIT, seal(msgspec.structs.replace(run.commit, **fields)).data)


def of_a_huge_file(run: DirectoryRun) -> None:
    [file] = run.commit.files
    rewritten(files=(msgspec.structs.replace(file, size=2**53 - 1),))(run)


def of_one_file_many_times(run: DirectoryRun) -> None:
    """Every reader would fetch the file so many times."""
    commit = json.loads(run.read(COMMIT))
    run.put(COMMIT, json.dumps({**commit, "files": commit["files"] * 2_000}, separators=(",", ":")).encode())


def with_data(name: str) -> Plant:
    """The commit names a file of tests/hostile/files, with its hash."""
    data = (FILES / f"{name}.safetensors").read_bytes()
    return lambda run: rewritten(files=(run.store("delta", data),))(run)


def with_anchor(name: str) -> Plant:
    """The same with an anchor beside the chain, which new followers try first."""
    data = (FILES / f"{name}.safetensors").read_bytes()

    def plant(run: DirectoryRun) -> None:
        file, commit = run.store("anchor", data), run.commit
        shortcut = seal(Shortcut(run=commit.run, version=BAD, kind="anchor", after=commit.after, files=(file,)))
        run.put(shortcut_path(shortcut), shortcut.data)

    return plant


def with_heartbeat(name: str, path: str) -> Plant:
    def plant(run: DirectoryRun) -> None:
        beat = seal(Heartbeat(run=run.commit.run, name="gpu", version=1, head=1, lease=60.0))
        run.put(path, json.dumps({**json.loads(beat.data), "name": name}).encode())

    return plant


def with_hint(version: int, anchor: str) -> Plant:
    return lambda run: run.put(HEAD, seal(HeadHint(run=run.commit.run, version=version, anchor=anchor)).data)


def repeated(run: DirectoryRun) -> None:
    """The commit of the version held is also in place of the next 200."""
    for version in range(BAD, BAD + 200):
        run.put(commit_path(version), run.read(commit_path(HELD)))


def linked(path: str, target: str) -> Plant:
    """Replaces an object or a folder with a link to something beside the bucket, which has the same content if new."""

    def plant(run: DirectoryRun) -> None:
        link, there = run.root / path, run.root.parent / target
        if not there.exists():
            shutil.move(link, there)
        elif link.is_dir():
            shutil.rmtree(link)
        else:
            link.unlink(missing_ok=True)
        link.symlink_to(there)

    return plant


def with_pipe(run: DirectoryRun) -> None:
    """Opening it for reading would wait for a writer."""
    [file] = run.commit.files
    (run.root / file.path).unlink()
    os.mkfifo(run.root / file.path)


_JSON: Sequence[Attack] = [
    Attack("a key twice", with_field(COMMIT, "version", "3"), BrokenChain, "the number of its back hashes"),
    Attack("a key 100,000 times", with_field(RUN, "x", "1" + ',"x":1' * 100_000)),
    Attack("NaN", with_field(COMMIT, "time", "NaN"), BrokenChain, "it is not JSON"),
    Attack("an infinite number", with_field(COMMIT, "time", "1e999"), BrokenChain, "Number out of range"),
    Attack("an integer of 5,000 digits", with_field(COMMIT, "step", "9" * 5000), BrokenChain, "Integer value out of"),
    Attack("an integer of a million digits", with_field(RUN, "x", "9" * 1_000_000)),
    Attack("deep nesting in a commit", with_field(COMMIT, "x", DEEP), BrokenChain, "it is not JSON"),
    Attack("deep nesting in run.json", with_field(RUN, "x", DEEP)),
    Attack("deep nesting in HEAD.json", lambda run: run.put(HEAD, DEEP.encode())),
    Attack(
        "bytes that are not UTF-8", edited(COMMIT, lambda data: data.replace(b"delta", b"\xff")), BrokenChain, "JSON"
    ),
]
_SIZES: Sequence[Attack] = [
    Attack("a file of 8 PB", of_a_huge_file, BucketError, "truncated"),
    Attack("one file 2,000 times", of_one_file_many_times, BrokenChain, "names two files of one rank"),
    Attack("a tensor of 8 PB", edited(RUN, lambda data: data.replace(b"[5]", b"[2251799813685247]", 1))),
    Attack("a tensor of too many bytes", edited(RUN, lambda data: data.replace(b"[5]", b"[9007199254740991]", 1))),
    Attack(
        "a tensor of 60,000 dimensions", edited(RUN, lambda data: data.replace(b"[5]", b"[5" + b",1" * 60_000 + b"]"))
    ),
    Attack("a bomb", with_data("bomb-8-gigabytes-in-5-kilobytes"), CorruptDelta, "too short for what it claims"),
    Attack("a bomb of changes", with_data("bomb-coo-of-2-to-the-61"), WrongBase, "tensor 'x'"),
    Attack("a bomb of blocks", with_data("bomb-blocks-that-are-not-there"), CorruptDelta, "index is too short"),
    Attack("an index that expands", with_data("bomb-columns"), CorruptDelta, "damaged or too large"),
    Attack("an index of many entries", with_data("bomb-members"), CorruptDelta, "too many entries"),
    Attack("an index of many blocks", with_data("bomb-of-blocks"), CorruptDelta, "too many blocks"),
    Attack("long names that share prefixes", with_data("bomb-of-names"), CorruptDelta, "names are too long"),
    Attack("long names in an anchor", with_anchor("bomb-of-names")),
    Attack("a bomb as an anchor", with_anchor("bomb-8-gigabytes-in-5-kilobytes")),
]
_LOOPS: Sequence[Attack] = [
    Attack("one commit 200 times", repeated, BrokenChain, "claims to be version 3"),
    Attack("a parent that comes later", rewritten(parent="f" * 64), BrokenChain, "parent hash differs"),
    Attack("HEAD.json that names itself", with_hint(BAD, HEAD)),
    Attack("HEAD.json that is far ahead", with_hint(2**53 - 1, "shortcuts/4/anchor-0123456789abcdef.json")),
    Attack("a gc record far ahead", lambda run: run.put(gc_path(10**19), b"{}")),
]
_PATHS: Sequence[Attack] = [
    Attack(
        "a data path", edited(COMMIT, lambda data: data.replace(b"s/4/", b"s/4/../../")), BrokenChain, "not the path"
    ),
    Attack("a side file", edited(RUN, lambda data: data.replace(b'"config.json"', b'"../../escape"', 1))),
    Attack("a replica name", with_heartbeat("../../escape", heartbeat_path("gpu"))),
    Attack("an object name", with_heartbeat("gpu", "replicas/\x1b[2Jescape\r\n.json")),
]
_LINKS: Sequence[Attack] = [
    Attack("a commit that is a link", linked(COMMIT, "elsewhere.json"), BucketError, "a symbolic link"),
    Attack("a commit that is endless", linked(COMMIT, "/dev/zero"), BucketError, "a symbolic link"),
    Attack("commits that are a link to themselves", linked("commits", "run/commits"), BucketError, "symbolic links"),
    Attack("data that is a pipe", with_pipe, DataGone, "no anchor leads"),
    Attack("deltas that are a link", linked("deltas", "elsewhere"), BucketError, "a symbolic link"),
    Attack("anchors that are a link", linked("anchors", "elsewhere")),
    Attack("run.json that is a link", linked(RUN, "elsewhere.json")),
    Attack("HEAD.json that is a link", linked(HEAD, "outside/file")),
    Attack("heartbeats that are a link", linked("replicas", "outside")),
    Attack("probes that are a link", linked("probe", "outside")),
]
ATTACKS = [*_JSON, *_SIZES, *_LOOPS, *_PATHS, *_LINKS]
