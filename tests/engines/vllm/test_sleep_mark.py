"""A server that has slept: its weights are compared before a patch. test_server_health.py has a real one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from support.fake_vllm import FakeVllm
from support.fused_model import arrays, changed, holding, weights_of
from weightwire import diff
from weightwire.engines.vllm import VllmEngine
from weightwire.errors import EngineError

FIRST = arrays()
SECOND = changed(FIRST, 2)


@pytest.fixture
def server() -> Iterator[FakeVllm]:
    with FakeVllm() as server:
        yield server


@pytest.mark.parametrize("level", [1, 2])
def test_a_server_that_has_slept_is_not_patched_but_compared(server: FakeVllm, level: int, tmp_path: Path) -> None:
    first, second = holding(FIRST, 1), holding(SECOND, 2)
    with closing(VllmEngine(server.url)) as engine:
        engine.attach()
        engine.reload(tmp_path, first)
        server.ask(f"/sleep?level={level}", {})
        server.ask("/wake_up", {})

        with pytest.raises(EngineError, match="was asleep, and its weights are not verified yet"):
            engine.patch(diff(weights_of(FIRST), weights_of(SECOND), coo=True), second)
        assert engine.holding is None
        assert engine.attach(first.run) is None
        assert server.version == "slept"

        assert engine.adopt(tmp_path, first) is (level == 1)
        if level == 2:
            engine.reload(tmp_path, first)
        assert server.version == "1"
        engine.patch(diff(weights_of(FIRST), weights_of(SECOND), coo=True), second)
        assert server.version == "2"


def test_a_restarted_follower_compares_a_server_that_has_slept(server: FakeVllm, tmp_path: Path) -> None:
    first = holding(FIRST, 1)
    with closing(VllmEngine(server.url)) as engine:
        engine.attach()
        engine.reload(tmp_path, first)
    server.ask("/sleep?level=1", {})
    server.ask("/wake_up", {})
    with closing(VllmEngine(server.url)) as another:
        assert another.attach(first.run) is None
