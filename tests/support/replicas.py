"""Checks of replicas of a `Story`."""

from __future__ import annotations

from pathlib import Path

import safetensors.numpy

from support.small_run import Story, bits_of
from weightwire.replica.replica import Replica

STORY = Story()


def check(replica: Replica, version: int, story: Story = STORY) -> None:
    """Checks that a replica holds a version, bit for bit."""
    assert replica.position == story.at(version)
    assert replica.state == story.states[version]
    assert bits_of(replica.weights) == story.bits[version]
    assert replica.trouble is None


def loaded(directory: Path) -> dict[str, bytes]:
    """The weights of a checkpoint, loaded with the stock library."""
    with safetensors.safe_open(directory / "model.safetensors", "np") as file:
        assert file.metadata() == {"format": "pt"}
    return {
        name: data["data"] for name, data in safetensors.deserialize((directory / "model.safetensors").read_bytes())
    }


def reopened(replica: Replica) -> Replica:
    replica.close()
    return Replica.open(replica.directory, threads=1)


def checkpoints(replica: Replica) -> list[int]:
    """The versions that have a directory."""
    return sorted(int(path.name.split("-")[0]) for path in (replica.directory / "checkpoints").iterdir())
