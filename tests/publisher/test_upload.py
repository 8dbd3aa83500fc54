"""Failed uploads are retried until the time is over or newer weights are waiting."""

from __future__ import annotations

from typing import Any

import pytest

from support.failing_bucket import Act, denied, failed, lost
from support.publish_scene import LoopTrainer, over, play, steps, until
from weightwire import digest
from weightwire.errors import BucketError, NotFound, PermissionDenied, Unavailable


class TestUploads:
    @pytest.mark.parametrize("what", [failed, lost])
    def test_uploads_are_retried(self, what: Any) -> None:
        async def scene(trainer: LoopTrainer) -> None:
            trainer.bucket.trouble("put", "deltas/", what, times=5)
            publication = await over(trainer.publish())
            assert publication.version == 2

        trainer = play(scene)
        assert steps(trainer) == [None, 1, 2]
        assert trainer.bucket.count("put", "deltas/") == 6
        assert len([message for message in trainer.warnings if message.endswith("; trying again")]) == 5

    def test_uploads_are_given_up_when_the_time_to_retry_is_over(self) -> None:
        async def scene(trainer: LoopTrainer) -> None:
            before = trainer.held
            trainer.bucket.trouble("put", "deltas/", failed, times=1e9)
            publication = await over(trainer.publish())
            assert isinstance(publication.error, Unavailable)
            assert trainer.held == before
            trainer.bucket.calm()
            assert (await over(trainer.publish())).version == 2

        trainer = play(scene, retry_seconds=20.0)
        assert steps(trainer) == [None, 1, 3]
        assert trainer.held == digest(trainer.weights).hex
        assert "step 2: not published (the request failed); the next version includes it" in trainer.warnings

    def test_uploads_are_given_up_for_newer_weights(self) -> None:
        """Retries would otherwise never end."""

        async def scene(trainer: LoopTrainer) -> None:
            trainer.bucket.trouble("put", "deltas/", failed, times=1e9)
            old = trainer.publish()
            await until(lambda: trainer.bucket.count("put", "deltas/") > 0)
            new = trainer.publish()
            assert isinstance((await over(old)).error, Unavailable)
            trainer.bucket.calm()
            assert (await over(new)).version == 2

        trainer = play(scene, retry_seconds=1e9)
        assert steps(trainer) == [None, 1, 3]
        assert trainer.held == digest(trainer.weights).hex

    @pytest.mark.parametrize("problem", [PermissionDenied("no"), NotFound("no bucket")])
    def test_uploads_are_given_up_at_once_after_a_permanent_error(self, problem: BucketError) -> None:
        async def refuse(act: Act) -> None:
            raise problem

        async def scene(trainer: LoopTrainer) -> None:
            trainer.bucket.trouble("put", "deltas/", refuse)
            assert (await over(trainer.publish())).error is problem
            assert trainer.bucket.count("put", "deltas/") == 1
            await over(trainer.publish())

        assert steps(play(scene)) == [None, 1, 3]

    def test_changes_of_many_failed_versions_are_part_of_the_next(self) -> None:
        async def scene(trainer: LoopTrainer) -> None:
            trainer.bucket.trouble("put", "deltas/", denied, times=5)
            for _ in range(5):
                assert (await over(trainer.publish())).error is not None
            assert (await over(trainer.publish())).version == 2

        trainer = play(scene)
        assert steps(trainer) == [None, 1, 7]
        assert trainer.held == digest(trainer.weights).hex

    def test_reads_for_a_commit_are_retried(self) -> None:
        """A commit names earlier ones, which a new publisher must read."""

        async def scene(trainer: LoopTrainer) -> None:
            await trainer.publish_all(10)
            await trainer.close()
            again = await LoopTrainer(trainer.bucket).start()
            assert (await over(again.publish())).version == 13
            assert again.work.process.writer is not None
            again.work.process.writer.chain._known.clear()
            trainer.bucket.trouble("get", "commits/", failed, times=3)
            assert (await over(again.publish())).version == 14
            await again.close()
            trainer.work = again.work

        play(scene)
