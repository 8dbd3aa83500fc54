"""The output of every command has exactly the keys and types that docs/json.md documents."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from support.clocked_bucket import beat, first_weights, publish
from support.command_files import Files
from support.commands import Command, Training
from support.json_page import OUTPUTS, PAGE, render
from weightwire.bucket.registry import open_bucket
from weightwire.cli import application
from weightwire.cli.shared.json_output import (
    ErrorOutput,
    JsonOutput,
    RecoveredOutput,
    warn_as_json,
    write_json,
    write_json_line,
)


def test_page_is_generated_from_the_types() -> None:
    rewrite = "PYTHONPATH=tests python -m support.json_page"
    assert PAGE.read_text(encoding="utf-8") == render(), f"docs/json.md is out of date: run `{rewrite}`"


def test_every_command_with_json_is_documented() -> None:
    commands = [command.callback for command in application.app.registered_commands if command.callback]
    assert {command.__name__ for command in commands if "as_json" in command.__annotations__} == set(OUTPUTS)


def check(command: str, text: str) -> Any:
    """Raises if a key is missing, undocumented or of another type."""
    value = json.loads(text)
    msgspec.convert(value, OUTPUTS[command], strict=True)
    return value


@pytest.fixture
def url(tmp_path: Path) -> Path:
    """Versions 0 to 7; 0 is a fence, and 1, 3, 5 and 7 have anchors. One replica."""
    bucket = open_bucket(tmp_path / "run")
    publish(bucket, first_weights(), 7, anchor_every=2)
    run = json.loads((tmp_path / "run" / "run.json").read_bytes())["run"]
    for path, data in (beat(run, "x", 2, served=1), beat(run, "new", -1, served=-1)):
        (tmp_path / "run" / path).parent.mkdir(exist_ok=True)
        (tmp_path / "run" / path).write_bytes(data)
    return tmp_path / "run"


class TestWriting:
    class Example(JsonOutput, frozen=True, kw_only=True):
        name: str = "ä"
        size: int | None = None

    def test_document_has_every_key_and_is_indented(self, capsys: pytest.CaptureFixture[str]) -> None:
        write_json(self.Example())
        assert capsys.readouterr().out == '{\n  "name": "\\u00e4",\n  "size": null\n}\n'

    def test_line_is_written_at_once_and_flushed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Threads write lines as well, and readers wait for them."""
        calls: list[str] = []
        stdout = SimpleNamespace(write=calls.append, flush=lambda: calls.append("flush"))
        monkeypatch.setattr(sys, "stdout", stdout)
        write_json_line(self.Example(size=3))
        assert [call for call in calls if call] == ['{"name": "\\u00e4", "size": 3}\n', "flush"]

    @pytest.mark.parametrize("hint", ["wait", "", None])
    def test_warning_goes_to_people_and_to_programs(self, hint: str | None, capsys: pytest.CaptureFixture[str]) -> None:
        warn_as_json("the store is slow", hint)
        captured = capsys.readouterr()
        assert json.loads(captured.out) == {"warning": {"message": "the store is slow", "hint": hint or None}}
        assert captured.err.splitlines() == ["warning: the store is slow", *(["hint: wait"] if hint else [])]

    def test_errors_and_recoveries_have_one_key(self) -> None:
        error = {"code": "WW-X", "message": "failed", "hint": None}
        assert msgspec.to_builtins(ErrorOutput.of("WW-X", "failed")) == {"error": error}
        assert msgspec.to_builtins(ErrorOutput.of("WW-X", "failed", "wait")) == {"error": error | {"hint": "wait"}}
        assert msgspec.to_builtins(RecoveredOutput.of("over")) == {"recovered": {"message": "over"}}

    def test_unknown_keys_are_not_documented(self) -> None:
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert({"recovered": {"message": "over"}, "other": 1}, RecoveredOutput)


class TestRealOutput:
    def test_publish_output_is_as_documented(self, run: Command, tmp_path: Path) -> None:
        training, bucket = Training(tmp_path / "out"), tmp_path / "bucket"
        first, second = training.save("checkpoint-1"), training.save("checkpoint-2")
        anchor = check("publish", run("publish", first, bucket, "--json").out)
        again = check("publish", run("publish", first, bucket, "--json").out)
        delta = check("publish", run("publish", second, bucket, "--anchor-every", "1", "--json").out)
        assert (anchor["kind"], anchor["changed"], anchor["anchor_bytes"]) == ("anchor", None, None)
        assert (again["published"], again["version"]) == (False, 1)
        assert delta["kind"] == "delta"
        assert delta["changed"] > 0
        assert delta["anchor_bytes"] > 0

    def test_publish_from_a_base_output_is_as_documented(self, run: Command, tmp_path: Path) -> None:
        training = Training(tmp_path / "out")
        base = training.save("base")
        version = check("publish", run("publish", base, tmp_path / "bucket", "--base", base, "--json").out)
        assert (version["kind"], version["changed"], version["published"]) == ("base", None, False)

    def test_follow_and_restore_write_the_same_record(self, run: Command, url: Path, tmp_path: Path) -> None:
        followed = check("follow", run("follow", url, "--into", tmp_path / "r", "--once", "--json").out)
        restored = check("restore", run("restore", url, "-o", tmp_path / "out", "--json").out)
        same = restored.keys() - {"seconds", "checkpoint"}
        assert {key: followed[key] for key in same} == {key: restored[key] for key in same}
        nothing_new = check("follow", run("follow", url, "--into", tmp_path / "r", "--once", "--json").out)
        assert (nothing_new["bytes"], nothing_new["behind_seconds"]) == (0, None)

    def test_status_and_log_write_the_same_version(self, run: Command, url: Path) -> None:
        status = check("status", run("status", url, "--json").out)
        log = check("log", run("log", url, "--json").out)
        assert status["newest"] == log["versions"][0]
        assert [one["changed"] for one in log["versions"]][-2:] == [None, 0]  # an anchor, and a fence
        assert status["newest"]["anchor_bytes"] == status["anchor"]["bytes"]

    def test_status_and_log_output_is_empty_before_the_first_version(self, run: Command, url: Path) -> None:
        for path in (url / "commits").iterdir():
            path.unlink()
        assert check("status", run("status", url, "--json").out)["newest"] is None
        assert check("log", run("log", url, "--json").out)["versions"] == []

    def test_gc_output_is_as_documented(self, run: Command, url: Path) -> None:
        announced = check("gc", run("gc", url, "--window", "0s", "--json").out)
        deleted = check("gc", run("gc", url, "--window", "0s", "--grace", "0s", "--json").out)
        assert announced["waiting"]
        assert announced["leases"]
        assert deleted["run"] == announced["run"]

    def test_doctor_output_is_as_documented(self, run: Command, url: Path, tmp_path: Path) -> None:
        found = check("doctor", run("doctor", url, "--into", tmp_path / "replica", "--json").out)
        assert found["ok"]
        assert found["download_bytes_per_second"] > 0
        (url / "run.json").write_bytes(b"")
        assert not check("doctor", run("doctor", url, "--json").out)["can_follow"]

    def test_verify_output_is_as_documented(self, run: Command, url: Path) -> None:
        assert check("verify", run("verify", url, "--rebuild", "--json").out)["rebuild"]["versions"]
        next((url / "deltas" / "6").iterdir()).write_bytes(b"")
        assert check("verify", run("verify", url, "--json").out)["problems"]

    def test_diff_patch_and_show_output_is_as_documented(self, run: Command, files: Files, url: Path) -> None:
        check("diff", run("diff", files.old, files.new, "-o", files.delta, "--json").out)
        check("patch", run("patch", files.old, files.delta, "-o", files.here / "out", "--json").out)
        delta = check("show", run("show", files.delta, "--json").out)
        anchor = check("show", run("show", next((url / "anchors" / "1").iterdir()), "--json").out)
        assert delta["changed"] > 0
        assert (anchor["changed"], {one["changed"] for one in anchor["tensors"]}) == (None, {None})

    def test_error_output_is_as_documented(self, run: Command, tmp_path: Path) -> None:
        for arguments in (["status", str(tmp_path)], ["status", "--nonsense"]):
            ran = run(*arguments, "--json")
            msgspec.json.decode(ran.out, type=ErrorOutput)
