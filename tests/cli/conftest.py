"""weightwire in this process, and files for commands that work on files alone."""

from __future__ import annotations

import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import weightwire
from support.checkpoint_trainer import CheckpointTrainer
from support.command_files import Files, make_weights, save, step
from support.commands import Command
from weightwire.cli.shared import terminal


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Command]:
    monkeypatch.setattr(terminal, "has_kernel", lambda: True)  # no note that it is missing
    handler, hook = signal.getsignal(signal.SIGTERM), sys.excepthook
    yield Command(monkeypatch, capsys)
    signal.signal(signal.SIGTERM, handler)
    sys.excepthook = hook


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Files:
    here = tmp_path_factory.mktemp("made")
    weights = make_weights()
    old, new = save(here / "old.safetensors", weights), save(here / "new.safetensors", step(weights))
    weightwire.diff(old, new).write(here / "step.delta")
    return Files(here, old, new, here / "step.delta")


@pytest.fixture
def files(made: Files, tmp_path: Path) -> Files:
    """A copy that a test may damage."""
    here = Path(shutil.copytree(made.here, tmp_path / "files"))
    return Files(here, here / made.old.name, here / made.new.name, here / made.delta.name)


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[CheckpointTrainer]:
    trainer = CheckpointTrainer(tmp_path)
    yield trainer
    trainer.close()


@pytest.fixture
def replica(tmp_path: Path) -> Path:
    return tmp_path / "replica"
