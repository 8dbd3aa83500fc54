"""A publisher in this process that publishes checkpoints."""

from __future__ import annotations

from pathlib import Path

from support.commands import Training
from weightwire.publisher.publisher import Publisher
from weightwire.telemetry.events import Event


class CheckpointTrainer:
    """A publisher, and the checkpoints that it has published."""

    def __init__(self, here: Path) -> None:
        self.bucket = here / "bucket"
        self._training = Training(here / "out")
        self._publisher: Publisher | None = None

    def publish(self) -> Path:
        """Publishes the next checkpoint and returns it."""
        number = len(list(self._training.parent.glob("*"))) + 1
        path = self._training.save(f"checkpoint-{number}")
        if self._publisher is None:
            self._publisher = Publisher(self.bucket, files=path, blocking=True, on_event=_nothing)
        self._publisher.publish(path, step=10 * number, metrics={"reward": 0.5})
        return path

    def close(self) -> None:
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None


def _nothing(event: Event) -> None:
    pass
