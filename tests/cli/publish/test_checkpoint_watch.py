"""Which checkpoints count as finished, and their steps."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from support.commands import Training
from weightwire.cli.publish.checkpoint_watch import CheckpointWatch, step_of


class TestWatching:
    """Uses a fake clock instead of waiting."""

    @pytest.fixture(autouse=True)
    def _clock(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)

    def look(self, watch: CheckpointWatch, seconds: float) -> list[str]:
        self.now += seconds
        return [finished.path.name for finished in watch.finished()]

    def test_changing_checkpoint_is_not_finished(self, training: Training) -> None:
        path = training.save("checkpoint-1")
        watch = CheckpointWatch(training.parent)

        assert self.look(watch, 0) == []
        assert self.look(watch, 1.9) == []
        (path / "model-00001-of-00002.safetensors").write_bytes(b"longer")
        assert self.look(watch, 1) == []
        os.utime(path / "config.json", (1, 1))
        assert self.look(watch, 1.5) == []
        assert self.look(watch, 2) == ["checkpoint-1"]

    def test_checkpoint_without_all_shards_is_not_finished(self, training: Training) -> None:
        path = training.save("checkpoint-1")
        (path / "model.safetensors.index.json").unlink()
        (path / "model-00002-of-00002.safetensors").rename(path.parent / "later")
        watch = CheckpointWatch(training.parent)

        assert [self.look(watch, 3) for _ in range(2)] == [[], []]
        (path.parent / "later").rename(path / "model-00002-of-00002.safetensors")
        assert [self.look(watch, 3) for _ in range(2)] == [[], ["checkpoint-1"]]

    def test_checkpoints_are_ordered_by_step(self, training: Training) -> None:
        for name in ("checkpoint-1000", "checkpoint-20", "checkpoint-300"):
            training.save(name)
        watch = CheckpointWatch(training.parent)

        self.look(watch, 0)

        assert self.look(watch, 3) == ["checkpoint-20", "checkpoint-300", "checkpoint-1000"]

    def test_checkpoints_are_ordered_by_time_if_some_have_no_step(self, training: Training) -> None:
        for second, name in enumerate(("checkpoint-1000", "best", "checkpoint-20")):
            for file in training.save(name).iterdir():
                os.utime(file, (second, second))
        watch = CheckpointWatch(training.parent)

        self.look(watch, 0)

        assert self.look(watch, 3) == ["checkpoint-1000", "best", "checkpoint-20"]

    def test_published_checkpoint_is_offered_again_only_after_a_change(self, training: Training) -> None:
        os.utime(training.save("checkpoint-1") / "config.json", (1, 1))  # file systems round the time of a change
        watch = CheckpointWatch(training.parent)
        self.look(watch, 0)
        self.now += 3
        (finished,) = watch.finished()

        watch.mark_done(finished)

        assert self.look(watch, 3) == []
        training.save("checkpoint-1")
        assert [self.look(watch, 3) for _ in range(2)] == [[], ["checkpoint-1"]]

    def test_old_checkpoints_are_skipped_at_the_start(self, training: Training) -> None:
        for second in (100, 200, 300):
            for file in training.save(f"checkpoint-{second}").iterdir():
                os.utime(file, (second, second))
        watch = CheckpointWatch(training.parent)

        watch.mark_old_done(200, published=1000.0)  # 300 was already written but not published
        self.look(watch, 0)

        assert self.look(watch, 3) == ["checkpoint-300"]

    def test_checkpoints_without_steps_are_skipped_up_to_the_last_version(self, training: Training) -> None:
        for second, name in ((100, "a"), (200, "b"), (2000, "c")):
            for file in training.save(name).iterdir():
                os.utime(file, (second, second))
        watch = CheckpointWatch(training.parent)

        watch.mark_old_done(None, published=1000.0)
        self.look(watch, 0)

        assert self.look(watch, 3) == ["c"]

    def test_hidden_directories_and_a_deleted_parent_are_ignored(self, training: Training) -> None:
        training.save(".weightwire")
        watch = CheckpointWatch(training.parent)
        self.look(watch, 0)
        assert self.look(watch, 3) == []

        shutil.rmtree(training.parent)

        assert self.look(watch, 3) == []

    @pytest.mark.parametrize(
        ("name", "step"),
        [
            ("checkpoint-500", 500),
            ("global_step_12", 12),
            ("global_step7", 7),
            ("iter_0000500", 500),
            ("step-3", 3),
            ("500", 500),
            ("llama-3", None),
            ("checkpoint-best", None),
            ("checkpoint-5-merged", None),
        ],
    )
    def test_step_is_read_from_the_name(self, tmp_path: Path, name: str, step: int | None) -> None:
        (tmp_path / name).mkdir()

        assert step_of(tmp_path / name) == step

    @pytest.mark.parametrize(
        ("text", "step"),
        [
            ('{"global_step": 12}', 12),
            ("{", None),
            ("[]", None),
            ('{"global_step": "x"}', None),
            ('{"global_step": true}', None),
        ],
    )
    def test_step_is_read_from_trainer_state(self, tmp_path: Path, text: str, step: int | None) -> None:
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "trainer_state.json").write_text(text)

        assert step_of(tmp_path / "model") == step
