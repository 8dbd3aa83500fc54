"""What all commands have in common: how an error reaches people, and programs that asked for JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support.commands import Command, Training
from weightwire.cli import entry_point
from weightwire.publisher.publisher import Publisher


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(monkeypatch, capsys)


def error_in(out: str) -> dict[str, Any]:
    """The error that a program finds as the last line of stdout."""
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
    def test_a_failure_is_told_to_programs_and_to_people(
        self, run: Command, tmp_path: Path, arguments: list[str], code: str
    ) -> None:
        ran = run(*(one.replace("{}", str(tmp_path)) for one in arguments), "--json")

        found = error_in(ran.out)
        assert (ran.code, found["code"]) == (1, code)
        assert f"error: {found['message']}\n" in ran.err
        assert found["hint"] is None or f"hint: {found['hint']}\n" in ran.err

    def test_without_json_stdout_stays_empty(self, run: Command, tmp_path: Path) -> None:
        run("status", tmp_path).check_failed("nothing has been published there yet")

    def test_wrong_usage_is_told_to_people_only(self, run: Command) -> None:
        ran = run("status", "--json", "--no-such-option")
        assert (ran.code, ran.out) == (2, "")
        assert "No such option" in ran.err

    def test_the_error_is_one_line_also_where_the_output_is_a_stream(self, run: Command, tmp_path: Path) -> None:
        training = Training(tmp_path / "checkpoints")
        checkpoint = training.save("checkpoint-1")
        with Publisher(tmp_path / "other", blocking=True) as publisher:
            publisher.publish({"x": training.weights["norm"]})
        ran = run("publish", checkpoint, tmp_path / "other", "--json")
        assert error_in(ran.out)["code"] == "WW-SCHEMA-CHANGED"
        assert len(ran.out.splitlines()) == 1

    def test_out_of_memory_is_an_error_like_any_other(
        self, run: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def exhausted(*_: object) -> None:
            raise MemoryError

        monkeypatch.setattr("weightwire.cli.status.with_bucket", exhausted)
        ran = run("status", tmp_path, "--json")
        assert error_in(ran.out)["message"] == "out of memory"
        assert "error: out of memory\n" in ran.err


def test_every_command_has_a_file_of_its_name() -> None:
    names = {command.callback.__name__ for command in entry_point.app.registered_commands if command.callback}
    folder = Path(entry_point.__file__).parent
    files = {path.stem for path in folder.glob("*.py")} - {"__init__", "entry_point"}
    assert names == files
