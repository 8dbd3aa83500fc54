"""`weightwire publish --watch`, as a user runs it: each checkpoint that a trainer writes."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import msgspec
import pytest

from support.commands import Running, Training, kinds_in, state_of, versions_in, weightwire
from weightwire.cli.shared.run_output import PublishOutput


@pytest.mark.slow
class TestWatch:
    def test_watch_publishes_each_finished_checkpoint(self, training: Training, bucket: Path) -> None:
        training.parent.mkdir()
        with Running("publish", "--watch", training.parent, bucket, "--json") as watching:
            watching.wait_for(f"watching {training.parent}, publishing to {bucket}")
            first, second = training.move_in("checkpoint-900"), training.move_in("checkpoint-1000")
            watching.wait_for("version 2 (step ")
            third = training.move_in("checkpoint-1100")
            watching.wait_for("version 3 (step ")
            ran = watching.stop()

        assert ran.code == 0
        assert [msgspec.json.decode(line, type=PublishOutput).version for line in ran.out.splitlines()] == [1, 2, 3]
        assert kinds_in(bucket) == ["fence", "anchor", "delta", "delta"]
        assert [commit.get("step") for commit in versions_in(bucket)] == [None, 900, 1000, 1100]
        assert [commit["after"] for commit in versions_in(bucket)[1:]] == [*map(state_of, (first, second, third))]
        assert [file["name"] for file in json.loads((bucket / "run.json").read_bytes())["files"]] == [
            "config.json",
            "tokenizer/vocab.txt",
        ]

    def test_watch_waits_for_a_directory_that_does_not_exist_yet(self, training: Training, bucket: Path) -> None:
        with Running("publish", "--watch", training.parent, bucket) as watching:
            watching.wait_for(f"{training.parent} does not exist yet: waiting for it")
            training.move_in("checkpoint-100")
            watching.wait_for("version 1 (step ")
            ran = watching.stop(signal.SIGINT)

        assert ran.code == 130
        assert ran.err.count("does not exist yet") == 1

    def test_watch_does_not_publish_twice_after_a_restart(self, training: Training, bucket: Path) -> None:
        for number in (100, 200):
            training.save(f"checkpoint-{number}")
        with Running("publish", "--watch", training.parent, bucket) as watching:
            watching.wait_for("version 2 (step ")
            ran = watching.stop(signal.SIGINT)
        assert ran.code == 130
        assert ran.err.splitlines()[-1] == f"interrupted: {bucket} is at version 2"

        with Running("publish", "--watch", training.parent, bucket) as watching:
            watching.wait_for("watching ")
            training.move_in("checkpoint-300")
            watching.wait_for("version 4 (step ")
            ran = watching.stop()

        assert ran.code == 0
        assert ran.err.count(f" of {bucket} from checkpoint-") == 1
        assert kinds_in(bucket) == ["fence", "anchor", "delta", "fence", "delta"]

    def test_rewritten_directory_is_published_again(self, training: Training, bucket: Path) -> None:
        path = training.save("model")
        (path / "train.log").write_text("changes all the time")
        with Running("publish", "--watch", path, bucket) as watching:
            watching.wait_for("version 1 of")
            training.save("model")
            watching.wait_for("version 2 of")
            # On a busy machine it takes so long to write that one version has half of it.
            until = time.monotonic() + 60
            while versions_in(bucket)[-1]["after"] != state_of(path):
                assert time.monotonic() < until
                time.sleep(0.05)
            assert watching.stop().code == 0

        assert "step" not in versions_in(bucket)[-1] or versions_in(bucket)[-1]["step"] is None

    def test_unreadable_checkpoints_are_skipped_with_one_warning(self, training: Training, bucket: Path) -> None:
        broken = training.parent / "checkpoint-100"
        broken.mkdir(parents=True)
        (broken / "model.safetensors").write_bytes(b"not weights")
        (training.parent / "runs").mkdir()
        (training.parent / "runs" / "events").write_text("not a checkpoint")
        with Running("publish", "--watch", training.parent, bucket) as watching:
            watching.wait_for("skipped: ")
            training.move_in("checkpoint-200")
            watching.wait_for("version 1 (step ")
            training.weights["one more"] = training.weights["norm"]
            training.move_in("checkpoint-300")
            watching.wait_for("tensor 'one more'")
            time.sleep(2)
            ran = watching.stop()

        assert ran.code == 0
        assert ran.err.count("skipped: ") == 2
        assert ran.err.count("runs") == 0
        assert kinds_in(bucket) == ["fence", "anchor"]

    def test_half_written_checkpoint_is_published_when_it_is_complete(self, training: Training, bucket: Path) -> None:
        path = next(training.save("checkpoint-100").glob("*.safetensors"))
        whole = path.read_bytes()
        path.write_bytes(whole[:-100])
        with Running("publish", "--watch", training.parent, bucket) as watching:
            line = watching.wait_for("incomplete so far: waiting for it to change")
            (bucket.parent / "whole").write_bytes(whole)
            (bucket.parent / "whole").replace(path)
            watching.wait_for("version 1 (step 100) of")
            ran = watching.stop()
        assert str(path) in line
        assert not {"skipped", "hint:"} & set(ran.err.split())

    def test_watch_ends_when_another_publisher_takes_over(self, training: Training, bucket: Path) -> None:
        training.save("checkpoint-100")
        with Running("publish", "--watch", training.parent, bucket) as watching:
            watching.wait_for("version 1 (step ")
            other = Training(training.parent.with_name("other"))
            other.step()
            assert weightwire("publish", other.save("checkpoint-1"), bucket).code == 0
            training.move_in("checkpoint-200")
            ran = watching.end()

        assert ran.code == 1
        assert ran.err.splitlines()[-2].startswith("error: ")
        assert "has taken over this run" in ran.err.splitlines()[-2]
        assert ran.err.count("has taken over this run") == 1
        assert "stop the other one and restart this one, or use another URL" in ran.err.splitlines()[-1]

    def test_second_signal_stops_watch_at_once(self, training: Training, tmp_path: Path) -> None:
        """After the first signal the command waits for a version that cannot be committed."""
        training.save("checkpoint-100")
        with Running("publish", "--watch", training.parent, "/proc/nowhere") as watching:
            watching.wait_for("warning: ")
            until = time.monotonic() + 60
            while watching.process.poll() is None:  # on a busy machine two signals may arrive as one
                assert time.monotonic() < until
                watching.process.send_signal(signal.SIGINT)
                time.sleep(0.3)
            assert watching.end().code in (0, 130, -signal.SIGINT)  # negative if Python was about to end
