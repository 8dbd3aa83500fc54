"""Starting or claiming a run while the bucket fails, or while another publisher does the same."""

from __future__ import annotations

from typing import Any

import pytest

from support.failing_bucket import Act, Troubled, conflicting, denied, failed, lost
from support.publish_scene import LoopTrainer, in_virtual_time, initial, over, play, simulated_bucket, train
from support.run_contents import commits_in, run_in, version_in
from weightwire import digest
from weightwire.chain.record_paths import RUN
from weightwire.errors import Fenced, PermissionDenied, Unavailable
from weightwire.publisher.publication import Publication


class TestStart:
    def test_a_failed_start_is_repeated_by_the_next_publish(self) -> None:
        async def scene() -> LoopTrainer:
            bucket = simulated_bucket()
            trainer = await LoopTrainer(bucket).start()
            bucket.trouble("create", RUN, failed, times=1e9)
            assert isinstance((await over(trainer.publish())).error, Unavailable)
            bucket.calm()
            assert (await over(trainer.publish())).version == 1
            await trainer.close()
            return trainer

        trainer = in_virtual_time(scene())
        assert version_in(trainer.bucket) == digest(trainer.weights)

    @pytest.mark.parametrize("what", [lost, conflicting])
    def test_a_run_is_started_once_despite_lost_replies(self, what: Any) -> None:
        async def scene() -> LoopTrainer:
            bucket = simulated_bucket()
            trainer = await LoopTrainer(bucket).start()
            for prefix in (RUN, "epochs/", "commits/"):
                bucket.trouble("create", prefix, what)
            assert (await over(trainer.publish())).version == 1
            await trainer.close()
            return trainer

        trainer = in_virtual_time(scene())
        assert [commit.epoch for commit in commits_in(trainer.bucket)] == [1, 1]

    def test_a_partially_started_run_is_continued(self) -> None:
        """It has run.json and perhaps an epoch, but no commit."""

        async def scene() -> LoopTrainer:
            bucket = simulated_bucket()
            first = await LoopTrainer(bucket).start()
            bucket.trouble("create", "epochs/", denied)
            assert isinstance((await over(first.publish())).error, PermissionDenied)
            await first.close()
            second = await LoopTrainer(bucket).start()
            assert (await over(second.publish())).version == 1
            await second.close()
            return second

        trainer = in_virtual_time(scene())
        assert version_in(trainer.bucket) == digest(trainer.weights)

    def test_two_publishers_may_start_a_run_at_the_same_time(self) -> None:
        async def scene() -> tuple[Troubled, list[Publication]]:
            bucket = simulated_bucket()
            trainers = [await LoopTrainer(bucket).start() for _ in range(2)]
            publications = [trainer.publish() for trainer in trainers]
            for publication in publications:
                await over(publication)
            for trainer in trainers:
                await trainer.close()
            return bucket, publications

        bucket, publications = in_virtual_time(scene())
        commits = commits_in(bucket)
        assert {commit.run for commit in commits} == {run_in(bucket).run}
        for publication in publications:
            if publication.version is not None:
                assert commits[publication.version].after == digest_after_one_step()
            else:
                assert isinstance(publication.error, Fenced)
        assert any(publication.version is not None for publication in publications)

    def test_a_publisher_does_not_start_with_an_unreachable_bucket(self) -> None:
        async def scene(verbs: str, prefix: str) -> None:
            bucket = simulated_bucket()
            trainer = await LoopTrainer(bucket).start()
            await trainer.publish_all(2)
            await trainer.close()
            bucket.trouble(verbs, prefix, failed, times=1e9)
            await LoopTrainer(bucket).start()

        for verbs, prefix in [("create", "probe/"), ("get", RUN), ("read_into", "")]:
            with pytest.raises(Unavailable):
                in_virtual_time(scene(verbs, prefix))

    def test_a_publisher_that_is_fenced_off_during_its_claim_does_not_claim_again(self) -> None:
        async def publish_one(bucket: Troubled) -> None:
            trainer = await LoopTrainer(bucket).start()
            await trainer.publish_all(1)
            await trainer.close()

        async def scene() -> Troubled:
            bucket = simulated_bucket()
            await publish_one(bucket)
            late = await LoopTrainer(bucket).start()

            async def overtaken(act: Act) -> None:
                await act()
                await publish_one(bucket)

            bucket.trouble("create", "epochs/", overtaken)
            for _ in range(2):
                assert isinstance((await over(late.publish())).error, Fenced)
            await late.close()
            return bucket

        kinds = [(commit.kind, commit.epoch) for commit in commits_in(in_virtual_time(scene()))]
        assert kinds == [("fence", 1), ("anchor", 1), ("fence", 3), ("delta", 3)]

    def test_a_failed_claim_is_repeated_by_the_next_publish(self) -> None:
        """The first publish fails; a later one claims the run, once."""

        async def scene(trainer: LoopTrainer) -> None:
            await trainer.close()
            again = await LoopTrainer(trainer.bucket).start()
            trainer.bucket.trouble("list", "epochs/", failed, times=1e9)
            assert isinstance((await over(again.publish())).error, Unavailable)
            trainer.bucket.calm()
            assert (await over(again.publish())).version == 3
            await again.close()
            trainer.work, trainer.weights = again.work, again.weights

        assert [commit.kind for commit in commits_in(play(scene).bucket)] == ["fence", "anchor", "fence", "delta"]

    def test_a_run_is_claimed_once_despite_failed_reads(self) -> None:
        """Another publisher added a version after the run was read, so the weights must be restored again."""

        async def scene(trainer: LoopTrainer) -> None:
            again = await LoopTrainer(trainer.bucket).start()
            await trainer.publish_all(1)
            trainer.bucket.trouble("read_into", "", failed, times=1e9)
            for _ in range(3):
                assert isinstance((await over(again.publish())).error, Unavailable)
            trainer.bucket.calm()
            assert (await over(again.publish())).version == 4
            await trainer.close()
            await again.close()
            trainer.work, trainer.weights = again.work, again.weights

        kinds = [commit.kind for commit in commits_in(play(scene).bucket)]
        assert kinds == ["fence", "anchor", "delta", "fence", "delta"]


def digest_after_one_step() -> str:
    weights = initial()
    train(weights, 1)
    return digest(weights).hex
