"""All commands: help, exit codes, and errors as text and as JSON."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

import weightwire
from support.command_files import COMMAND, Files, make_weights
from support.commands import Command, Ran, Training, save_checkpoint, tree
from weightwire.cli import application
from weightwire.cli.shared import terminal
from weightwire.publisher.publisher import Publisher


def error_in(out: str) -> dict[str, Any]:
    """The error in the last line of stdout."""
    last = json.loads(out.splitlines()[-1])
    assert set(last) == {"error"}
    return dict(last["error"])


class TestErrorsAsJson:
    @pytest.mark.parametrize(
        ("arguments", "code"),
        [
            (["status", "{}"], "WW-NO-RUN"),
            (["log", "{}"], "WW-NO-RUN"),
            (["verify", "{}"], "WW-NO-RUN"),
            (["gc", "{}"], "WW-NO-RUN"),
            (["restore", "{}", "-o", "{}/out"], "WW-NO-RUN"),
            (["follow", "{}", "--into", "{}/replica", "--once"], "WW-NO-RUN"),
            (["publish", "{}/nothing", "{}/run"], "WW-CHECKPOINT"),
            (["diff", "{}/a", "{}/b", "-o", "{}/delta"], "WW-CHECKPOINT"),
            (["show", "{}/nothing"], "WW-CHECKPOINT"),
            (["status", "ftp://x/y"], "WW-BUCKET"),
        ],
    )
    def test_error_is_written_as_json_and_as_text(
        self, run: Command, tmp_path: Path, arguments: list[str], code: str
    ) -> None:
        ran = run(*(one.replace("{}", str(tmp_path)) for one in arguments), "--json")

        found = error_in(ran.out)
        assert (ran.code, found["code"]) == (1, code)
        assert f"error: {found['message']} [{code}]\n" in ran.err
        assert found["hint"] is None or f"hint: {found['hint']}\n" in ran.err

    def test_stdout_stays_empty_without_json(self, run: Command, tmp_path: Path) -> None:
        run("status", tmp_path).check_failed("nothing has been published there yet")

    @pytest.mark.parametrize(
        "arguments", [["status", "--no-such-option"], ["no-such-command"], ["gc", "/tmp", "--window", "1 week"]]
    )
    def test_wrong_usage_is_a_json_error(self, run: Command, arguments: list[str]) -> None:
        ran = run(*arguments, "--json")
        found = error_in(ran.out)
        assert (ran.code, found["code"], found["hint"]) == (2, "WW-USAGE", None)
        assert len(ran.out.splitlines()) == 1
        assert found["message"] in ran.err
        assert ran.err.startswith("Usage: ")

    def test_publish_error_is_one_line(self, run: Command, tmp_path: Path) -> None:
        training = Training(tmp_path / "checkpoints")
        checkpoint = training.save("checkpoint-1")
        with Publisher(tmp_path / "other", blocking=True) as publisher:
            publisher.publish({"x": training.weights["norm"]})
        ran = run("publish", checkpoint, tmp_path / "other", "--json")
        assert error_in(ran.out)["code"] == "WW-SCHEMA-CHANGED"
        assert len(ran.out.splitlines()) == 1

    def test_out_of_memory_is_a_json_error(self, run: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def exhausted(*_: object) -> None:
            raise MemoryError

        monkeypatch.setattr("weightwire.cli.status.with_bucket", exhausted)
        ran = run("status", tmp_path, "--json")
        assert error_in(ran.out)["message"] == "out of memory"
        assert "error: out of memory [WW-OUT-OF-MEMORY]\n" in ran.err


def test_every_command_has_a_module_or_package_with_its_name() -> None:
    names = {command.callback.__name__ for command in application.app.registered_commands if command.callback}
    folder = Path(application.__file__).parent
    files = {path.stem for path in folder.iterdir()} - {
        "__init__",
        "__pycache__",
        "application",
        "entry_point",
        "shared",
    }
    assert names == files


class TestErrors:
    """An error is two lines on stderr, the message and a hint, and leaves no files behind."""

    @staticmethod
    def check(ran: Ran, message: str, hint: str) -> None:
        assert (ran.code, ran.out) == (1, "")
        assert re.sub(r" \[WW-[A-Z-]+\]\n", "\n", ran.err) == f"error: {message}\nhint: {hint}\n"

    def test_installed_command_writes_error_and_hint(self, tmp_path: Path) -> None:
        ran = subprocess.run(
            [*COMMAND, "diff", "nothing", "nowhere", "-o", "x"], cwd=tmp_path, capture_output=True, text=True
        )

        expected = "error: nothing: no such file or directory [WW-CHECKPOINT]\nhint: check the path\n"
        assert (ran.returncode, ran.stdout, ran.stderr) == (1, "", expected)

    def test_missing_path_is_an_error(self, run: Command, files: Files) -> None:
        missing = files.here / "missing"
        out = files.here / "out"

        self.check(
            run("diff", files.old, missing, "-o", out),
            f"{missing}: no such file or directory",
            "check the path",
        )
        self.check(
            run("patch", missing, files.delta, "-o", out),
            f"{missing}: no such file or directory",
            "check the path",
        )
        self.check(run("show", missing), f"{missing}: no such file or directory", "check the path")

    def test_wrong_base_is_an_error(self, run: Command, files: Files) -> None:
        before = tree(files.here)
        made_for, these = weightwire.digest(files.old).hex[:12], weightwire.digest(files.new).hex[:12]

        self.check(
            run("patch", files.new, files.delta, "-o", files.here / "out.safetensors"),
            f"{files.delta}: made for weights with state {made_for}, but these have {these}",
            "apply it to the weights it was made from",
        )
        assert tree(files.here) == before

    @pytest.mark.parametrize("size", [0, 4, 200, -1])
    def test_truncated_delta_is_an_error(self, run: Command, files: Files, size: int) -> None:
        files.delta.write_bytes(files.delta.read_bytes()[:size])
        before = tree(files.here)

        for ran in (run("show", files.delta), run("patch", files.old, files.delta, "-o", files.here / "out")):
            assert (ran.code, ran.out) == (1, "")
            assert ran.err.startswith(f"error: {files.delta}: ")
            assert "\nhint: " in ran.err
            assert len(ran.err.splitlines()) == 2
        assert tree(files.here) == before

    def test_checkpoint_in_place_of_a_delta_is_an_error(self, run: Command, files: Files) -> None:
        self.check(
            run("patch", files.old, files.new, "-o", files.here / "out"),
            f"{files.new}: not a weightwire delta",
            "pass a file written by `weightwire diff`",
        )

    def test_output_directory_must_be_empty(self, run: Command, files: Files) -> None:
        base = save_checkpoint(files.here / "base", make_weights())
        out = files.here / "out"
        out.mkdir()
        (out / "notes.txt").write_text("mine")

        self.check(
            run("patch", base, files.delta, "-o", out),
            f"{out}: exists and is not empty",
            "write to a new or an empty directory",
        )
        assert tree(out) == {"notes.txt": b"mine"}

    @pytest.mark.parametrize(
        ("args", "message"),
        [
            (["diff", "a", "b"], "Missing option '--output' / '-o'"),
            (["diff", "a", "-o", "c"], "Missing argument 'NEW'"),
            (["diff", "a", "b", "-o", "c", "--threads", "0"], "Invalid value for '--threads'"),
            (["patch", "a", "b", "-o", "c", "--threads", "-1"], "Invalid value for '--threads'"),
            (["patch", "a", "b", "-o", "c", "--threads", "two"], "Invalid value for '--threads'"),
            (["show", "a", "--jason"], "No such option: --jason"),
            (["fetch"], "No such command 'fetch'"),
        ],
    )
    def test_wrong_usage_shows_the_usage(self, run: Command, args: list[str], message: str) -> None:
        ran = run(*args)

        assert (ran.code, ran.out) == (2, "")
        assert ran.err.startswith("Usage: weightwire ")
        assert message in ran.err

    def test_out_of_memory_is_an_error_with_a_hint(
        self, run: Command, files: Files, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        raise_from_diff(monkeypatch, MemoryError())

        self.check(
            run("diff", files.old, files.new, "-o", files.here / "x"),
            "out of memory",
            "use fewer --threads, or a machine with more memory",
        )

    def test_sigterm_removes_partial_files(self, run: Command, files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
        before = tree(files.here)
        # The last call before the result appears.
        monkeypatch.setattr(os, "replace", lambda *_: os.kill(os.getpid(), signal.SIGTERM))

        assert run("patch", files.old, files.delta, "-o", files.here / "out") == Ran(143, "", "")
        assert tree(files.here) == before

    def test_bug_shows_a_traceback(self, run: Command, files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
        raise_from_diff(monkeypatch, ZeroDivisionError("a bug"))

        with pytest.raises(ZeroDivisionError, match="a bug"):
            run("diff", files.old, files.new, "-o", files.here / "x")

    def test_closed_pipe_prints_nothing(self, files: Files) -> None:
        read, write = os.pipe()
        os.close(read)

        ran = subprocess.run([*COMMAND, "show", files.delta], stdout=write, stderr=subprocess.PIPE)
        os.close(write)

        assert (ran.returncode, ran.stderr) == (1, b"")


def raise_from_diff(monkeypatch: pytest.MonkeyPatch, problem: BaseException) -> None:
    def diff(*args: Any, **options: Any) -> NoReturn:
        raise problem

    monkeypatch.setattr(weightwire, "diff", diff)


class TestHelp:
    def test_help_lists_the_commands(self, run: Command) -> None:
        ran = run("--help")

        assert ran.code == 0
        assert all(f"\n  {command} " in ran.out for command in ("diff", "patch", "show"))

    def test_help_cuts_off_no_summary(self, run: Command) -> None:
        assert "...\n" not in run("--help").out.partition("Commands:")[2]

    def test_version_option_prints_the_version(self, run: Command) -> None:
        assert run("--version") == Ran(0, f"weightwire {weightwire.__version__}\n", "")

    def test_help_mentions_a_missing_kernel(self, run: Command, files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(terminal, "has_kernel", lambda: False)

        ran = run("diff", files.old, files.new, "-o", files.delta)

        assert ran.err.startswith("note: the compiled kernel is missing")


def test_shell_completion_completes_command_names() -> None:
    env = {**os.environ, "_WEIGHTWIRE_COMPLETE": "complete_bash", "COMP_WORDS": "weightwire res", "COMP_CWORD": "1"}
    ran = subprocess.run([*COMMAND], env=env, capture_output=True, text=True)
    assert ran.stdout.split() == ["restore"]


def test_inaccessible_path_is_not_blamed_on_stdout(run: Command) -> None:
    ran = run("doctor", "a" * 300)
    assert ran.code == 1
    assert "stdout" not in ran.err
    assert "File name too long" in ran.err


def test_metric_names_are_escaped_in_log(run: Command, tmp_path: Path) -> None:
    with weightwire.Publisher(tmp_path / "run") as publisher:
        publisher.publish({"w": np.zeros(4, np.float32)}, metrics={"a\x1b]0;title\x07[/b]": 1.0}).wait()
    ran = run("log", tmp_path / "run")
    assert ran.code == 0
    assert "\x1b" not in ran.out
    assert "[/b]" in ran.out
