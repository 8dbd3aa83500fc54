"""`weightwire publish`, as a user runs it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from support.commands import (
    Running,
    Training,
    bits_of,
    kinds_in,
    save_checkpoint,
    state_of,
    tree,
    versions_in,
    weightwire,
)
from weightwire.cli.publish.checkpoint_candidate import CheckpointCandidate, TornCheckpoint
from weightwire.cli.publish.run_publisher import PublishOptions, RunPublisher
from weightwire.cli.shared.terminal import byte_size
from weightwire.publisher import encoded_version
from weightwire.publisher.copy_advance import advance_copy


def restored(bucket: Path, version: int) -> dict[str, bytes]:
    out = bucket.parent / f"restored-{version}"
    ran = weightwire("restore", bucket, "--version", version, "-o", out)
    assert ran.code == 0, ran.err
    return bits_of(out)


class TestPublish:
    def test_first_version_is_an_anchor_and_the_next_a_delta(self, training: Training, bucket: Path) -> None:
        first, second = training.save("checkpoint-100"), training.save("checkpoint-200")

        started = weightwire("publish", first, bucket)
        continued = weightwire("publish", second, bucket)

        where = str(bucket)
        assert (started.code, started.out, continued.code, continued.out) == (0, "", 0, "")
        assert started.err.startswith(f"version 1 (step 100) of {where} from checkpoint-100: ")
        assert " for 50 kB of weights (" in started.err
        assert ", an anchor, " in started.err
        assert continued.err.startswith(f"version 3 (step 200) of {where} from checkpoint-200: ")
        assert ", 1.03% changed, " in continued.err
        assert kinds_in(bucket) == ["fence", "anchor", "fence", "delta"]
        assert [commit.get("step") for commit in versions_in(bucket)] == [None, 100, None, 200]
        assert restored(bucket, 1) == bits_of(first)
        assert restored(bucket, 3) == bits_of(second)

    def test_publish_writes_json(self, training: Training, bucket: Path) -> None:
        path = training.save("checkpoint-100")

        ran = weightwire("publish", path, bucket, "--step", 7, "--json")

        figures, commit = json.loads(ran.out), versions_in(bucket)[1]
        assert figures.pop("seconds") >= 0
        assert {"encode", "upload"} <= figures.pop("stages").keys()
        assert figures == {
            "url": str(bucket),
            "run": commit["run"],
            "version": 1,
            "epoch": 1,
            "published": True,
            "state": state_of(path),
            "checkpoint": str(path),
            "kind": "anchor",
            "step": 7,
            "time": commit["time"],
            "metrics": {},
            "bytes": commit["files"][0]["size"],
            "changed": None,
            "anchor_bytes": None,
            "weights": 24704,
            "weights_bytes": 49664,
        }

    def test_same_weights_are_not_published_again(self, training: Training, bucket: Path) -> None:
        path = training.save("checkpoint-100")
        weightwire("publish", path, bucket)
        before = tree(bucket)

        again = weightwire("publish", path, bucket, "--step", 9, "--json")

        assert again.code == 0
        assert again.err == f"already version 1 of {bucket} (its step stays 100): nothing to publish\n"
        figures = json.loads(again.out)
        assert (figures["published"], figures["version"], figures["step"]) == (False, 1, 100)
        assert tree(bucket) == before

    @pytest.mark.parametrize("cached", [True, False])
    def test_anchor_every_1_repairs_a_damaged_run(self, training: Training, bucket: Path, cached: bool) -> None:
        weightwire("publish", training.save("checkpoint-100"), bucket)
        newest = training.save("checkpoint-200")
        weightwire("publish", newest, bucket)
        [delta] = (bucket / "deltas" / "3").iterdir()
        delta.write_bytes(delta.read_bytes()[:-1] + b"?")
        if not cached:
            shutil.rmtree(newest.parent / ".weightwire")
        assert weightwire("restore", bucket, "-o", bucket.parent / "lost").code == 1

        repaired = weightwire("publish", newest, bucket, "--anchor-every", 1)

        assert repaired.code == 0, repaired.err
        assert restored(bucket, versions_in(bucket)[-1]["version"]) == bits_of(newest)
        before = tree(bucket)
        again = weightwire("publish", newest, bucket, "--anchor-every", 1)
        assert "nothing to publish" in again.err
        assert tree(bucket) == before

    def test_single_file_is_published_without_side_files(self, training: Training, bucket: Path) -> None:
        path = training.parent.with_name("weights.safetensors")
        safetensors.numpy.save_file(training.weights, path)

        assert weightwire("publish", path, bucket).code == 0
        assert restored(bucket, 1) == bits_of(path)
        assert json.loads((bucket / "run.json").read_bytes())["files"] == []

    def test_side_files_are_published_without_files_of_the_trainer(self, training: Training, bucket: Path) -> None:
        path = training.save("checkpoint-100")
        for name in ("optimizer.pt", "training_args.bin", "trainer_state.json", "checkpoint-9/config.json"):
            (path / name).parent.mkdir(exist_ok=True)
            (path / name).write_bytes(b"not for inference")
        with (path / "huge.json").open("wb") as file:
            file.truncate(65 << 20)

        ran = weightwire("publish", path, bucket)

        assert ran.err.startswith("note: huge.json (68 MB) is left out")
        files = json.loads((bucket / "run.json").read_bytes())["files"]
        assert [file["name"] for file in files] == ["config.json", "tokenizer/vocab.txt"]

    def test_run_from_a_base_has_no_anchor(self, training: Training, bucket: Path) -> None:
        base, path = training.save("base"), training.save("checkpoint-1")

        ran = weightwire("publish", path, bucket, "--base", base, "--source", "hf.co/some/base")

        assert ran.code == 0, ran.err
        assert kinds_in(bucket) == ["fence", "base", "delta"]
        assert versions_in(bucket)[1]["source"] == "hf.co/some/base"
        assert not (bucket / "anchors").exists()
        weightwire("restore", bucket, "-o", bucket.parent / "r", "--base", base)
        assert bits_of(bucket.parent / "r") == bits_of(path)

    def test_base_itself_is_not_published_again(self, training: Training, bucket: Path) -> None:
        base = training.save("base")

        ran = weightwire("publish", base, bucket, "--base", base)

        assert ran.err == f"already version 1 of {bucket}: nothing to publish\n"
        assert kinds_in(bucket) == ["fence", "base"]

    def test_contradictory_options_are_refused(self, training: Training, bucket: Path) -> None:
        path = training.save("checkpoint-1")

        assert weightwire("publish", path, bucket, "--source", "x").code == 2
        assert weightwire("publish", "--watch", path, bucket, "--step", 1).code == 2
        assert weightwire("publish", path, bucket, "--anchor-every", 0).code == 2
        assert not bucket.exists()


class TestAnchors:
    def test_anchors_are_published_every_n_versions(self, training: Training, bucket: Path) -> None:
        for number in range(1, 6):
            ran = weightwire("publish", training.save(f"checkpoint-{number}"), bucket, "--anchor-every", 2)
            assert ran.code == 0, ran.err

        assert len(list((bucket / "shortcuts").glob("*/*.json"))) == 2

    def test_anchor_beside_a_delta_is_mentioned(self, training: Training, bucket: Path) -> None:
        weightwire("publish", training.save("checkpoint-1"), bucket)
        ran = weightwire("publish", training.save("checkpoint-2"), bucket, "--anchor-every", 1, "--json")

        [shortcut] = (bucket / "shortcuts" / "3").glob("*.json")
        size = json.loads(shortcut.read_bytes())["files"][0]["size"]
        assert json.loads(ran.out)["anchor_bytes"] == size
        assert f"changed, plus an anchor of {byte_size(size)}, " in ran.err


class TestCache:
    """The last published weights, kept beside the checkpoints."""

    def test_cache_avoids_a_download(self, training: Training, bucket: Path) -> None:
        weightwire("publish", training.save("checkpoint-1"), bucket)
        shutil.rmtree(training.parent / "checkpoint-1")
        shutil.rmtree(bucket / "anchors")  # it cannot be fetched any more

        ran = weightwire("publish", training.save("checkpoint-2"), bucket)

        assert ran.code == 0, ran.err
        assert kinds_in(bucket)[-1] == "delta"

    @pytest.mark.parametrize("damage", ["removed", "cut", "other"])
    def test_cache_is_checked_before_use(self, training: Training, bucket: Path, damage: str) -> None:
        weightwire("publish", training.save("checkpoint-1"), bucket)
        (kept,) = (training.parent / ".weightwire").glob("*/*")
        if damage == "removed":
            shutil.rmtree(kept)
        for file in kept.glob("*.safetensors"):
            data = bytearray(file.read_bytes())
            data[-1] ^= 1
            file.write_bytes(data[:100] if damage == "cut" else data)

        path = training.save("checkpoint-2")
        ran = weightwire("publish", path, bucket)

        assert ran.code == 0, ran.err
        assert restored(bucket, 3) == bits_of(path)

    def test_trainer_may_overwrite_the_checkpoint(self, training: Training, bucket: Path) -> None:
        """Overwriting in place changes the hard-linked cache."""
        weightwire("publish", training.save("model"), bucket)
        path = training.save("model")

        ran = weightwire("publish", path, bucket)

        assert ran.code == 0, ran.err
        assert restored(bucket, 3) == bits_of(path)


class TestErrors:
    def test_missing_directory_is_an_error(self, bucket: Path, tmp_path: Path) -> None:
        weightwire("publish", tmp_path / "nowhere", bucket).check_failed("no such file or directory")
        (tmp_path / "file").write_text("not a directory")
        weightwire("publish", "--watch", tmp_path / "file", bucket).check_failed("file: not a directory")
        assert not bucket.exists()

    def test_directory_without_a_checkpoint_is_an_error(self, bucket: Path, tmp_path: Path) -> None:
        (tmp_path / "pickles").mkdir()
        (tmp_path / "pickles" / "pytorch_model.bin").write_bytes(b"pickle")
        (tmp_path / "cut.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{}")

        weightwire("publish", tmp_path / "pickles", bucket).check_failed("no safetensors file", "save_pretrained")
        weightwire("publish", tmp_path / "cut.safetensors", bucket).check_failed("cut.safetensors")
        assert not bucket.exists()

    @pytest.mark.parametrize("url", ["ftp://x/y", "s3://", "s3://user:secret@host/x", "hf://models/x"])
    def test_invalid_url_is_an_error(self, training: Training, url: str) -> None:
        ran = weightwire("publish", training.save("checkpoint-1"), url)

        ran.check_failed()
        assert "secret" not in ran.err

    def test_file_in_place_of_the_bucket_is_kept(self, training: Training, bucket: Path) -> None:
        bucket.write_text("mine")

        ran = weightwire("publish", training.save("checkpoint-1"), bucket)

        assert (ran.code, ran.out) == (1, "")
        assert ran.err.splitlines()[-2].startswith("error: ")
        assert bucket.read_text() == "mine"

    @pytest.mark.parametrize("change", ["name", "dtype", "shape", "more", "fewer"])
    def test_different_schema_is_refused(self, training: Training, bucket: Path, change: str) -> None:
        weightwire("publish", training.save("checkpoint-1"), bucket)
        norm = training.weights.pop("norm")
        changed = {
            "name": {"norms": norm},
            "dtype": {"norm": norm.astype(np.float64)},
            "shape": {"norm": norm.reshape(2, -1)},
            "more": {"norm": norm, "a new one": norm},
            "fewer": {},
        }
        training.weights |= changed[change]
        before = tree(bucket)

        ran = weightwire("publish", training.save("checkpoint-2"), bucket)

        ran.check_failed("the run at", "start a new run under another URL")
        assert tree(bucket) == before

    def test_schema_that_differs_from_the_base_is_refused(self, training: Training, bucket: Path) -> None:
        base = training.save("base")
        del training.weights["norm"]

        weightwire("publish", training.save("checkpoint-1"), bucket, "--base", base).check_failed("tensor 'norm'")
        assert not bucket.exists()

    def test_damaged_run_record_is_an_error(self, training: Training, bucket: Path) -> None:
        weightwire("publish", training.save("checkpoint-1"), bucket)
        (bucket / "run.json").write_text("{}")
        before = tree(bucket)

        weightwire("publish", training.save("checkpoint-2"), bucket).check_failed("run.json")
        assert tree(bucket) == before

    def test_newer_format_is_an_error(self, training: Training, bucket: Path) -> None:
        weightwire("publish", training.save("checkpoint-1"), bucket)
        run = json.loads((bucket / "run.json").read_bytes())
        (bucket / "run.json").write_text(json.dumps(run | {"format": "weightwire/99"}))

        weightwire("publish", training.save("checkpoint-2"), bucket).check_failed("format version 99", "upgrade")

    def test_bucket_without_write_permission_is_an_error(self, training: Training) -> None:
        """Even root cannot write to /proc."""
        ran = weightwire("publish", training.save("checkpoint-1"), "/proc/nowhere")

        assert (ran.code, ran.out) == (1, "")
        assert ran.err.splitlines()[-2].startswith("error: cannot create /proc/nowhere")


class TestTornCheckpoint:
    def test_checkpoint_that_changes_while_it_is_read_is_not_published(
        self, training: Training, bucket: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The trainer starts to overwrite the checkpoint while it is read."""
        weightwire("publish", training.save("model"), bucket)
        path = training.save("model")

        def overwrite_first(*args: Any, **kwargs: Any) -> Any:
            os.utime(path / "model-00002-of-00002.safetensors", (1, 1))
            return advance_copy(*args, **kwargs)

        monkeypatch.setattr(encoded_version, "advance_copy", overwrite_first)
        publisher = RunPublisher(PublishOptions(str(bucket)), lambda value: None, lambda message: None)
        candidate = CheckpointCandidate(path, None, None)

        publisher.find()
        with publisher:  # does not raise the failure again
            publisher.open(path.parent, candidate)
            with pytest.raises(TornCheckpoint, match="was written to while it was read"):
                publisher.publish(candidate, path.parent)

        assert kinds_in(bucket) == ["fence", "anchor", "fence"]
        monkeypatch.undo()
        weightwire("publish", path, bucket)
        assert restored(bucket, 4) == bits_of(path)


@pytest.mark.parametrize("seconds", [0.5, 0.6, 0.7])
def test_sigterm_leaves_no_partial_version(training: Training, bucket: Path, seconds: float) -> None:
    weightwire("publish", training.save("checkpoint-1"), bucket)
    path = training.save("checkpoint-2")
    with Running("publish", path, bucket) as publishing:
        time.sleep(seconds)
        ran = publishing.stop()

    assert ran.code in (0, 143, -signal.SIGTERM)  # negative if Python had not started yet
    assert "Traceback" not in ran.err
    assert weightwire("publish", path, bucket).code == 0
    newest = versions_in(bucket)[-1]
    assert newest["after"] == state_of(path)
    assert restored(bucket, newest["version"]) == bits_of(path)


# Holds the upload of the weights in the middle, until it is cancelled.
HELD = """
import sys
from weightwire.bucket import directory
from weightwire.cli import main

pieces = directory.pieces

def held(data, path, size, stop):
    for view in pieces(data, path, size, stop):
        yield view
        if path.startswith("anchors/"):
            print("uploading", file=sys.stderr, flush=True)
            stop.wait(60)

directory.pieces = held
main()
"""


def test_interrupted_first_version_does_not_start_a_run(training: Training, bucket: Path, tmp_path: Path) -> None:
    other = save_checkpoint(tmp_path / "other", {"a": np.random.default_rng(1).random(2**17), "b": np.ones(3)})
    with Running("publish", other, bucket, command=[sys.executable, "-c", HELD]) as publishing:
        publishing.wait_for("uploading")
        ran = publishing.stop(signal.SIGINT)

    assert ran.code == 130
    assert "Traceback" not in ran.err
    assert (bucket / "files").exists()
    assert not (bucket / "run.json").exists()
    path = training.save("checkpoint-1")
    assert weightwire("publish", path, bucket).code == 0
    assert restored(bucket, 1) == bits_of(path)
