"""A run that starts from a checkpoint which is not in the bucket."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.numpy

from support.failing_bucket import Troubled
from support.followers import (
    Trainer,
    check,
    initial,
    paths,
    train,
)
from support.small_run import bits_of
from weightwire import Follower, Publisher, digest
from weightwire.errors import (
    WeightwireError,
    WrongBase,
)


class TestBase:
    @pytest.fixture
    def checkpoint(self, tmp_path: Path) -> Path:
        """The checkpoint that the run starts from."""
        folder = tmp_path / "base"
        folder.mkdir()
        safetensors.numpy.save_file(initial(), folder / "model.safetensors")
        (folder / "config.json").write_text("{}")
        return folder

    @pytest.mark.parametrize("given", ["arrays", "path"])
    def test_base_can_be_given_as_arrays_or_as_a_path(
        self, bucket: Troubled, checkpoint: Path, into: Path, given: str
    ) -> None:
        trainer = Trainer(bucket.inner, base=initial(), source="hf://org/model")
        trainer.publish(3)
        trainer.close()
        with Follower(bucket, into=into, base=initial() if given == "arrays" else checkpoint) as follower:
            assert follower.once() == 4
            check(follower, trainer.bits, 4)
        assert not paths(bucket, "anchors/")

    def test_base_is_found_at_the_source_named_by_the_run(self, bucket: Troubled, checkpoint: Path, into: Path) -> None:
        trainer = Trainer(bucket.inner, base=checkpoint)
        trainer.publish()
        trainer.close()
        bucket.url = "/data/run"  # a directory
        with Follower(bucket, into=into) as follower:
            assert follower.once() == 2
            check(follower, trainer.bits, 2)
        assert (into / "current" / "config.json").read_text() == "{}"
        assert digest(safetensors.numpy.load_file(checkpoint / "model.safetensors")) == digest(initial())

    def test_a_path_named_by_a_remote_bucket_is_used_only_if_the_user_names_it(
        self, bucket: Troubled, checkpoint: Path, into: Path
    ) -> None:
        trainer = Trainer(bucket.inner, base=checkpoint)
        trainer.publish()
        trainer.close()
        with Follower(bucket, into=into) as follower, pytest.raises(WrongBase, match="that is not in the bucket"):
            follower.once()
        with Follower(bucket, into=into, base=checkpoint) as follower:
            assert follower.once() == 2

    def test_base_may_be_the_only_version(self, bucket: Troubled, into: Path) -> None:
        trainer = Trainer(bucket.inner, base=initial())
        assert trainer.publisher.version == 1
        trainer.close()
        with Follower(bucket, into=into, base=initial()) as follower:
            assert follower.once() == 1
            assert bits_of(into / "current") == bits_of(initial())

    def test_base_with_other_weights_is_refused(self, bucket: Troubled, into: Path) -> None:
        trainer = Trainer(bucket.inner, base=initial(), source="hf://org/model")
        trainer.publish()
        trainer.close()
        other = initial()
        train(other, 3)
        for wrong in (other, {"embed": initial()["embed"]}):
            with Follower(bucket, into=into, base=wrong) as follower:
                with pytest.raises(WrongBase, match="does not hold the weights that the run starts from") as caught:
                    follower.once()
                assert caught.value.hint == "get the base from hf://org/model"
                assert follower.version is None
        assert not (into / "current").exists()

    def test_missing_base_is_an_error(self, bucket: Troubled, into: Path) -> None:
        trainer = Trainer(bucket.inner, base=initial(), source="hf://org/model")
        trainer.publish()
        trainer.close()
        with Follower(bucket, into=into) as follower:
            with pytest.raises(
                WrongBase, match=r"base checkpoint \(hf://org/model\) that is not on this machine"
            ) as caught:
                follower.once()
            assert caught.value.hint == "download it and pass its directory: --base DIR, or base= in Python"
        with Follower(bucket, into=into, base=initial()) as follower:
            assert follower.once() == 2

    def test_base_is_not_needed_if_there_is_an_anchor(self, bucket: Troubled, into: Path) -> None:
        trainer = Trainer(bucket.inner, base=initial(), anchor_every=2)
        trainer.publish(3)
        trainer.close()
        with Follower(bucket, into=into) as follower:
            assert follower.once() == 4
            check(follower, trainer.bits, 4)

    def test_restarted_follower_does_not_need_the_base_again(
        self, bucket: Troubled, trainer: Trainer, into: Path
    ) -> None:
        trainer = Trainer(bucket.inner, base=initial())
        trainer.publish()
        with Follower(bucket, into=into, base=initial()) as follower:
            follower.once()
        trainer.publish()
        trainer.close()
        with Follower(bucket, into=into) as follower:
            assert follower.once() == 3
            check(follower, trainer.bits, 3)

    def test_base_may_have_tied_weights(self, bucket: Troubled, into: Path) -> None:
        """The checkpoint holds the same tensor under two names."""
        tied = initial()
        tied["lm_head"] = tied["embed"]
        with Publisher(bucket.inner, base=tied, threads=1) as publisher:
            assert publisher.version == 1
        with Follower(bucket, into=into, base=tied) as follower:
            assert follower.once() == 1

    def test_unreadable_base_is_refused(self, bucket: Troubled, into: Path, tmp_path: Path) -> None:
        with pytest.raises(WeightwireError, match="nowhere"):
            Follower(bucket, into=into, base=tmp_path / "nowhere")
        assert not into.exists()
