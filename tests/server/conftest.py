"""One completion server for the tests of this room."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.vllm_server import tiny_model

if TYPE_CHECKING:  # imports torch, which the core does not have
    from support.completion_server import CompletionClient


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The weights of `tiny`, with a chat template."""
    from support.completion_server import CHAT_TEMPLATE

    return tiny_model(tmp_path_factory.mktemp("chat") / "model", chat_template=CHAT_TEMPLATE)


@pytest.fixture(scope="session")
def client(chat_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CompletionClient]:
    """A client of a server without a run. Shared: tests must not change it."""
    from support.completion_server import completion_server

    here = tmp_path_factory.mktemp("server")
    with completion_server(chat_model, here / "bucket", here / "replica", ("tiny", "also tiny")) as client:
        yield client
