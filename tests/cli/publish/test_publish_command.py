"""`weightwire publish`, as a user runs it: one checkpoint, or each that a trainer writes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from support.commands import Running, Training, bits_of, save_checkpoint, state_of, tree, versions_in, weightwire
from weightwire.cli.publish.checkpoint_candidate import CheckpointCandidate, TornCheckpoint
from weightwire.cli.publish.run_publisher import PublishOptions, RunPublisher
from weightwire.publisher import encoded_version
from weightwire.publisher.copy_advance import advance_copy


@pytest.fixture
def training(tmp_path: Path) -> Training:
    return Training(tmp_path / "out")


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    return tmp_path / "bucket"


def restored(bucket: Path, version: int) -> dict[str, bytes]:
    out = bucket.parent / f"restored-{version}"
    ran = weightwire("restore", bucket, "--version", version, "-o", out)
    assert ran.code == 0, ran.err
    return bits_of(out)


def kinds(bucket: Path) -> list[str]:
    return [commit["kind"] for commit in versions_in(bucket)]


class TestOne:
    def test_the_first_is_an_anchor_and_the_next_a_delta(self, training: Training, bucket: Path) -> None:
        first, second = training.save("checkpoint-100"), training.save("checkpoint-200")

        started = weightwire("publish", first, bucket)
        went_on = weightwire("publish", second, bucket)

        where = bucket.as_uri()
        assert (started.code, started.out, went_on.code, went_on.out) == (0, "", 0, "")
        assert started.err.startswith(f"version 1 of {where}: ")
        assert " for 50 kB of weights (" in started.err
        assert ", an anchor, " in started.err
        assert went_on.err.startswith(f"version 3 of {where}: ")
        assert ", 1.03% changed, " in went_on.err
        assert kinds(bucket) == ["fence", "anchor", "fence", "delta"]
        assert [commit.get("step") for commit in versions_in(bucket)] == [None, 100, None, 200]
        assert restored(bucket, 1) == bits_of(first)
        assert restored(bucket, 3) == bits_of(second)

    def test_figures_as_json(self, training: Training, bucket: Path) -> None:
        path = training.save("checkpoint-100")

        ran = weightwire("publish", path, bucket, "--step", 7, "--json")

        figures = json.loads(ran.out)
        assert figures.pop("seconds") >= 0
        assert figures == {
            "url": bucket.as_uri(),
            "version": 1,
            "published": True,
            "state": state_of(path),
            "checkpoint": str(path),
            "kind": "anchor",
            "step": 7,
            "bytes": versions_in(bucket)[1]["files"][0]["size"],
            "changed": 0,
            "weights": 24704,
            "weights_bytes": 49664,
        }

    def test_the_same_again_is_no_new_version(self, training: Training, bucket: Path) -> None:
        path = training.save("checkpoint-100")
        weightwire("publish", path, bucket)
        before = tree(bucket)

        again = weightwire("publish", path, bucket, "--step", 9, "--json")

        assert again.code == 0
        assert again.err == f"already version 1 of {bucket.as_uri()}: nothing to publish\n"
        assert json.loads(again.out)["published"] is False
        assert tree(bucket) == before

    @pytest.mark.parametrize("cached", [True, False])
    def test_the_same_again_with_an_anchor_heals_a_run(self, training: Training, bucket: Path, cached: bool) -> None:
        weightwire("publish", training.save("checkpoint-100"), bucket)
        newest = training.save("checkpoint-200")
        weightwire("publish", newest, bucket)
        [delta] = (bucket / "deltas" / "3").iterdir()
        delta.write_bytes(delta.read_bytes()[:-1] + b"?")
        if not cached:
            shutil.rmtree(newest.parent / ".weightwire")
        assert weightwire("restore", bucket, "-o", bucket.parent / "lost").code == 1

        healed = weightwire("publish", newest, bucket, "--anchor-every", 1)

        assert healed.code == 0, healed.err
        assert restored(bucket, versions_in(bucket)[-1]["version"]) == bits_of(newest)
        before = tree(bucket)
        again = weightwire("publish", newest, bucket, "--anchor-every", 1)
        assert "nothing to publish" in again.err
        assert tree(bucket) == before

    def test_a_single_file(self, training: Training, bucket: Path) -> None:
        path = training.parent.with_name("weights.safetensors")
        safetensors.numpy.save_file(training.weights, path)

        assert weightwire("publish", path, bucket).code == 0
        assert restored(bucket, 1) == bits_of(path)
        assert json.loads((bucket / "run.json").read_bytes())["files"] == []

    def test_side_files_go_along_but_not_what_is_for_trainers(self, training: Training, bucket: Path) -> None:
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

    def test_a_base_needs_no_anchor(self, training: Training, bucket: Path) -> None:
        base, path = training.save("base"), training.save("checkpoint-1")

        ran = weightwire("publish", path, bucket, "--base", base, "--source", "hf.co/some/base")

        assert ran.code == 0, ran.err
        assert kinds(bucket) == ["fence", "base", "delta"]
        assert versions_in(bucket)[1]["source"] == "hf.co/some/base"
        assert not (bucket / "anchors").exists()
        weightwire("restore", bucket, "-o", bucket.parent / "r", "--base", base)
        assert bits_of(bucket.parent / "r") == bits_of(path)

    def test_the_base_itself(self, training: Training, bucket: Path) -> None:
        base = training.save("base")

        ran = weightwire("publish", base, bucket, "--base", base)

        assert ran.err == f"already version 1 of {bucket.as_uri()}: nothing to publish\n"
        assert kinds(bucket) == ["fence", "base"]

    def test_options_that_contradict_each_other(self, training: Training, bucket: Path) -> None:
        path = training.save("checkpoint-1")

        assert weightwire("publish", path, bucket, "--source", "x").code == 2
        assert weightwire("publish", "--watch", path, bucket, "--step", 1).code == 2
        assert weightwire("publish", path, bucket, "--anchor-every", 0).code == 2
        assert not bucket.exists()


class TestAnchors:
    def test_every_so_many_versions(self, training: Training, bucket: Path) -> None:
        for number in range(1, 6):
            ran = weightwire("publish", training.save(f"checkpoint-{number}"), bucket, "--anchor-every", 2)
            assert ran.code == 0, ran.err

        assert len(list((bucket / "shortcuts").glob("*/*.json"))) == 2


class TestKept:
    """What was published last, beside the checkpoints."""

    def test_saves_the_bucket(self, training: Training, bucket: Path) -> None:
        weightwire("publish", training.save("checkpoint-1"), bucket)
        shutil.rmtree(training.parent / "checkpoint-1")
        shutil.rmtree(bucket / "anchors")  # nobody can fetch it any more

        ran = weightwire("publish", training.save("checkpoint-2"), bucket)

        assert ran.code == 0, ran.err
        assert kinds(bucket)[-1] == "delta"

    @pytest.mark.parametrize("damage", ["removed", "cut", "other"])
    def test_is_not_believed(self, training: Training, bucket: Path, damage: str) -> None:
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

    def test_survives_a_trainer_that_overwrites(self, training: Training, bucket: Path) -> None:
        """In place, and so through the hard links too."""
        weightwire("publish", training.save("model"), bucket)
        path = training.save("model")

        ran = weightwire("publish", path, bucket)

        assert ran.code == 0, ran.err
        assert restored(bucket, 3) == bits_of(path)


class TestErrors:
    def test_no_such_directory(self, bucket: Path, tmp_path: Path) -> None:
        weightwire("publish", tmp_path / "nowhere", bucket).check_failed("no such file or directory")
        weightwire("publish", "--watch", tmp_path / "nowhere", bucket).check_failed("no such directory")
        assert not bucket.exists()

    def test_not_a_checkpoint(self, bucket: Path, tmp_path: Path) -> None:
        (tmp_path / "pickles").mkdir()
        (tmp_path / "pickles" / "pytorch_model.bin").write_bytes(b"pickle")
        (tmp_path / "cut.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{}")

        weightwire("publish", tmp_path / "pickles", bucket).check_failed("holds no safetensors", "save_pretrained")
        weightwire("publish", tmp_path / "cut.safetensors", bucket).check_failed("cut.safetensors")
        assert not bucket.exists()

    @pytest.mark.parametrize("url", ["ftp://x/y", "s3://", "s3://user:secret@host/x", "hf://models/x"])
    def test_not_a_bucket(self, training: Training, url: str) -> None:
        ran = weightwire("publish", training.save("checkpoint-1"), url)

        ran.check_failed()
        assert "secret" not in ran.err

    def test_a_file_in_the_place_of_the_bucket(self, training: Training, bucket: Path) -> None:
        bucket.write_text("mine")

        ran = weightwire("publish", training.save("checkpoint-1"), bucket)

        assert (ran.code, ran.out) == (1, "")
        assert ran.err.splitlines()[-2].startswith("error: ")
        assert bucket.read_text() == "mine"

    @pytest.mark.parametrize("change", ["name", "dtype", "shape", "more", "fewer"])
    def test_another_schema(self, training: Training, bucket: Path, change: str) -> None:
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

        ran.check_failed("in the run at", "start a new run under another URL")
        assert tree(bucket) == before

    def test_another_schema_than_the_base(self, training: Training, bucket: Path) -> None:
        base = training.save("base")
        del training.weights["norm"]

        weightwire("publish", training.save("checkpoint-1"), bucket, "--base", base).check_failed("tensor 'norm'")
        assert not bucket.exists()

    def test_a_broken_run(self, training: Training, bucket: Path) -> None:
        weightwire("publish", training.save("checkpoint-1"), bucket)
        (bucket / "run.json").write_text("{}")
        before = tree(bucket)

        weightwire("publish", training.save("checkpoint-2"), bucket).check_failed("run.json")
        assert tree(bucket) == before

    def test_a_newer_format(self, training: Training, bucket: Path) -> None:
        weightwire("publish", training.save("checkpoint-1"), bucket)
        run = json.loads((bucket / "run.json").read_bytes())
        (bucket / "run.json").write_text(json.dumps(run | {"format": "weightwire/99"}))

        weightwire("publish", training.save("checkpoint-2"), bucket).check_failed("format version 99", "upgrade")

    def test_where_nothing_can_be_written(self, training: Training) -> None:
        """Not even root may write to /proc."""
        ran = weightwire("publish", training.save("checkpoint-1"), "/proc/nowhere")

        assert (ran.code, ran.out) == (1, "")
        assert ran.err.splitlines()[-2].startswith("error: file:///proc/nowhere")


class TestTorn:
    def test_a_checkpoint_that_is_written_to_is_not_published(
        self, training: Training, bucket: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A trainer that begins to write the next one while this one is read."""
        weightwire("publish", training.save("model"), bucket)
        path = training.save("model")

        def overwrite_first(*args: Any, **kwargs: Any) -> Any:
            os.utime(path / "model-00002-of-00002.safetensors")
            return advance_copy(*args, **kwargs)

        monkeypatch.setattr(encoded_version, "advance_copy", overwrite_first)
        publisher = RunPublisher(PublishOptions(str(bucket)), lambda value: None)
        candidate = CheckpointCandidate(path, None, None)

        publisher.find()
        with publisher:  # ends well: what failed has been told
            publisher.open(path.parent, candidate)
            with pytest.raises(TornCheckpoint, match="was written to while it was read"):
                publisher.publish(candidate, path.parent)

        assert kinds(bucket) == ["fence", "anchor", "fence"]
        monkeypatch.undo()
        weightwire("publish", path, bucket)
        assert restored(bucket, 4) == bits_of(path)


@pytest.mark.slow
class TestWatch:
    def test_publishes_each_as_it_is_finished(self, training: Training, bucket: Path) -> None:
        training.parent.mkdir()
        with Running("publish", "--watch", training.parent, bucket, "--json") as watching:
            watching.wait_for(f"watching {training.parent}, to publish to {bucket.as_uri()}")
            first, second = training.save("checkpoint-900"), training.save("checkpoint-1000")
            watching.wait_for("version 2 of")
            third = training.save("checkpoint-1100")
            watching.wait_for("version 3 of")
            ran = watching.stop()

        assert ran.code == 0
        assert [json.loads(line)["version"] for line in ran.out.splitlines()] == [1, 2, 3]
        assert kinds(bucket) == ["fence", "anchor", "delta", "delta"]
        assert [commit.get("step") for commit in versions_in(bucket)] == [None, 900, 1000, 1100]
        assert [commit["after"] for commit in versions_in(bucket)[1:]] == [*map(state_of, (first, second, third))]
        assert [file["name"] for file in json.loads((bucket / "run.json").read_bytes())["files"]] == [
            "config.json",
            "tokenizer/vocab.txt",
        ]

    def test_does_not_publish_twice_after_a_restart(self, training: Training, bucket: Path) -> None:
        for number in (100, 200):
            training.save(f"checkpoint-{number}")
        with Running("publish", "--watch", training.parent, bucket) as watching:
            watching.wait_for("version 2 of")
            assert watching.stop(signal.SIGINT).code == 0

        with Running("publish", "--watch", training.parent, bucket) as watching:
            watching.wait_for("watching ")
            training.save("checkpoint-300")
            watching.wait_for("version 4 of")
            ran = watching.stop()

        assert ran.code == 0
        assert ran.err.count("version ") == 1
        assert kinds(bucket) == ["fence", "anchor", "delta", "fence", "delta"]

    def test_a_directory_that_is_rewritten(self, training: Training, bucket: Path) -> None:
        path = training.save("model")
        (path / "train.log").write_text("never rests")
        with Running("publish", "--watch", path, bucket) as watching:
            watching.wait_for("version 1 of")
            training.save("model")
            watching.wait_for("version 2 of")
            assert watching.stop().code == 0

        assert versions_in(bucket)[-1]["after"] == state_of(path)
        assert "step" not in versions_in(bucket)[-1] or versions_in(bucket)[-1]["step"] is None

    def test_skips_what_it_cannot_read_and_says_so_once(self, training: Training, bucket: Path) -> None:
        broken = training.parent / "checkpoint-100"
        broken.mkdir(parents=True)
        (broken / "model.safetensors").write_bytes(b"no weights")
        (training.parent / "runs").mkdir()
        (training.parent / "runs" / "events").write_text("no checkpoint at all")
        with Running("publish", "--watch", training.parent, bucket) as watching:
            watching.wait_for("skipped: ")
            training.save("checkpoint-200")
            watching.wait_for("version 1 of")
            training.weights["one more"] = training.weights["norm"]
            training.save("checkpoint-300")
            watching.wait_for("tensor 'one more'")
            time.sleep(2)
            ran = watching.stop()

        assert ran.code == 0
        assert ran.err.count("skipped: ") == 2
        assert ran.err.count("runs") == 0
        assert kinds(bucket) == ["fence", "anchor"]

    def test_ends_when_another_publisher_takes_over(self, training: Training, bucket: Path) -> None:
        training.save("checkpoint-100")
        with Running("publish", "--watch", training.parent, bucket) as watching:
            watching.wait_for("version 1 of")
            other = Training(training.parent.with_name("other"))
            other.step()
            assert weightwire("publish", other.save("checkpoint-1"), bucket).code == 0
            training.save("checkpoint-200")
            ran = watching.end()

        assert ran.code == 1
        assert ran.err.splitlines()[-2].startswith("error: ")
        assert "has taken over this run" in ran.err.splitlines()[-2]
        assert ran.err.count("has taken over this run") == 1

    def test_a_second_signal_does_not_wait(self, training: Training, tmp_path: Path) -> None:
        """The first one waits for a version that cannot be committed."""
        training.save("checkpoint-100")
        with Running("publish", "--watch", training.parent, "/proc/nowhere") as watching:
            watching.wait_for("warning: ")
            watching.process.send_signal(signal.SIGINT)
            time.sleep(0.3)
            if watching.process.poll() is None:
                watching.process.send_signal(signal.SIGINT)
            assert watching.end().code in (0, 130)


@pytest.mark.parametrize("seconds", [0.5, 0.6, 0.7])
def test_one_that_is_terminated_leaves_no_half_version(training: Training, bucket: Path, seconds: float) -> None:
    weightwire("publish", training.save("checkpoint-1"), bucket)
    path = training.save("checkpoint-2")
    with Running("publish", path, bucket) as publishing:
        time.sleep(seconds)
        ran = publishing.stop()

    assert ran.code in (0, 143, -signal.SIGTERM)  # the last before it had begun
    assert "Traceback" not in ran.err
    assert weightwire("publish", path, bucket).code == 0
    newest = versions_in(bucket)[-1]
    assert newest["after"] == state_of(path)
    assert restored(bucket, newest["version"]) == bits_of(path)


def test_one_that_is_interrupted_before_its_first_version_binds_nobody_to_its_weights(
    training: Training, bucket: Path, tmp_path: Path
) -> None:
    """No run is there yet, so that another model may be published to the same URL."""
    large = save_checkpoint(tmp_path / "large", {"a": np.random.default_rng(1).random(2**24), "b": np.ones(3)})
    with Running("publish", large, bucket) as publishing:
        until = time.monotonic() + 40
        while not (bucket / "files").exists():  # all weights are to follow
            assert time.monotonic() < until
            time.sleep(0.001)
        ran = publishing.stop(signal.SIGINT)

    assert ran.code == 130
    assert "Traceback" not in ran.err
    assert not (bucket / "run.json").exists()
    path = training.save("checkpoint-1")
    assert weightwire("publish", path, bucket).code == 0
    assert restored(bucket, 1) == bits_of(path)
