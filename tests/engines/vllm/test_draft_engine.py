"""A separate draft model is updated beside the served model. test_families.py has real ones."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from support.fake_vllm import FakeVllm
from support.fused_model import arrays, changed, holding, weights_of
from weightwire import diff
from weightwire.engines.engine import EngineHealth
from weightwire.engines.registry import open_engine
from weightwire.engines.shared_directory import PAUSED
from weightwire.engines.vllm.client import VllmEngine
from weightwire.engines.vllm.draft_engine import VllmDraftEngine
from weightwire.errors import EngineError

FIRST = arrays()
SECOND = changed(FIRST, 2)
PATCH = diff(weights_of(FIRST), weights_of(SECOND), coo=True)


@pytest.fixture
def server() -> Iterator[FakeVllm]:
    with FakeVllm() as server:
        yield server


@pytest.fixture
def draft(server: FakeVllm) -> Iterator[VllmDraftEngine]:
    with closing(VllmDraftEngine(server.url)) as engine:
        engine.attach()
        yield engine


def test_versions_of_a_draft_neither_pause_the_server_nor_change_its_version(
    server: FakeVllm, draft: VllmDraftEngine, tmp_path: Path
) -> None:
    first, second = holding(FIRST, 1), holding(SECOND, 2)
    assert not draft.adopt(tmp_path, first)
    draft.reload(tmp_path, first)
    draft.patch(PATCH, second)
    assert draft.holding == second
    assert draft.attach() == second
    assert draft.check_health() == EngineHealth(2)
    assert server.version == "default"
    assert server.ask("/test/pauses") == []
    assert server.ask("/test/orders") == [
        f"draft {one}" for one in ("adopt 1", "check 1", "reload 1", "stage 2", "swap 2")
    ]


def test_model_and_draft_have_versions_of_their_own(server: FakeVllm, draft: VllmDraftEngine, tmp_path: Path) -> None:
    with closing(VllmEngine(server.url)) as model:
        model.attach()
        model.reload(tmp_path, holding(SECOND, 7))
        draft.reload(tmp_path, holding(FIRST, 1))
        assert draft.attach() == holding(FIRST, 1)
        assert model.attach() == holding(SECOND, 7)
        assert server.version == "7"
        assert model.check_health() == EngineHealth(7)
        assert draft.check_health() == EngineHealth(1)


def test_followers_of_model_and_draft_wait_for_each_other(
    server: FakeVllm, draft: VllmDraftEngine, tmp_path: Path
) -> None:
    """vLLM has one update at a time."""
    with closing(VllmEngine(server.url)) as model:
        model.attach()
        thread = threading.Thread(target=model.reload, args=(tmp_path, holding(SECOND, 7)))
        with draft._session() as finish:
            thread.start()
            thread.join(0.5)
            assert thread.is_alive()
            finish()
        thread.join(60)
        assert not thread.is_alive()
        assert server.version == "7"
    assert not list(server.directory.parent.glob(f"{server.directory.name}*.session"))


def test_a_pause_for_the_model_is_not_a_sleep(server: FakeVllm, draft: VllmDraftEngine, tmp_path: Path) -> None:
    draft.reload(tmp_path, holding(FIRST, 1))
    server.ask("/pause", {})
    assert draft.check_health() == EngineHealth(is_asleep=True)
    with pytest.raises(EngineError, match="is asleep, or was paused by another program"):
        draft.patch(PATCH, holding(SECOND, 2))
    server.directory.mkdir()
    (server.directory / PAUSED).touch()
    assert draft.check_health() == EngineHealth(is_paused=True)
    draft.patch(PATCH, holding(SECOND, 2))
    (server.directory / PAUSED).unlink()
    server.directory.rmdir()


def test_a_server_without_a_draft_says_so(server: FakeVllm) -> None:
    server.ask("/test/refuse", {"problem": "the server has no draft model"})
    with closing(VllmDraftEngine(server.url)) as engine, pytest.raises(EngineError, match="has no draft model"):
        engine.attach()


def test_it_is_an_engine_of_its_own_name(server: FakeVllm) -> None:
    engine = open_engine(f"vllm-draft={server.url}/v1")
    with closing(engine):
        assert isinstance(engine, VllmDraftEngine)
        assert engine.name == f"{server.url}/v1,draft"


def test_a_draft_that_does_not_attach_yet_reports_no_version(server: FakeVllm) -> None:
    with closing(VllmDraftEngine(server.url)) as engine:
        assert engine.check_health() == EngineHealth(None)
