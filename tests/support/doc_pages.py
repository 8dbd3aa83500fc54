"""The code blocks of README.md, docs/ and deploy/, for tests that run them.

A test claims the blocks below a heading by calling `blocks` with literal arguments. `tests/project/test_docs.py` finds
these calls, and fails for every block that no test claims.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import chdir, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from unittest.mock import patch

from support.commands import weightwire
from support.warm_python import WarmPython

__all__ = [
    "PAGES",
    "ROOT",
    "CodeBlock",
    "Terminal",
    "blocks",
    "commands",
    "filled",
    "read_page",
    "run_commands",
    "run_python",
    "run_shell",
    "terminals",
]

ROOT = Path(__file__).parent.parent.parent
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "deploy").rglob("*.md"))
)

# Replaced in every block.
_BUCKET, _MODEL, _SERVER = "s3://bucket/run", "path/to/model", "http://127.0.0.1:8000"

_COMMAND = re.compile(r"(\w+=\S+ )*(cd|curl|docker|export|git|hf|make|mkdir|pip|python|rclone|sh|vllm|weightwire) ")


@dataclass(frozen=True)
class CodeBlock:
    """A fenced block, and the heading above it. Commands in a fence without a language count as `sh`."""

    page: str
    heading: str
    language: str
    text: str


@cache
def read_page(page: str) -> tuple[CodeBlock, ...]:
    """All fenced blocks of a page, in order."""
    found, heading = [], ""
    text = (ROOT / page).read_text(encoding="utf-8")
    for match in re.finditer(r"^#+ (?P<heading>[^\n]*)$|^```(?P<language>\w*)\n(?P<code>.*?)^```$", text, re.M | re.S):
        if match["heading"] is not None:
            heading = match["heading"]
        else:
            language = match["language"] or ("sh" if _COMMAND.match(match["code"]) else "")
            found.append(CodeBlock(page, heading, language, match["code"]))
    return tuple(found)


def blocks(page: str, heading: str, language: str = "sh") -> list[str]:
    """The blocks of one language directly below a heading."""
    found = [one.text for one in read_page(page) if (one.heading, one.language) == (heading, language)]
    assert found, f"{page}: no {language} block below {heading!r}"
    return found


def filled(text: str, *, bucket: object = _BUCKET, model: object = _MODEL, server: object = _SERVER) -> str:
    """A block with the bucket, the model and the server of a test."""
    return text.replace(_BUCKET, str(bucket)).replace(_MODEL, str(model)).replace(_SERVER, str(server))


def commands(block: str) -> list[str]:
    """The commands of a shell block, without comments. A line that ends with a backslash continues."""
    lines = block.replace("\\\n", " ").splitlines()
    return [command for line in lines if (command := re.sub(r"(^|\s)#.*", "", line).strip())]


# --- running -----------------------------------------------------------------------------------------------------


def _environment(variables: Mapping[str, str] | None) -> dict[str, str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "RCLONE_CONFIG": "/dev/null", **(variables or {})}


def run_shell(script: str, directory: Path, variables: Mapping[str, str] | None = None) -> str:
    """Runs a block in a shell that stops at the first error. Returns everything that it printed."""
    command = ["bash", "-euo", "pipefail", "-c", script]
    env = _environment(variables)
    ran = subprocess.run(command, cwd=directory, env=env, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, f"{script}\n{ran.stdout}{ran.stderr}"
    return ran.stdout + ran.stderr


def run_commands(block: str, directory: Path, variables: Mapping[str, str] | None = None) -> str:
    """Runs a block line by line. Plain weightwire commands run in this process, which is faster."""
    printed = []
    for command in commands(block):
        words = shlex.split(command)
        if words[0] != "weightwire" or set(command) & set("$|&;<>"):
            printed.append(run_shell(command, directory, variables))
            continue
        with chdir(directory), patch.dict(os.environ, variables or {}):
            ran = weightwire(*words[1:])
        assert ran.code == 0, f"{command}\n{ran.out}{ran.err}"
        printed.append(ran.out + ran.err)
    return "".join(printed)


def run_python(code: str, directory: Path) -> str:
    """Runs a block as a script. Returns everything that it printed."""
    script, output = directory / "script.py", directory / "script.out"
    script.write_text(code)
    code_of_exit = WarmPython([script], output, directory).wait(300)
    printed = output.read_text()
    assert code_of_exit == 0, printed[-3000:]
    return printed


class Terminal:
    """One command that runs until it is stopped."""

    def __init__(self, command: str, directory: Path, variables: Mapping[str, str] | None, log: Path) -> None:
        self.command = command
        self._log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                ["bash", "-c", f"exec {command}"],
                cwd=directory,
                env=_environment(variables),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    @property
    def printed(self) -> str:
        return self._log.read_text(errors="replace")

    def wait_for(self, text: str, seconds: float = 240.0) -> None:
        until = time.monotonic() + seconds
        while text not in self.printed:
            assert self._process.poll() is None, f"{self.command} ended:\n{self.printed[-3000:]}"
            assert time.monotonic() < until, f"{self.command}: no {text!r} in\n{self.printed[-3000:]}"
            time.sleep(0.05)

    def stop(self) -> int:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            return self._process.wait(timeout=90)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise


@contextmanager
def terminals(
    *commands: str, directory: Path, variables: Mapping[str, str] | None = None, logs: Path | None = None
) -> Iterator[tuple[Terminal, ...]]:
    """Runs commands side by side, as in several terminals, and stops them at the end."""
    opened: list[Terminal] = []
    try:
        for number, command in enumerate(commands):
            log = (logs or directory) / f"terminal-{number}.log"
            opened.append(Terminal(command, directory, variables, log))
        yield tuple(opened)
    finally:
        for one in opened:
            one.stop()
