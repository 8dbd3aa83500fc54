"""What fault tests check: no acknowledged version is lost, and every checkpoint has the trainer's bits."""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import dataclass, field
from pathlib import Path

import safetensors

from faults.actors import Journal, Line, bits_at
from support.stores import SeaweedFS
from weightwire.bucket.bucket import Bucket
from weightwire.bucket.registry import open_bucket
from weightwire.chain.record_paths import commit_path
from weightwire.chain.records import Commit, unseal

__all__ = ["Promises", "Violation", "bucket_of", "read_about", "read_commits"]


class Violation(AssertionError):
    """A broken promise."""


@dataclass
class Promises:
    """What the trainer's journal and the bucket say. `learn` reads what is new in the journal."""

    bucket: Bucket
    journal: Journal.Reader
    seed: int
    steps: dict[str, int] = field(default_factory=dict)
    """By state: all captured steps."""
    acknowledged: list[Line] = field(default_factory=list)
    rests: list[Line] = field(default_factory=list)
    commits: dict[int, Commit] = field(default_factory=dict)
    checked: int = 0
    """The number of checked acknowledgements."""

    def learn(self) -> None:
        for line in self.journal.read():
            if line["what"] == "captured":
                self.steps[line["state"]] = line["step"]
            elif line["what"] == "acknowledged":
                self.acknowledged.append(line)
            elif line["what"] == "rests":
                self.rests.append(line)

    def check_acknowledged(self) -> None:
        """Checks that every acknowledged version is in the bucket, with its state and step."""
        self.learn()
        acknowledged = self.acknowledged[self.checked :]  # before the commits are read: it must be in there
        self.commits |= read_commits(self.bucket, max(self.commits, default=-1) + 1)
        for line in acknowledged:
            commit = self.commits.get(line["version"])
            if commit is None or commit.after != line["state"] or commit.step != line["step"]:
                raise Violation(f"version {line['version']} was acknowledged, but is not in the bucket")
            self.checked += 1

    def check_all_again(self) -> None:
        """Reads all commits again, and checks that each holds a state that the trainer had."""
        self.checked, self.commits = 0, {}
        self.check_acknowledged()
        for version, commit in self.commits.items():
            if commit.after and commit.after not in self.steps:
                raise Violation(f"version {version} has a state that the trainer never had")

    @property
    def newest(self) -> Commit:
        return self.commits[max(self.commits)]

    def check_rested(self) -> None:
        """Checks that the newest version is the last step of the trainer, which rests."""
        self.check_acknowledged()
        if self.steps.get(self.newest.after) != self.rests[-1]["step"]:
            raise Violation(f"version {self.newest.version} is not the last published step, {self.rests[-1]['step']}")

    def check_checkpoint(self, path: Path, owner: str, state: str | None = None) -> None:
        """Checks that a checkpoint has the bits of one step of the trainer; with `state`, of this one."""
        self.learn()
        about = read_about(path)
        if about is None or about["state"] not in self.steps or about["state"] != (state or about["state"]):
            raise Violation(f"{owner}: `current` is {about}, which is not a valid version")
        # With the safetensors library, not with our own reader.
        tensors = safetensors.deserialize((path / "model.safetensors").read_bytes())
        held = {name: bytes(tensor["data"]) for name, tensor in tensors}
        if held != bits_at(self.seed, self.steps[about["state"]]):
            raise Violation(f"{owner}: version {about['version']} has other bits than the trainer had")


def bucket_of(server: SeaweedFS, url: str) -> Bucket:
    """Opens the bucket with the environment of the server."""
    before = dict(os.environ)
    os.environ.update(server.env)
    try:
        return open_bucket(url)
    finally:
        os.environ.clear()
        os.environ.update(before)


def read_commits(bucket: Bucket, first: int = 0) -> dict[int, Commit]:
    """All commits from version `first` on."""

    async def read() -> dict[int, Commit]:
        names = sorted(one.path for one in await bucket.list("commits/"))
        if names != [commit_path(version) for version in range(len(names))]:
            raise Violation("the chain has holes")
        found = [unseal(await bucket.get(name), Commit, name).record for name in names[first:]]
        return {commit.version: commit for commit in found}

    return asyncio.run(read())


def read_about(path: Path) -> Line | None:
    """What a checkpoint says about itself. None if there is none."""
    try:
        about: Line = json.loads((path / "weightwire.json").read_bytes())
    except FileNotFoundError:
        return None
    return about
