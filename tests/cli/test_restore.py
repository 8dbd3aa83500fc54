"""`weightwire restore`: every version that the bucket has data for, complete or not at all."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from support.commands import COMMAND, Ran, Running, Training, bits_of, state_of, tree, versions_in, weightwire
from support.damage import HARMS, flip
from support.special_files import fifo_at
from weightwire.bucket.bucket import Bucket
from weightwire.bucket.registry import open_bucket
from weightwire.publisher.publisher import Publisher
from weightwire.telemetry.events import Event
from weightwire.weights.checkpoint import Checkpoint

Harm = Callable[[Bucket, str], None]


def _nothing(event: Event) -> None:
    pass


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Versions 1 to 6 with anchors beside 3 and 6. Version 4 is the fence of a second publisher."""
    here = tmp_path_factory.mktemp("made")
    training = Training(here / "out")
    for numbers in ((1, 2, 3), (5, 6)):
        files = training.save(f"checkpoint-{numbers[0]}")
        with Publisher(here / "bucket", files=files, anchor_every=2, blocking=True, on_event=_nothing) as publisher:
            publisher.publish(files, step=10 * numbers[0])
            for number in numbers[1:]:
                publisher.publish(training.save(f"checkpoint-{number}"), step=10 * number)
    return here


@pytest.fixture
def here(made: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(made, tmp_path / "made"))


def nothing_left(directory: Path) -> bool:
    return sorted(path.name for path in directory.iterdir()) == ["bucket", "out"]


class TestRestore:
    def test_newest_version_is_restored_by_default(self, here: Path) -> None:
        ran = weightwire("restore", here / "bucket", "-o", here / "r")

        state = state_of(here / "out" / "checkpoint-6")
        first, second = ran.err.splitlines()
        assert (ran.code, ran.out) == (0, "")
        assert first.startswith(f"wrote {here / 'r'}: version 6 (step 60), 50 kB of weights, ")
        assert second == f"verified: state {state[:12]}"
        assert bits_of(here / "r") == bits_of(here / "out" / "checkpoint-6")

    @pytest.mark.parametrize("version", [1, 2, 3, 5, 6])
    def test_any_version_can_be_restored(self, here: Path, version: int) -> None:
        ran = weightwire("restore", here / "bucket", "--version", version, "-o", here / "r")

        assert ran.code == 0, ran.err
        assert bits_of(here / "r") == bits_of(here / "out" / f"checkpoint-{version}")

    def test_fence_has_the_weights_of_the_version_before(self, here: Path) -> None:
        assert versions_in(here / "bucket")[4]["kind"] == "fence"

        ran = weightwire("restore", here / "bucket", "--version", 4, "-o", here / "r")

        assert ran.code == 0, ran.err
        assert bits_of(here / "r") == bits_of(here / "out" / "checkpoint-3")
        about = json.loads((here / "r" / "weightwire.json").read_bytes())
        assert (about["version"], about["step"]) == (4, 30)
        assert "version 4 (step 30)" in ran.err

    def test_checkpoint_has_side_files_and_names_its_version(self, here: Path) -> None:
        weightwire("restore", here / "bucket", "-o", here / "r", "--version", 3)

        files = tree(here / "r")
        assert files.keys() == {"config.json", "model.safetensors", "tokenizer/vocab.txt", "weightwire.json"}
        assert files["tokenizer/vocab.txt"] == b"hello\n"
        about = json.loads(files["weightwire.json"])
        assert about.keys() == {"run", "version", "commit", "state", "step"}
        assert about["step"] == 30
        assert about["state"] == state_of(here / "out" / "checkpoint-3")
        assert Checkpoint(here / "r").metadata == {"format": "pt"}

    def test_single_file_can_be_written(self, here: Path) -> None:
        ran = weightwire("restore", here / "bucket", "-o", here / "r.safetensors")

        assert ran.code == 0, ran.err
        assert bits_of(here / "r.safetensors") == bits_of(here / "out" / "checkpoint-6")

    def test_restore_writes_json(self, here: Path) -> None:
        figures = json.loads(weightwire("restore", here / "bucket", "-o", here / "r", "--json").out)

        assert figures.pop("seconds") >= 0
        assert figures.pop("bytes") > 0
        assert figures == {
            "url": str(here / "bucket"),
            "run": versions_in(here / "bucket")[0]["run"],
            "version": 6,
            "step": 60,
            "state": state_of(here / "out" / "checkpoint-6"),
            "time": versions_in(here / "bucket")[6]["time"],
            "metrics": versions_in(here / "bucket")[6]["metrics"],
            "weights": 24704,
            "weights_bytes": 49664,
            "checkpoint": str(here / "r"),
        }

    def test_missing_anchor_is_replaced_by_deltas(self, here: Path) -> None:
        shutil.rmtree(here / "bucket" / "anchors" / "6")

        ran = weightwire("restore", here / "bucket", "-o", here / "r")

        assert ran.code == 0, ran.err
        assert bits_of(here / "r") == bits_of(here / "out" / "checkpoint-6")

    @pytest.mark.parametrize("harm", HARMS)
    def test_damaged_anchor_is_replaced_by_deltas(self, here: Path, harm: Harm) -> None:
        harm(open_bucket(here / "bucket"), "anchors/6/")

        ran = weightwire("restore", here / "bucket", "-o", here / "r")

        assert ran.code == 0, ran.err
        assert "warning: " in ran.err
        assert "took another path" in ran.err
        assert bits_of(here / "r") == bits_of(here / "out" / "checkpoint-6")

    def test_run_from_a_base_needs_the_base(self, here: Path) -> None:
        base, path = here / "out" / "checkpoint-1", here / "out" / "checkpoint-2"
        assert weightwire("publish", path, here / "based", "--base", base, "--source", "elsewhere").code == 0

        weightwire("restore", here / "based", "-o", here / "r").check_failed("elsewhere", "--base DIR")
        weightwire("restore", here / "based", "-o", here / "r", "--base", path).check_failed(
            "does not hold the weights"
        )
        assert not (here / "r").exists()
        assert weightwire("restore", here / "based", "-o", here / "r", "--base", base).code == 0
        assert bits_of(here / "r") == bits_of(path)


class TestErrors:
    """Each prints one error with a hint and leaves no files behind."""

    def test_missing_run_is_an_error(self, tmp_path: Path) -> None:
        weightwire("restore", tmp_path / "nowhere", "-o", tmp_path / "r").check_failed("nothing has been published")
        assert not list(tmp_path.iterdir())

    def test_missing_version_suggests_existing_ones(self, here: Path) -> None:
        weightwire("restore", here / "bucket", "--version", 7, "-o", here / "r").check_failed(
            "has no version 7", "versions 1 to 6 can be restored"
        )
        assert nothing_left(here)

    def test_version_without_weights_is_an_error(self, here: Path) -> None:
        weightwire("restore", here / "bucket", "--version", 0, "-o", here / "r").check_failed(
            "version 0 is older than the first weights", "versions 1 to 6 can be restored"
        )
        assert nothing_left(here)

    def test_version_with_deleted_data_is_an_error(self, here: Path) -> None:
        for path in ("anchors/1", "deltas/2", "deltas/3"):
            shutil.rmtree(here / "bucket" / path)

        weightwire("restore", here / "bucket", "--version", 2, "-o", here / "r").check_failed(
            "the data of version 2 is deleted", "versions 3 to 6 can be restored"
        )
        assert nothing_left(here)

    def test_run_without_any_data_is_an_error(self, here: Path) -> None:
        shutil.rmtree(here / "bucket" / "anchors")

        weightwire("restore", here / "bucket", "-o", here / "r").check_failed(
            "the data of version 6 is deleted", "no version can be restored"
        )
        assert nothing_left(here)

    @pytest.mark.parametrize("harm", HARMS)
    def test_damaged_newest_version_suggests_an_older_one(self, here: Path, harm: Harm) -> None:
        bucket = open_bucket(here / "bucket")
        for folder in ("anchors/6/", "deltas/6/"):
            harm(bucket, folder)

        weightwire("restore", here / "bucket", "-o", here / "r").check_failed("version 5 can be restored: --version 5")
        assert nothing_left(here)
        assert weightwire("restore", here / "bucket", "-o", here / "r", "--version", 5).code == 0
        assert bits_of(here / "r") == bits_of(here / "out" / "checkpoint-5")

    def test_damaged_version_suggests_versions_before_and_after_it(self, here: Path) -> None:
        flip(open_bucket(here / "bucket"), "deltas/5/")

        weightwire("restore", here / "bucket", "-o", here / "r", "--version", 5).check_failed(
            "its hash does not match the record", "version 4 can be restored: --version 4; version 6 can be restored"
        )
        assert nothing_left(here)

    def test_damaged_side_file_suggests_no_other_version(self, here: Path) -> None:
        flip(open_bucket(here / "bucket"), "files/")

        ran = weightwire("restore", here / "bucket", "-o", here / "r")
        ran.check_failed("its hash does not match the record")
        assert "can be restored" not in ran.err

    @pytest.mark.parametrize("what", ["anchors", "deltas", "files"])
    def test_damaged_data_is_an_error(self, here: Path, what: str) -> None:
        for path in (here / "bucket" / what).rglob("*"):
            if path.is_file():
                data = bytearray(path.read_bytes())
                data[-1] ^= 1
                path.write_bytes(data)

        ran = weightwire("restore", here / "bucket", "--version", 5, "-o", here / "r")

        ran.check_failed("its hash does not match the record", "copy" if what == "files" else "verify")
        assert nothing_left(here)

    @pytest.mark.parametrize("number", [4, 5])
    def test_commit_outside_the_chain_is_an_error(self, here: Path, number: int) -> None:
        path = here / "bucket" / "commits" / f"{number:020}.json"
        commit = json.loads(path.read_bytes())
        path.write_text(json.dumps(commit | {"time": 1.0}))

        ran = weightwire("restore", here / "bucket", "--version", number, "-o", here / "r")

        assert ran.code == 1
        assert "its hash is not the one that later commits name" in ran.err
        assert nothing_left(here)

    def test_output_directory_must_be_empty(self, here: Path) -> None:
        before = tree(here / "out")

        weightwire("restore", here / "bucket", "-o", here / "out").check_failed("exists and is not empty")
        assert tree(here / "out") == before

    def test_output_directory_that_cannot_be_created_is_an_error(self, here: Path) -> None:
        weightwire("restore", here / "bucket", "-o", here / "no" / "where").check_failed("cannot be written")

    def test_wrong_usage_is_refused(self, here: Path) -> None:
        assert weightwire("restore", here / "bucket").code == 2
        assert weightwire("restore", here / "bucket", "-o", here / "r", "--version", -1).code == 2


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_leaves_no_partial_checkpoint(tmp_path: Path, number: int) -> None:
    with Publisher(tmp_path / "bucket", blocking=True, on_event=_nothing) as publisher:
        publisher.publish({"w": np.random.default_rng(1).integers(0, 2**16, 40_000_000).astype(np.uint16)})

    with Running("restore", tmp_path / "bucket", "-o", tmp_path / "r") as restoring:
        while not list(tmp_path.glob(".weightwire-*")) and restoring.process.poll() is None:
            time.sleep(0.001)
        ran = restoring.stop(number)

    assert ran.code in (0, 128 + number)
    assert "Traceback" not in ran.err
    assert sorted(path.name for path in tmp_path.iterdir()) == (["bucket", "r"] if ran.code == 0 else ["bucket"])


def test_restore_does_not_wait_for_a_fifo_in_place_of_data(here: Path) -> None:
    for anchor in (here / "bucket" / "anchors").glob("[36]/*"):
        anchor.unlink()
    (delta,) = (here / "bucket" / "deltas" / "2").iterdir()
    with fifo_at(delta):
        command = [*COMMAND, "restore", str(here / "bucket"), "-o", str(here / "r")]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        Ran(ran.returncode, ran.stdout, ran.stderr).check_failed("WW-DATA-GONE", "version 1 can be restored")
    assert nothing_left(here)
