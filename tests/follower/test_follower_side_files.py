"""Side files arrive in the checkpoint, or are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.failing_bucket import Troubled
from support.followers import (
    Trainer,
    copy_of,
    current,
    paths,
    put_back,
    read,
    remove,
    write,
)
from weightwire import Follower
from weightwire.chain.record_paths import RUN
from weightwire.errors import (
    BrokenChain,
    CorruptDelta,
    WeightwireError,
)


class TestSideFiles:
    FILES = {"config.json": b'{"model_type": "tiny"}', "tokenizer/vocab.txt": b"a\nb\n"}  # noqa: RUF012

    @pytest.fixture(autouse=True)
    def _run(self, bucket: Troubled) -> None:
        trainer = Trainer(bucket.inner, files=self.FILES)
        trainer.publish(2)
        trainer.close()

    def test_side_files_are_in_the_checkpoint(self, follower: Follower, into: Path) -> None:
        follower.once()
        for name, content in self.FILES.items():
            assert (into / "current" / name).read_bytes() == content

    def test_changed_side_files_are_refused(self, bucket: Troubled, follower: Follower, into: Path) -> None:
        before = copy_of(bucket)
        [path] = [path for path in paths(bucket, "files/") if path.endswith("config.json")]
        write(bucket, path, b'{"model_type": "TINY"}')
        with pytest.raises(CorruptDelta, match=r"config.json: corrupt: its hash does not match the record") as caught:
            follower.once()
        assert caught.value.hint
        assert not (into / "current").exists()
        put_back(bucket, before)
        assert follower.once() == 2
        assert (into / "current" / "config.json").read_bytes() == self.FILES["config.json"]

    def test_missing_side_files_are_named(self, bucket: Troubled, follower: Follower, into: Path) -> None:
        before = copy_of(bucket)
        remove(bucket, "files/")
        with pytest.raises(WeightwireError, match=r"files/.*: side file not found") as caught:
            follower.once()
        assert "anchor" not in str(caught.value)
        assert caught.value.hint
        assert "copy config.json" in caught.value.hint
        assert not (into / "current").exists()
        put_back(bucket, before)
        assert follower.once() == 2

    @pytest.mark.parametrize(
        "name",
        ["../../escape", "/escape", "a/../../escape", "..", "a//b", ".hidden", "a\\b", "model.safetensors", ""],
    )
    def test_side_files_with_hostile_names_are_refused(
        self, bucket: Troubled, follower: Follower, into: Path, tmp_path: Path, name: str
    ) -> None:
        run = json.loads(read(bucket, RUN))
        run["files"][0]["name"] = name
        write(bucket, RUN, json.dumps(run).encode())
        with pytest.raises(BrokenChain, match=r"run.json: cannot be read") as caught:
            follower.once()
        assert caught.value.hint
        assert {path.name for path in tmp_path.iterdir()} == {"replica"}
        assert {path.name for path in into.iterdir()} <= {"lock", "name"}

    @pytest.mark.parametrize("path", ["../../commits", "commits/00000000000000000000.json", "files/x/y", "run.json"])
    def test_side_files_with_hostile_paths_are_refused(self, bucket: Troubled, follower: Follower, path: str) -> None:
        run = json.loads(read(bucket, RUN))
        run["files"][0]["path"] = path
        write(bucket, RUN, json.dumps(run).encode())
        with pytest.raises(BrokenChain, match="not the path of this side file"):
            follower.once()

    def test_other_side_files_than_those_of_the_first_commit_are_refused(
        self, bucket: Troubled, follower: Follower
    ) -> None:
        run = json.loads(read(bucket, RUN))
        run["files"][0]["name"] = "modeling/config.json"  # the path stays valid
        write(bucket, RUN, json.dumps(run).encode())
        with pytest.raises(BrokenChain, match=r"does not belong to this run\.json"):
            follower.once()


def test_side_files_never_replace_the_files_of_weightwire(bucket: Troubled, follower: Follower, into: Path) -> None:
    trainer = Trainer(bucket.inner, files={"weightwire.json": b"{}"})
    trainer.publish(2)
    trainer.close()
    follower.once()
    assert current(into) == 2
