"""One completion server for the tests of this room."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.followers import until
from support.vllm_server import tiny_model

if TYPE_CHECKING:  # imports torch, which the core does not have
    from support.completion_server import CompletionClient


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The weights of `tiny`, with a chat template."""
    from support.completion_server import CHAT_TEMPLATE

    return tiny_model(tmp_path_factory.mktemp("chat") / "model", chat_template=CHAT_TEMPLATE)


@pytest.fixture(autouse=True)
def _idle(request: pytest.FixtureRequest) -> Iterator[None]:
    """A request that a test gave up must not run during the next one."""
    yield
    if "client" in request.fixturenames:
        batcher = request.getfixturevalue("client").service.batcher
        until(lambda: not batcher.running and not batcher.waiting)


@pytest.fixture
def held(client: CompletionClient, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """After its first step, generation waits until this is set."""
    generation, go, steps = client.service.batcher._generation, threading.Event(), itertools.count()
    advance = generation.advance

    def wait_and_advance() -> None:
        if next(steps):
            go.wait(120)
        advance()

    monkeypatch.setattr(generation, "advance", wait_and_advance)
    yield go
    go.set()


@pytest.fixture(scope="session")
def client(chat_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CompletionClient]:
    """A client of a server without a run. Shared: tests must not change it."""
    from support.completion_server import completion_server

    here = tmp_path_factory.mktemp("server")
    with completion_server(chat_model, here / "bucket", here / "replica", ("tiny", "also tiny")) as client:
        yield client
