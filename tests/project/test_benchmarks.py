"""Command lines and child processes of the benchmarks: relative paths work, and failures exit with their error."""

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
    """Runs Python code in a new process that can import the benchmarks."""
    env = {**os.environ, "PYTHONPATH": str(BENCHMARKS)}
    return subprocess.run([sys.executable, "-c", code], cwd=cwd, env=env, capture_output=True, text=True, **options)


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recording as record.py writes it: two checkpoints of a tiny Qwen3. Tests must not change it."""
    early = tmp_path_factory.mktemp("recordings") / "early"
    early.mkdir()
    names = ["step-00000", "step-00001"]
    facts = {"stage": "early", "lr": 1e-6, "model": "qwen3", "checkpoints": names}
    (early / "recording.json").write_text(json.dumps(facts))
    code = (
        "import numpy, pathlib, recording\n"
        "for number, name in enumerate(%r):\n"
        "    recording.write_checkpoint({'x': numpy.full(9, number, 'u2')}, pathlib.Path(name))\n"
    )
    ran = run(code % names, early)
    assert ran.returncode == 0, ran.stderr
    config = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 16}
    for name in names:
        (early / name / "config.json").write_text(json.dumps(config))
    return early


# --- arguments ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", ["cache_policy", "pause", "publish", "sync"])
def test_relative_recording_path_becomes_absolute(script: str, recording: Path) -> None:
    code = f"import sys; sys.argv[1:] = ['early']; import {script}; print({script}.parse_arguments().recording)"
    ran = run(code, recording.parent)
    assert ran.stdout.strip() == str(recording), ran.stderr


def test_absolute_path_resolves_the_working_directory_and_the_home(tmp_path: Path) -> None:
    code = "from arguments import absolute_path; print(absolute_path('a/b'), absolute_path('~/c'), absolute_path('/d'))"
    assert run(code, tmp_path).stdout.split() == [str(tmp_path / "a" / "b"), str(Path.home() / "c"), "/d"]


def test_directory_without_a_recording_is_refused(tmp_path: Path) -> None:
    ran = run("import sys; sys.argv[1:] = ['nothing']; import publish; publish.main()", tmp_path)
    assert ran.returncode == 2
    assert "nothing: not a recording" in ran.stderr


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_path_arguments_use_the_parsers_of_the_arguments_module(script: Path) -> None:
    """`type=Path` would keep a relative path."""
    tree = ast.parse(script.read_text())
    plain = [
        keyword.value.lineno
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "add_argument"
        for keyword in call.keywords
        if keyword.arg == "type" and isinstance(keyword.value, ast.Name) and keyword.value.id == "Path"
    ]
    assert not plain


# --- runs --------------------------------------------------------------------------------------------------------


def test_many_tensors_compares_small_tensors_with_large_ones(tmp_path: Path) -> None:
    """On few tensors, which are not judged."""
    code = (
        "import sys; sys.argv[1:] = ['--tensors', '600', '--rounds', '1', '--json']; import many_tensors as m; m.main()"
    )
    ran = run(code, tmp_path, timeout=120)
    assert ran.returncode == 0, ran.stderr
    (report,) = json.loads(ran.stdout)["sources"]
    figures = {row["measure"]: row for row in report["rows"]}
    assert {row["verdict"] for row in figures.values()} == {"-"}
    assert 0 < figures["delta bytes: small / large"]["figure"] < 4
    assert figures["run.json bytes: small"]["figure"] > 600 * 40


# --- failures ----------------------------------------------------------------------------------------------------

HANGING = "import sys, time; print('ready', flush=True); sys.stdin.read(); time.sleep(600)"


@pytest.mark.parametrize(
    ("then", "message"),
    [
        ("raise SystemExit('the error itself')", "the error itself"),
        ("child.end(timeout=0.1)", "did not end within 0.1 s"),
        ("child.next_line(timeout=0.1)", "printed nothing for 0.1 s"),
    ],
    ids=["block-fails", "does-not-end", "prints-nothing"],
)
def test_hanging_child_is_killed_and_reported(then: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "hanging.py").write_text(HANGING)
    code = (
        "import pathlib\n"
        "from child_process import Child\n"
        "with Child(pathlib.Path('hanging.py').absolute()) as child:\n"
        "    child.next_line()\n"
        f"    {then}\n"
    )
    ran = run(code, tmp_path, timeout=120)
    assert ran.returncode == 1
    assert ran.stderr.strip().endswith(message)


def test_child_that_dies_is_reported(tmp_path: Path) -> None:
    (tmp_path / "dying.py").write_text("raise SystemExit('its own error')")
    code = "import pathlib; from child_process import Child; Child(pathlib.Path('dying.py').absolute()).next_line()"
    ran = run(code, tmp_path, timeout=120)
    assert ran.returncode == 1
    assert "its own error" in ran.stderr
    assert "dying.py ended too early" in ran.stderr


@pytest.fixture
def broken_vllm(tmp_path: Path) -> Path:
    """A directory for PYTHONPATH with a vLLM that fails on import."""
    fake = tmp_path / "fake" / "vllm"
    fake.mkdir(parents=True)
    (fake / "__init__.py").write_text("raise SystemExit('this vLLM is broken')")
    return fake.parent


def test_server_that_cannot_start_is_reported(broken_vllm: Path, tmp_path: Path) -> None:
    code = (
        "import os, pathlib\n"
        "from vllm_server import serving\n"
        f"os.environ['PYTHONPATH'] = {str(broken_vllm)!r}\n"
        "with serving(pathlib.Path('model'), pathlib.Path('scratch').absolute(), None, 2):\n"
        "    print('serving')\n"
    )
    ran = run(code, tmp_path, timeout=120)
    assert (ran.returncode, ran.stdout) == (1, "")
    assert "vLLM did not start" in ran.stderr
    assert "this vLLM is broken" in ran.stderr


@pytest.mark.slow
def test_pause_benchmark_fails_if_its_server_cannot_start(recording: Path, broken_vllm: Path) -> None:
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
