"""GET /healthz and /readyz of a completion server. The rule itself is tested in tests/engines/test_ready_check.py."""

from __future__ import annotations

from typing import Any

import pytest

from support.completion_server import CompletionClient
from weightwire.engines import EngineState, ReadyCheck, ReplicaState


def state(*reasons: str, trouble: str = "", version: int | None = 4) -> ReplicaState:
    behind = None if version is None else 5 - version
    engine = EngineState("torch", version, behind, 1.5, None, trouble, reasons)
    return ReplicaState(5, 5, behind, 1.5, trouble, reasons, (engine,))


def answer(client: CompletionClient, monkeypatch: pytest.MonkeyPatch, shown: ReplicaState) -> tuple[int, Any]:
    monkeypatch.setattr(ReadyCheck, "state", lambda *_: shown)
    return client.call("/readyz")


def test_a_server_without_a_run_is_alive_and_not_ready(client: CompletionClient) -> None:
    assert client.call("/healthz") == (200, {"status": "alive"})
    status, answer = client.call("/readyz")
    assert (status, answer["ready"], answer["version"], answer["behind"]) == (503, False, None, None)
    assert any("no version of this run yet" in reason for reason in answer["reasons"])


def test_a_ready_server_says_what_it_serves(client: CompletionClient, monkeypatch: pytest.MonkeyPatch) -> None:
    status, found = answer(client, monkeypatch, state())
    assert status == 200
    assert found == {"ready": True, "reasons": [], "version": 4, "head": 5, "behind": 1, "behind_seconds": 1.5}


def test_a_server_that_is_too_far_behind_says_so(client: CompletionClient, monkeypatch: pytest.MonkeyPatch) -> None:
    status, found = answer(client, monkeypatch, state("torch: 1 version behind; 0 are allowed"))
    assert (status, found["reasons"]) == (503, ["torch: 1 version behind; 0 are allowed"])


def test_errors_of_the_model_are_not_shown_to_everyone(
    client: CompletionClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    trouble = "tensor 'secret': another shape"
    status, found = answer(client, monkeypatch, state(trouble, trouble=trouble))
    assert status == 503
    assert found["reasons"] == ["the model could not take a version: see the output of the server"]


def test_a_paused_server_is_not_ready(client: CompletionClient, monkeypatch: pytest.MonkeyPatch) -> None:
    client.call("/pause?mode=keep", b"")
    try:
        status, found = answer(client, monkeypatch, state())
        assert (status, found["reasons"]) == (503, ["paused: POST /resume continues"])
    finally:
        client.call("/resume", b"")
