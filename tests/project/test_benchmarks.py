"""The benchmarks' command lines and processes: relative paths work, and what fails ends with its error."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
BENCHMARKS = ROOT / "benchmarks"
SCRIPTS = sorted(BENCHMARKS.glob("*.py"))


def run(code: str, cwd: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """Some lines of Python beside the benchmarks, in a process of its own."""
    env = {**os.environ, "PYTHONPATH": str(BENCHMARKS)}
    return subprocess.run([sys.executable, "-c", code], cwd=cwd, env=env, capture_output=True, text=True, **options)


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    """One like record.py's: two checkpoints of a Qwen3 that is as small as can be."""
    names = ["step-00000", "step-00001"]
    (tmp_path / "early").mkdir()
    facts = {"stage": "early", "lr": 1e-6, "model": "qwen3", "checkpoints": names}
    (tmp_path / "early" / "recording.json").write_text(json.dumps(facts))
    code = (
        "import numpy, pathlib, recording; recording.write_checkpoint({'x': numpy.full(9, %d, 'u2')}, pathlib.Path(%r))"
    )
    config = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 16}
    for number, name in enumerate(names):
        ran = run(code % (number, str(tmp_path / "early" / name)), tmp_path)
        assert ran.returncode == 0, ran.stderr
        (tmp_path / "early" / name / "config.json").write_text(json.dumps(config))
    return tmp_path / "early"


# --- arguments ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", ["pause", "publish", "sync"])
def test_a_relative_recording_is_made_absolute(script: str, recording: Path) -> None:
    code = f"import sys; sys.argv[1:] = ['early']; import {script}; print({script}.parse_arguments().recording)"
    ran = run(code, recording.parent)
    assert ran.stdout.strip() == str(recording), ran.stderr


def test_paths_are_made_absolute_from_the_working_directory_and_the_home(tmp_path: Path) -> None:
    code = "from arguments import absolute_path; print(absolute_path('a/b'), absolute_path('~/c'), absolute_path('/d'))"
    assert run(code, tmp_path).stdout.split() == [str(tmp_path / "a" / "b"), str(Path.home() / "c"), "/d"]


def test_what_is_not_a_recording_is_refused_at_once(tmp_path: Path) -> None:
    ran = run("import sys; sys.argv[1:] = ['nothing']; import publish; publish.main()", tmp_path)
    assert ran.returncode == 2
    assert "nothing: not a recording" in ran.stderr


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_no_command_line_takes_a_path_as_it_is(script: Path) -> None:
    """Only `arguments` makes paths of arguments: it alone makes them absolute."""
    tree = ast.parse(script.read_text())
    plain = [
        keyword.value.lineno
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument"
        for keyword in call.keywords
        if keyword.arg == "type" and isinstance(keyword.value, ast.Name) and keyword.value.id == "Path"
    ]
    assert not plain


# --- failures ----------------------------------------------------------------------------------------------------

STUBBORN = "import sys, time; print('ready', flush=True); sys.stdin.read(); time.sleep(600)"


@pytest.mark.parametrize(
    ("then", "said"),
    [
        ("raise SystemExit('the error itself')", "the error itself"),
        ("child.end(timeout=0.1)", "did not end within 0.1 s"),
        ("child.next_line(timeout=0.1)", "said nothing for 0.1 s"),
    ],
    ids=["the block fails", "it does not end", "it says nothing"],
)
def test_a_child_that_would_not_end_is_ended_with_an_error(then: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    code = (
        "import pathlib\n"
        "from child_process import Child\n"
        "with Child(pathlib.Path('stubborn.py').absolute()) as child:\n"
        "    child.next_line()\n"
        f"    {then}\n"
    )
    ran = run(code, tmp_path, timeout=60)
    assert ran.returncode == 1
    assert ran.stderr.strip().endswith(said)


def test_a_child_that_dies_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "dying.py").write_text("raise SystemExit('its own words')")
    code = "import pathlib; from child_process import Child; Child(pathlib.Path('dying.py').absolute()).next_line()"
    ran = run(code, tmp_path, timeout=60)
    assert ran.returncode == 1
    assert "its own words" in ran.stderr
    assert "dying.py ended too early" in ran.stderr


@pytest.fixture
def broken_vllm(tmp_path: Path) -> Path:
    """A place for PYTHONPATH."""
    fake = tmp_path / "fake" / "vllm"
    fake.mkdir(parents=True)
    (fake / "__init__.py").write_text("raise SystemExit('this vLLM is broken')")
    return fake.parent


def test_a_server_that_cannot_start_is_an_error(broken_vllm: Path, tmp_path: Path) -> None:
    code = (
        "import os, pathlib\n"
        "from vllm_server import serving\n"
        f"os.environ['PYTHONPATH'] = {str(broken_vllm)!r}\n"
        "with serving(pathlib.Path('model'), pathlib.Path('scratch').absolute(), None, 2):\n"
        "    print('serves')\n"
    )
    ran = run(code, tmp_path, timeout=60)
    assert (ran.returncode, ran.stdout) == (1, "")
    assert "vLLM did not start" in ran.stderr
    assert "this vLLM is broken" in ran.stderr


@pytest.mark.slow
def test_pause_ends_with_its_error_where_its_server_cannot_start(recording: Path, broken_vllm: Path) -> None:
    pytest.importorskip("transformers")
    ran = subprocess.run(
        [sys.executable, BENCHMARKS / "pause.py", "early"],
        cwd=recording.parent,
        env={**os.environ, "PYTHONPATH": str(broken_vllm)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ran.returncode == 1
    assert "vLLM did not start" in ran.stderr
    assert "this vLLM is broken" in ran.stderr
