"""A server that dies in an update serves nothing that was not verified: it is loaded again after its restart."""

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
PATCH = diff(weights_of(FIRST), weights_of(SECOND), coo=True)


@pytest.fixture
def server() -> Iterator[FakeVllm]:
    with FakeVllm() as server:
        yield server


@pytest.mark.parametrize("action", ["stage", "swap"])
def test_a_server_that_dies_in_a_patch_is_loaded_again(server: FakeVllm, action: str, tmp_path: Path) -> None:
    first, second = holding(FIRST, 1), holding(SECOND, 2)
    with closing(VllmEngine(server.url)) as engine:
        engine.attach()
        engine.reload(tmp_path, first)
        server.ask("/test/die", {"action": action})
        with pytest.raises(EngineError, match=server.url):
            engine.patch(PATCH, second)
        assert engine.holding is None
        with pytest.raises(EngineError, match="cannot be reached"):
            engine.check_health()

        server.kill()
        server.start()
        assert engine.attach(first.run) is None
        assert not engine.adopt(tmp_path, second)
        engine.reload(tmp_path, second)
        assert server.version == "2"
        assert server.ask("/is_paused") == {"is_paused": False}
        assert not engine._shared.paused_mark.exists()
    assert not server.directory.exists()
