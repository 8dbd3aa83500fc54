"""The walk of one step in docs/design.md matches a trace of a real step."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
MOST_HOPS = 40

DESIGN = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
WALK = DESIGN.partition("## A step through the house\n")[2].partition("\n## ")[0]
ROWS = re.findall(r"^\| (\d*) ?\| `([\w/]+\.py)` \| `([\w.]+)` \|", WALK, re.MULTILINE)
UNNUMBERED = re.findall(r"`([\w/]+(?:\.py|/))`", WALK.partition("Not in the table:")[2])
WRAPPERS = re.findall(r"`([\w/]+\.py)`", WALK.partition("- wrappers ")[2].partition("\n- ")[0])


@pytest.fixture(scope="module")
def step() -> dict[str, Any]:
    """The calls that `step_trace` recorded during one real step."""
    program = ROOT / "tests" / "support" / "step_trace.py"
    traced = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=300)
    assert traced.returncode == 0, traced.stderr
    found: dict[str, Any] = json.loads(traced.stdout)
    return found


def test_hops_are_numbered_and_at_most_40() -> None:
    numbers = [int(number) for number, _, _ in ROWS if number]
    assert numbers == list(range(1, len(numbers) + 1))
    assert 20 < len(numbers) <= MOST_HOPS
    assert len(ROWS) - len(numbers) == 4, "exactly four rows, one per thread, have no number"


def test_a_step_calls_every_function_of_the_walk(step: dict[str, Any]) -> None:
    called = {(module, function) for module, function in step["functions"]}
    assert not [(module, function) for _, module, function in ROWS if (module, function) not in called]


def test_every_hop_comes_from_a_module_further_up(step: dict[str, Any]) -> None:
    crossings = {(caller, called) for caller, called in step["crossings"]}
    for wrapper in WRAPPERS:
        inner = {called for caller, called in crossings if caller == wrapper}
        crossings |= {(caller, called) for caller, wrapped in crossings if wrapped == wrapper for called in inner}
    above: list[str] = []
    for number, module, function in ROWS:
        if number:
            assert any((caller, module) in crossings for caller in above), (
                f"{function}: not called by any module above it"
            )
        above.append(module)


def test_the_page_names_every_module_that_a_step_runs(step: dict[str, Any]) -> None:
    listed = {module for _, module, _ in ROWS} | {name for name in UNNUMBERED if name.endswith(".py")}
    folders = tuple(name for name in UNNUMBERED if name.endswith("/"))
    run = {module for module, _ in step["functions"]}
    assert not {module for module in run if module not in listed and not module.startswith(folders)}


def test_every_file_named_on_the_page_exists() -> None:
    named = set(re.findall(r"`((?:[a-z_]+/)+[\w]+\.py)`", DESIGN))
    assert named
    assert not {name for name in named if not any((ROOT / root / name).is_file() for root in ("", "src/weightwire"))}
