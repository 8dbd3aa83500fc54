"""Texts from a bucket or a store cannot move the cursor, write escapes, begin a line or use markup."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from project.provocations.case import http_server
from support.commands import COMMAND, shown_on_terminal
from support.followers import until
from support.stores import environment
from weightwire import Event, Publisher, WeightwireError
from weightwire.chain.records import Heartbeat, seal
from weightwire.errors import printable
from weightwire.follower import Follower
from weightwire.telemetry import log_event

NASTY = (
    "\x1b[2J\x1b]0;owned\x07\x9b31m\u202e\u2066\r\nerror: forged\x00\x7f\u2028[red]a[/red][link=http://evil]b[/link]"
)
SAFE = (
    r"\x1b[2J\x1b]0;owned\x07\x9b31m\u202e\u2066\r\nerror: forged\x00\x7f\u2028[red]a[/red][link=http://evil]b[/link]"
)
OWN_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")  # colours and the progress bar


def run(words: Sequence[str | Path], *, on_terminal: bool) -> str:
    """All that a command writes. A pipe belongs to a process of its own, a terminal to this one, which is faster."""
    if on_terminal:
        return shown_on_terminal(words, columns=1000)[1]
    command = [*COMMAND, *map(str, words)]
    env = {**os.environ, "COLUMNS": "1000"}
    ran = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=env, timeout=120, check=False)
    return ran.stdout.decode()


def check(output: str, *, on_terminal: bool) -> None:
    assert not re.search(r"^error: forged", output, re.MULTILINE)
    assert "\x1b]" not in output
    text = OWN_ESCAPES.sub("", output) if on_terminal else output
    assert not [one for one in text if not one.isprintable() and one not in "\r\n"]
    assert "\r" not in text.replace("\r\n", "") or on_terminal
    assert "Traceback" not in text


@pytest.fixture(scope="module")
def nasty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in which every free text is hostile."""
    here = tmp_path_factory.mktemp("nasty")
    weights = {f"w{NASTY}": np.zeros(64, np.float32), "[bold]v[/bold]": np.zeros(4, np.float32)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("platform.node", lambda: f"host{NASTY}")
        with Publisher(here / "run") as publisher:
            for step in range(3):
                weights[f"w{NASTY}"] = weights[f"w{NASTY}"] + 1
                publisher.publish(weights, metrics={f"loss{NASTY}": step, "[bold]": 1.0}).wait()
        with Publisher(here / "based", base=weights, source=f"source{NASTY}") as publisher:
            publisher.publish(weights).wait()
    run_id = json.loads((here / "run" / "run.json").read_bytes())["run"]
    beat = Heartbeat(run=run_id, name="one", version=1, head=3, lease=60.0, host=NASTY, trouble=f"trouble{NASTY}")
    (here / "run" / "replicas").mkdir(exist_ok=True)
    for name in ("one", NASTY.replace("/", "").replace("\0", "")):
        (here / "run" / "replicas" / f"{name}.json").write_bytes(seal(beat).data)
    (here / "run" / "anchors" / NASTY.replace("/", "").replace(chr(0), "")).write_bytes(b"?")
    return here


COMMANDS: dict[str, tuple[list[str], str]] = {
    "status": (["status", "RUN"], f"trouble{SAFE}"),
    "log": (["log", "RUN"], f"loss{SAFE}"),
    "verify": (["verify", "RUN"], ""),
    "gc": (["gc", "RUN"], ""),
    "doctor": (["doctor", "RUN"], ""),
    "doctor of a base": (["doctor", "BASED"], f"source{SAFE}"),
    "follow": (["follow", "RUN", "--into", "NEW", "--once"], ""),
    "follow without the base": (["follow", "BASED", "--into", "NEW", "--once"], f"source{SAFE}"),
    "restore": (["restore", "RUN", "-o", "NEW"], ""),
    "restore without the base": (["restore", "BASED", "-o", "NEW"], f"source{SAFE}"),
    "show": (["show", "DELTA"], f"w{SAFE}"),
    "publish of other weights": (["publish", "OTHER", "RUN"], ""),
    "a wrong option": (["publish", "OTHER", "RUN", f"--anchor-every=x{NASTY.replace(chr(0), '')}"], ""),
    "a wrong path": (["restore", f"/no{NASTY.replace(chr(0), '')}", "-o", "NEW"], ""),
}


@pytest.mark.parametrize(
    ("name", "on_terminal"), [*((name, True) for name in COMMANDS), ("status", False), ("log", False), ("show", False)]
)
def test_command_prints_hostile_texts_escaped(nasty: Path, tmp_path: Path, name: str, on_terminal: bool) -> None:
    words, expected = COMMANDS[name]
    other = tmp_path / "other.safetensors"
    if "OTHER" in words:
        from safetensors.numpy import save_file

        save_file({f"other{NASTY.replace(chr(0), '')}": np.zeros(3, np.float32)}, other)
    delta = max((nasty / "run" / "deltas").rglob("*.safetensors"), default=Path("none"))
    places = {
        "RUN": nasty / "run",
        "BASED": nasty / "based",
        "NEW": tmp_path / "new",
        "DELTA": delta,
        "OTHER": other,
    }
    output = run([places.get(word, word) for word in words], on_terminal=on_terminal)
    check(output, on_terminal=on_terminal)
    shown = OWN_ESCAPES.sub("", output)
    assert expected in shown
    assert shown.strip()


@pytest.mark.parametrize("on_terminal", [False, True], ids=["pipe", "terminal"])
def test_error_text_of_a_store_is_escaped(monkeypatch: pytest.MonkeyPatch, on_terminal: bool) -> None:
    body = f"<Error><Code>Odd</Code><Message>message{NASTY}</Message></Error>".encode()
    with http_server(lambda request: (400, {}, body)) as endpoint:
        for name, value in environment(endpoint, "key", "secret").items():
            monkeypatch.setenv(name, value)
        output = run(["status", "s3://bucket/run"], on_terminal=on_terminal)
    check(output, on_terminal=on_terminal)
    assert "error: " in OWN_ESCAPES.sub("", output)


def test_errors_escape_their_texts() -> None:
    problem = WeightwireError(f"message{NASTY}", hint=f"hint{NASTY}")
    assert str(problem) == f"message{SAFE}\nhint: hint{SAFE}"
    assert problem.args == (f"message{SAFE}",)


@pytest.mark.parametrize("stage", ["warning", "resumed", "recovered", "swap"])
def test_log_lines_are_escaped(stage: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "weightwire"):
        log_event(Event(stage, 3, message=f"message{NASTY}\nhint: hint{NASTY}"))
    [line] = caplog.messages
    assert f"message{SAFE}\nhint: hint{SAFE}" in line
    assert line.count("\n") == 1


def test_log_of_a_follower_has_no_hostile_text(nasty: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "weightwire"):
        with Follower(nasty / "run", into=tmp_path / "replica") as follower:
            follower.once()
        with Follower(nasty / "based", into=tmp_path / "other") as follower:
            follower.start()
            until(lambda: any(f"source{SAFE}" in line for line in caplog.messages), 60)
    for line in caplog.messages:
        assert all(one.isprintable() or one == "\n" for one in line)
        assert not re.search("^error: forged", line, re.MULTILINE)


def test_text_without_escapes_is_unchanged() -> None:
    text = "Größe 漢字 [red] 👍 \\n"
    assert printable(text) is text
    assert printable(text + "\x1b") == text + "\\x1b"
