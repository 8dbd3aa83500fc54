"""docs/design.md: its walk of one step through the house is what really happens."""

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
BESIDE = re.findall(r"`([\w/]+(?:\.py|/))`", WALK.partition("Beside the way:")[2])


@pytest.fixture(scope="module")
def step() -> dict[str, Any]:
    """What `step_trace` saw on one real step."""
    program = ROOT / "tests" / "support" / "step_trace.py"
    traced = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=300)
    assert traced.returncode == 0, traced.stderr
    found: dict[str, Any] = json.loads(traced.stdout)
    return found


def test_the_hops_are_counted_and_at_most_40() -> None:
    numbers = [int(number) for number, _, _ in ROWS if number]
    assert numbers == list(range(1, len(numbers) + 1))
    assert 20 < len(numbers) <= MOST_HOPS
    assert len(ROWS) - len(numbers) == 4, "only the first function of a thread has no number"


def test_every_function_of_the_walk_is_called_by_a_step(step: dict[str, Any]) -> None:
    called = {(module, function) for module, function in step["functions"]}
    assert not [(module, function) for _, module, function in ROWS if (module, function) not in called]


def test_every_hop_comes_from_a_module_further_up(step: dict[str, Any]) -> None:
    crossings = {(caller, called) for caller, called in step["crossings"]}
    above: list[str] = []
    for number, module, function in ROWS:
        if number:
            assert any((caller, module) in crossings for caller in above), f"{function}: called from nowhere above"
        above.append(module)


def test_no_module_that_a_step_touches_is_left_out(step: dict[str, Any]) -> None:
    listed = {module for _, module, _ in ROWS} | {name for name in BESIDE if name.endswith(".py")}
    folders = tuple(name for name in BESIDE if name.endswith("/"))
    touched = {module for module, _ in step["functions"]}
    assert not {module for module in touched if module not in listed and not module.startswith(folders)}


def test_every_file_that_the_page_names_exists() -> None:
    named = set(re.findall(r"`((?:[a-z_]+/)+[\w]+\.py)`", DESIGN))
    assert named
    assert not {name for name in named if not any((ROOT / root / name).is_file() for root in ("", "src/weightwire"))}
