"""Ctrl-C: one line that says what was left in which state, exit code 130, no traceback."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

import weightwire
from support.checkpoint_trainer import CheckpointTrainer
from support.command_files import Files
from support.commands import Command, Ran, Training, tree, versions_in
from weightwire.bucket.directory import DirectoryBucket
from weightwire.chain.record_paths import commit_path
from weightwire.chain.records import Commit, Sealed
from weightwire.chain.writer import ChainWriter
from weightwire.cli import patch as patch_command
from weightwire.delta import patcher
from weightwire.errors import AlreadyExists
from weightwire.follower.follower import Follower
from weightwire.publisher.publish_loop import PublishLoop
from weightwire.publisher.publisher import Publisher
from weightwire.publisher.takeover import Takeover


def interrupt(*args: Any, **options: Any) -> NoReturn:
    raise KeyboardInterrupt


def then_interrupt(work: Callable[..., Any]) -> Callable[..., NoReturn]:
    def wrapped(*args: Any, **options: Any) -> NoReturn:
        work(*args, **options)
        raise KeyboardInterrupt

    return wrapped


@pytest.mark.parametrize("command", ["status", "log", "verify"])
def test_interrupt_of_a_reading_command_reports_no_change(
    run: Command, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setattr(f"weightwire.cli.{command}.with_bucket", interrupt)
    assert run(command, "/tmp/nowhere") == Ran(130, "", "interrupted: nothing was changed\n")


def test_interrupt_is_a_json_error_with_json(run: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightwire.cli.status.with_bucket", interrupt)
    ran = run("status", "/tmp/nowhere", "--json")
    error = {"code": "WW-INTERRUPTED", "message": "interrupted: nothing was changed", "hint": None}
    assert (ran.code, [json.loads(line) for line in ran.out.splitlines()]) == (130, [{"error": error}])


class TestOutputs:
    def test_interrupt_before_the_output_reports_that_nothing_was_written(
        self, run: Command, files: Files, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before = tree(files.here)
        out = files.here / "out.html"
        monkeypatch.setattr(weightwire, "diff", interrupt)
        monkeypatch.setattr(patch_command, "patch_checkpoint", interrupt)
        monkeypatch.setattr("weightwire.cli.restore.with_bucket", interrupt)
        monkeypatch.setattr("weightwire.cli.page.with_bucket", interrupt)
        commands: list[list[str | Path]] = [
            ["diff", files.old, files.new, "-o", out],
            ["patch", files.old, files.delta, "-o", out],
            ["restore", "/tmp/nowhere", "-o", out],
            ["page", "/tmp/nowhere", "--export", out],
        ]
        for arguments in commands:
            assert run(*arguments) == Ran(130, "", f"interrupted: nothing was written to {out}\n")
        assert tree(files.here) == before

    def test_interrupt_after_the_output_reports_that_it_is_complete(
        self, run: Command, files: Files, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        out = files.here / "out.safetensors"
        monkeypatch.setattr(patch_command, "patch_checkpoint", then_interrupt(patcher.patch_checkpoint))
        assert run("patch", files.old, files.delta, "-o", out).err == f"interrupted: {out} is complete\n"
        assert weightwire.digest(out).hex == weightwire.digest(files.new).hex


class TestPublish:
    def test_interrupt_before_the_first_version_reports_no_version(
        self, run: Command, trainer: CheckpointTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path, url = trainer.publish(), tmp_path / "other"
        monkeypatch.setattr(Publisher, "publish", interrupt)
        ran = run("publish", path, url)
        assert ran == Ran(130, "", f"interrupted: nothing was published; {url} has no version yet\n")

    def test_interrupt_before_the_commit_reports_the_previous_version(
        self, run: Command, trainer: CheckpointTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        old = trainer.publish()
        trainer.publish()
        trainer.close()
        monkeypatch.setattr(Publisher, "publish", interrupt)
        ran = run("publish", old, trainer.bucket)
        assert ran == Ran(130, "", f"interrupted: nothing was published; {trainer.bucket} is at version 2\n")

    def test_interrupt_after_the_commit_reports_the_new_version(
        self, run: Command, trainer: CheckpointTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path, url = trainer.publish(), tmp_path / "other"
        monkeypatch.setattr(Publisher, "publish", then_interrupt(Publisher.publish))
        assert run("publish", path, url) == Ran(130, "", f"interrupted: {url} is at version 1\n")


class TestPublishAfterItsCommitWasSent:
    """The request is on its way when Ctrl-C arrives: nobody can know yet whether the version exists."""

    @pytest.fixture(autouse=True)
    def over(self) -> Iterator[threading.Event]:
        """Ctrl-C is pressed until this is set. It is not ignored, as a shell does for jobs in the background."""
        before, over = signal.signal(signal.SIGINT, signal.default_int_handler), threading.Event()
        yield over
        over.set()
        signal.signal(signal.SIGINT, before)

    @pytest.fixture
    def training(self, tmp_path: Path) -> Training:
        return Training(tmp_path / "out")

    @pytest.fixture
    def bucket(self, tmp_path: Path) -> Path:
        return tmp_path / "bucket"

    def test_interrupt_reports_the_version_that_may_exist(
        self, run: Command, training: Training, bucket: Path, over: threading.Event, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run("publish", training.save("checkpoint-1"), bucket)
        hold_commits(monkeypatch, over, kind="delta")
        ran = run("publish", training.save("checkpoint-2"), bucket)
        told = f"interrupted: {bucket} may be at version 3: its commit was sent, but not answered\n"
        assert ran == Ran(130, "", told)
        assert versions_in(bucket)[-1]["version"] == 3

    def test_second_interrupt_reports_the_first_version_that_may_exist(
        self, run: Command, training: Training, bucket: Path, over: threading.Event, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The first Ctrl-C waits for the first commit of a run. The second one does not."""
        hold_commits(monkeypatch, over, kind="anchor", interrupts=2)
        ran = run("publish", training.save("checkpoint-1"), bucket)
        told = f"interrupted: {bucket} may be at version 1: its commit was sent, but not answered\n"
        assert ran == Ran(130, "", told)

    def test_second_interrupt_of_watch_reports_the_version_that_may_exist(
        self, run: Command, training: Training, bucket: Path, over: threading.Event, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        training.save("checkpoint-1")
        hold_commits(monkeypatch, over, kind="anchor", interrupts=3)
        ran = run("publish", "--watch", training.parent, bucket)
        assert ran.code == 130
        last = ran.err.splitlines()[-1]
        assert last == f"interrupted: {bucket} may be at version 1: its commit was sent, but not answered"

    def test_interrupt_while_a_fence_is_sent_reports_that_nothing_was_published(
        self, run: Command, training: Training, bucket: Path, over: threading.Event, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run("publish", training.save("checkpoint-1"), bucket)
        hold_commits(monkeypatch, over, kind="fence")
        where = f"{bucket} may be at version 2: a fence was sent, but not answered"
        assert (
            run("publish", training.save("checkpoint-2"), bucket).err
            == f"interrupted: nothing was published; {where}\n"
        )

    def test_interrupt_after_the_fence_reports_its_version(
        self, run: Command, training: Training, bucket: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run("publish", training.save("checkpoint-1"), bucket)
        monkeypatch.setattr(Takeover, "resume", press_ctrl_c)
        told = f"interrupted: nothing was published; {bucket} is at version 2\n"
        assert run("publish", training.save("checkpoint-2"), bucket).err == told

    def test_interrupt_after_an_answered_commit_reports_the_new_version(
        self, run: Command, training: Training, bucket: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run("publish", training.save("checkpoint-1"), bucket)
        monkeypatch.setattr(PublishLoop, "_report_resumption", press_ctrl_c)
        assert run("publish", training.save("checkpoint-2"), bucket).err == f"interrupted: {bucket} is at version 3\n"

    def test_interrupt_right_after_the_answer_reports_the_new_version(
        self, run: Command, training: Training, bucket: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run("publish", training.save("checkpoint-1"), bucket)
        monkeypatch.setattr(ChainWriter, "send", send_and_press_ctrl_c)
        assert run("publish", training.save("checkpoint-2"), bucket).err == f"interrupted: {bucket} is at version 3\n"

    def test_interrupt_after_a_commit_whose_reply_was_lost_reports_the_new_version(
        self, run: Command, training: Training, bucket: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The publisher finds its commit in the bucket."""
        run("publish", training.save("checkpoint-1"), bucket)
        create = DirectoryBucket.create

        async def lose_reply(self: DirectoryBucket, path: str, data: bytes) -> None:
            await create(self, path, data)
            if path.startswith("commits/"):
                raise AlreadyExists("by an earlier attempt")

        monkeypatch.setattr(DirectoryBucket, "create", lose_reply)
        monkeypatch.setattr(PublishLoop, "_report_resumption", press_ctrl_c)
        ran = run("publish", "--insist", training.save("checkpoint-2"), bucket)
        assert ran == Ran(130, "", f"interrupted: {bucket} is at version 3\n")


async def press_ctrl_c(*args: Any) -> NoReturn:
    os.kill(os.getpid(), signal.SIGINT)
    await asyncio.sleep(60)
    raise AssertionError("Ctrl-C did not interrupt it")


async def send_and_press_ctrl_c(writer: ChainWriter, commit: Sealed[Commit]) -> NoReturn:
    await writer.bucket.create(commit_path(commit.record.version), commit.data)
    await press_ctrl_c()


def hold_commits(monkeypatch: pytest.MonkeyPatch, over: threading.Event, *, kind: str, interrupts: int = 1) -> None:
    """Makes a directory store commits of this kind without an answer. Presses Ctrl-C once for each of `interrupts`."""
    create = DirectoryBucket.create

    async def hold(self: DirectoryBucket, path: str, data: bytes) -> None:
        await create(self, path, data)
        if path.startswith("commits/") and json.loads(data)["kind"] == kind:
            threading.Thread(target=press, daemon=True).start()
            try:
                await asyncio.sleep(60)
            finally:
                over.set()

    def press() -> None:
        # On a busy machine two may arrive as one.
        for pause in itertools.chain([0.0], [0.5] * (interrupts - 1), itertools.repeat(5.0)):
            if over.wait(pause):
                return
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(DirectoryBucket, "create", hold)


class TestFollow:
    def test_interrupt_of_the_first_follow_reports_no_version(
        self, run: Command, trainer: CheckpointTrainer, replica: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        trainer.publish()
        monkeypatch.setattr(Follower, "once", interrupt)
        ran = run("follow", trainer.bucket, "--into", replica, "--once")
        assert ran == Ran(130, "", f"interrupted: {replica} holds no version yet\n")

    def test_interrupt_of_follow_reports_the_version_held(
        self, run: Command, trainer: CheckpointTrainer, replica: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        trainer.publish()
        run("follow", trainer.bucket, "--into", replica, "--once")
        trainer.publish()
        monkeypatch.setattr(Follower, "once", interrupt)
        ran = run("follow", trainer.bucket, "--into", replica, "--once")
        assert ran == Ran(130, "", f"interrupted: {replica / 'current'} is version 1\n")


@pytest.mark.parametrize("module", ["numpy", "typer", "weightwire.publisher", "weightwire.cli.application"])
def test_interrupt_while_modules_are_imported_reports_no_change(module: str) -> None:
    code = f"""
import sys
class Interrupt:
    def find_spec(self, name, path, target=None):
        if name == {module!r}:
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupt())
from weightwire.cli import script
script()
"""
    ran = subprocess.run([sys.executable, "-c", code, "status", "x"], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout, ran.stderr) == (130, "", "interrupted: nothing was changed\n")
