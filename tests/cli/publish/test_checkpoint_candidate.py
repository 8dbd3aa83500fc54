"""Which directories `weightwire publish` accepts as a checkpoint, and its warning about steps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from support.commands import Training, bits_of, weightwire


class TestDirectory:
    def test_unrelated_files_are_refused(self, bucket: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in "ab":
            safetensors.numpy.save_file({name: np.ones(3)}, tmp_path / f"{name}.safetensors")
        monkeypatch.chdir(tmp_path)
        weightwire("publish", ".", bucket).check_failed("holds 2 safetensors files, but neither an index")
        assert not bucket.exists()

        (tmp_path / "config.json").write_text("{}")
        assert weightwire("publish", ".", bucket).code == 0

    def test_shards_without_an_index_are_one_model(self, training: Training, bucket: Path) -> None:
        path = training.save("checkpoint-1")
        for name in ("model.safetensors.index.json", "config.json"):
            (path / name).unlink()
        assert weightwire("publish", path, bucket).code == 0
        weightwire("restore", bucket, "-o", bucket.parent / "restored")
        assert bits_of(bucket.parent / "restored") == bits_of(path)

    def test_cache_stays_inside_the_working_directory(
        self, training: Training, bucket: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = training.save("checkpoint-1")
        monkeypatch.chdir(path)
        assert weightwire("publish", ".", bucket).code == 0
        assert (path / ".weightwire").is_dir()
        assert not (training.parent / ".weightwire").exists()


class TestSteps:
    def test_earlier_step_is_published_with_a_warning(self, training: Training, bucket: Path) -> None:
        early, late = training.save("checkpoint-100"), training.save("checkpoint-200")
        weightwire("publish", late, bucket)

        ran = weightwire("publish", early, bucket)

        warning, line = ran.err.splitlines()
        assert warning == (
            f"warning: {bucket}: version 1 has step 200, this checkpoint has step 100; published as version 3. "
            f"If this is a mistake, run `weightwire restore {bucket} --version 1 -o DIR` and publish DIR"
        )
        assert line.startswith("version 3 ")

    def test_later_or_unknown_steps_are_published_without_a_warning(self, training: Training, bucket: Path) -> None:
        for name in ("a", "b", "checkpoint-100", "checkpoint-200"):
            ran = weightwire("publish", training.save(name), bucket)
            assert "warning" not in ran.err
