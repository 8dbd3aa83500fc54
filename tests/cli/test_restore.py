"""`weightwire restore`, as a user runs it: any version that the bucket still leads to, whole or not at all."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from support.commands import Running, Training, bits_of, state_of, tree, versions_in, weightwire
from support.damage import HARMS, flip
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
    """Versions 1 to 6, with an anchor beside the chain at 3 and 6; in between another publisher took over."""
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
    def test_the_newest_by_default(self, here: Path) -> None:
        ran = weightwire("restore", here / "bucket", "-o", here / "r")

        state = state_of(here / "out" / "checkpoint-6")
        first, second = ran.err.splitlines()
        assert (ran.code, ran.out) == (0, "")
        assert first.startswith(f"wrote {here / 'r'}: version 6 (step 60), 50 kB of weights, ")
        assert second == f"verified: state {state[:12]}"
        assert bits_of(here / "r") == bits_of(here / "out" / "checkpoint-6")

    @pytest.mark.parametrize("version", [1, 2, 3, 5, 6])
    def test_any_version(self, here: Path, version: int) -> None:
        ran = weightwire("restore", here / "bucket", "--version", version, "-o", here / "r")

        assert ran.code == 0, ran.err
        assert bits_of(here / "r") == bits_of(here / "out" / f"checkpoint-{version}")

    def test_a_fence_has_the_weights_of_the_version_before(self, here: Path) -> None:
        assert versions_in(here / "bucket")[4]["kind"] == "fence"

        ran = weightwire("restore", here / "bucket", "--version", 4, "-o", here / "r")

        assert ran.code == 0, ran.err
        assert bits_of(here / "r") == bits_of(here / "out" / "checkpoint-3")
        assert json.loads((here / "r" / "weightwire.json").read_bytes())["version"] == 4

    def test_is_a_whole_checkpoint_that_says_what_it_is(self, here: Path) -> None:
        weightwire("restore", here / "bucket", "-o", here / "r", "--version", 3)

        files = tree(here / "r")
        assert files.keys() == {"config.json", "model.safetensors", "tokenizer/vocab.txt", "weightwire.json"}
        assert files["tokenizer/vocab.txt"] == b"hello\n"
        about = json.loads(files["weightwire.json"])
        assert about.keys() == {"run", "version", "commit", "state"}
        assert about["state"] == state_of(here / "out" / "checkpoint-3")
        assert Checkpoint(here / "r").metadata == {"format": "pt"}

    def test_into_a_file(self, here: Path) -> None:
        ran = weightwire("restore", here / "bucket", "-o", here / "r.safetensors")

        assert ran.code == 0, ran.err
        assert bits_of(here / "r.safetensors") == bits_of(here / "out" / "checkpoint-6")

    def test_figures_as_json(self, here: Path) -> None:
        figures = json.loads(weightwire("restore", here / "bucket", "-o", here / "r", "--json").out)

        assert figures.pop("seconds") >= 0
        assert figures.pop("fetched_bytes") > 0
        assert figures == {
            "url": (here / "bucket").as_uri(),
            "run": versions_in(here / "bucket")[0]["run"],
            "version": 6,
            "step": 60,
            "state": state_of(here / "out" / "checkpoint-6"),
            "weights_bytes": 49664,
            "out": str(here / "r"),
        }

    def test_takes_another_way_where_data_is_gone(self, here: Path) -> None:
        shutil.rmtree(here / "bucket" / "anchors" / "6")

        ran = weightwire("restore", here / "bucket", "-o", here / "r")

        assert ran.code == 0, ran.err
        assert bits_of(here / "r") == bits_of(here / "out" / "checkpoint-6")

    @pytest.mark.parametrize("harm", HARMS)
    def test_gets_past_a_damaged_anchor(self, here: Path, harm: Harm) -> None:
        harm(open_bucket(here / "bucket"), "anchors/6/")

        ran = weightwire("restore", here / "bucket", "-o", here / "r")

        assert ran.code == 0, ran.err
        assert "warning: " in ran.err
        assert "there was another way" in ran.err
        assert bits_of(here / "r") == bits_of(here / "out" / "checkpoint-6")

    def test_from_a_base(self, here: Path) -> None:
        base, path = here / "out" / "checkpoint-1", here / "out" / "checkpoint-2"
        assert weightwire("publish", path, here / "based", "--base", base, "--source", "elsewhere").code == 0

        weightwire("restore", here / "based", "-o", here / "r").check_failed("elsewhere", "--base DIR")
        weightwire("restore", here / "based", "-o", here / "r", "--base", path).check_failed("not the weights")
        assert not (here / "r").exists()
        assert weightwire("restore", here / "based", "-o", here / "r", "--base", base).code == 0
        assert bits_of(here / "r") == bits_of(path)


class TestErrors:
    """One error with a hint each, and nothing left behind."""

    def test_no_run(self, tmp_path: Path) -> None:
        weightwire("restore", tmp_path / "nowhere", "-o", tmp_path / "r").check_failed("nothing has been published")
        assert not list(tmp_path.iterdir())

    def test_no_such_version(self, here: Path) -> None:
        weightwire("restore", here / "bucket", "--version", 7, "-o", here / "r").check_failed(
            "has no version 7", "versions 1 to 6 can be restored"
        )
        assert nothing_left(here)

    def test_a_version_without_weights(self, here: Path) -> None:
        weightwire("restore", here / "bucket", "--version", 0, "-o", here / "r").check_failed(
            "version 0 holds no weights", "versions 1 to 6 can be restored"
        )
        assert nothing_left(here)

    def test_data_that_is_gone(self, here: Path) -> None:
        for path in ("anchors/1", "deltas/2", "deltas/3"):
            shutil.rmtree(here / "bucket" / path)

        weightwire("restore", here / "bucket", "--version", 2, "-o", here / "r").check_failed(
            "the data of version 2 is no longer there", "versions 3 to 6 can be restored"
        )
        assert nothing_left(here)

    def test_all_data_gone(self, here: Path) -> None:
        shutil.rmtree(here / "bucket" / "anchors")

        weightwire("restore", here / "bucket", "-o", here / "r").check_failed(
            "the data of version 6 is no longer there", "no version can be restored"
        )
        assert nothing_left(here)

    @pytest.mark.parametrize("harm", HARMS)
    def test_a_newest_version_that_is_damaged_is_not_replaced_by_another(self, here: Path, harm: Harm) -> None:
        bucket = open_bucket(here / "bucket")
        for folder in ("anchors/6/", "deltas/6/"):
            harm(bucket, folder)

        weightwire("restore", here / "bucket", "-o", here / "r").check_failed("version 5 can be restored: --version 5")
        assert nothing_left(here)
        assert weightwire("restore", here / "bucket", "-o", here / "r", "--version", 5).code == 0
        assert bits_of(here / "r") == bits_of(here / "out" / "checkpoint-5")

    def test_what_can_be_restored_before_and_after_a_damaged_version(self, here: Path) -> None:
        flip(open_bucket(here / "bucket"), "deltas/5/")

        weightwire("restore", here / "bucket", "-o", here / "r", "--version", 5).check_failed(
            "not those that were published", "version 4 can be restored: --version 4; version 6 can be restored"
        )
        assert nothing_left(here)

    def test_damaged_side_files_are_not_blamed_on_the_version(self, here: Path) -> None:
        flip(open_bucket(here / "bucket"), "files/")

        ran = weightwire("restore", here / "bucket", "-o", here / "r")
        ran.check_failed("not those that were published")
        assert "can be restored" not in ran.err

    @pytest.mark.parametrize("what", ["anchors", "deltas", "files"])
    def test_data_that_is_damaged(self, here: Path, what: str) -> None:
        for path in (here / "bucket" / what).rglob("*"):
            if path.is_file():
                data = bytearray(path.read_bytes())
                data[-1] ^= 1
                path.write_bytes(data)

        ran = weightwire("restore", here / "bucket", "--version", 5, "-o", here / "r")

        ran.check_failed("not those that were published", "verify")
        assert nothing_left(here)

    @pytest.mark.parametrize("number", [4, 5])
    def test_a_commit_that_is_not_of_the_chain(self, here: Path, number: int) -> None:
        path = here / "bucket" / "commits" / f"{number:020}.json"
        commit = json.loads(path.read_bytes())
        path.write_text(json.dumps(commit | {"time": 1.0}))

        ran = weightwire("restore", here / "bucket", "--version", number, "-o", here / "r")

        assert ran.code == 1
        assert "is not the commit that later ones were built on" in ran.err
        assert nothing_left(here)

    def test_a_place_that_is_taken(self, here: Path) -> None:
        before = tree(here / "out")

        weightwire("restore", here / "bucket", "-o", here / "out").check_failed("exists and is not empty")
        assert tree(here / "out") == before

    def test_a_place_that_cannot_be(self, here: Path) -> None:
        weightwire("restore", here / "bucket", "-o", here / "no" / "where").check_failed("cannot be written")

    def test_called_wrongly(self, here: Path) -> None:
        assert weightwire("restore", here / "bucket").code == 2
        assert weightwire("restore", here / "bucket", "-o", here / "r", "--version", -1).code == 2


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_one_that_is_stopped_leaves_nothing(tmp_path: Path, number: int) -> None:
    with Publisher(tmp_path / "bucket", blocking=True, on_event=_nothing) as publisher:
        publisher.publish({"w": np.random.default_rng(1).integers(0, 2**16, 40_000_000).astype(np.uint16)})

    with Running("restore", tmp_path / "bucket", "-o", tmp_path / "r") as restoring:
        while not list(tmp_path.glob(".weightwire-*")) and restoring.process.poll() is None:
            pass
        ran = restoring.stop(number)

    assert ran.code in (0, 128 + number)
    assert "Traceback" not in ran.err
    assert sorted(path.name for path in tmp_path.iterdir()) == (["bucket", "r"] if ran.code == 0 else ["bucket"])
