"""The table of stages. Every other list of stages derives from it."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import numpy as np

from weightwire.engines import version_keeper
from weightwire.follower.follower import Follower
from weightwire.page.run_view import RunView
from weightwire.publisher.publisher import Publisher
from weightwire.telemetry.stages import STAGES, stage_names

NOTICES = {"warning", "recovered"}  # events that are not stages


def test_names_are_unique() -> None:
    names = [stage.name for stage in STAGES]
    assert sorted(set(names)) == sorted(names)


def test_sides_are_in_the_order_of_the_pipeline() -> None:
    assert stage_names("publisher") + stage_names("follower") + stage_names("engine") == tuple(
        stage.name for stage in STAGES
    )
    assert stage_names("publisher", "engine") == ("capture", "encode", "upload", "commit", "stage", "swap")


def test_publisher_and_follower_emit_the_stages_of_their_sides(tmp_path: Path) -> None:
    published, followed = set[str](), set[str]()
    weights = {"a": np.arange(64, dtype=np.float32)}
    with (
        Publisher(tmp_path / "run", on_event=lambda event: published.add(event.stage)) as publisher,
        Follower(
            tmp_path / "run", into=tmp_path / "replica", on_event=lambda event: followed.add(event.stage)
        ) as follower,
    ):
        for _ in range(2):
            publisher.publish(weights).wait()
            follower.once()
            weights = {"a": weights["a"] + 1}
    assert published - NOTICES == set(stage_names("publisher"))
    assert followed - NOTICES == set(stage_names("follower"))


def test_engines_emit_the_stages_of_their_side() -> None:
    code = ast.parse(inspect.getsource(version_keeper))
    calls = [node for node in ast.walk(code) if isinstance(node, ast.Call) and ast.unparse(node.func) == "Event"]
    assert {ast.literal_eval(call.args[0]) for call in calls} - NOTICES == set(stage_names("engine"))


def test_page_has_the_table() -> None:
    assert RunView("file:///x", 0.0).stages == STAGES
