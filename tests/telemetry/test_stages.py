"""The table of stages: every list of stages elsewhere is taken from it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import weightwire
from weightwire.page.run_view import RunView
from weightwire.telemetry.stages import STAGES, stage_names

PACKAGE = Path(weightwire.__file__).parent
NOTICES = {"warning", "recovered"}  # events that are not stages
EMITTERS = {"Event", "_tell", "_stage"}


def emitted() -> Iterator[tuple[str, str]]:
    """The first argument of every call that emits an event, where it is a plain text."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
                called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                if called in EMITTERS and isinstance(node.args[0].value, str):
                    yield path.name, node.args[0].value


def test_names_are_unique() -> None:
    names = [stage.name for stage in STAGES]
    assert sorted(set(names)) == sorted(names)


def test_sides_are_in_the_order_of_the_pipeline() -> None:
    assert stage_names("publisher") + stage_names("follower") + stage_names("engine") == tuple(
        stage.name for stage in STAGES
    )
    assert stage_names("publisher", "engine") == ("capture", "encode", "upload", "commit", "stage", "swap")


def test_only_stages_of_the_table_are_emitted() -> None:
    found = list(emitted())
    known = {stage.name for stage in STAGES} | NOTICES
    assert {name for _, name in found} >= {"capture", "encode", "upload", "commit", "swap", "warning"}
    assert [(file, name) for file, name in found if name not in known] == []


def test_the_page_gets_the_table() -> None:
    assert RunView("file:///x", 0.0).stages == STAGES
