"""What a server answers to a check: serves, sleeps, is stuck, or is gone."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from project.provocations.case import Answer, http_server
from weightwire.engines import shared_directory
from weightwire.engines.engine import EngineHealth
from weightwire.engines.vllm import VllmEngine, health_check
from weightwire.engines.vllm.health_check import VllmHealthCheck
from weightwire.errors import EngineGone

CHECK_TIMES = (health_check._CORE, health_check._FRONT_END)


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_CORE", "_FRONT_END"):  # this machine may be busy
        monkeypatch.setattr(health_check, name, 60.0)


@contextmanager
def server(answers: dict[str, Any]) -> Iterator[str]:
    """Answers with these bodies, hangs where the body is None, and does not offer anything else."""
    checked = threading.Event()

    def respond(request: Any) -> Answer:
        if request.path not in answers:
            return 404, {}, b"{}"
        if answers[request.path] is None:
            checked.wait(120)
        return 200, {}, json.dumps(answers[request.path]).encode()

    with http_server(respond) as url:
        yield url
        checked.set()


@pytest.mark.parametrize(
    ("answers", "health"),
    [
        ({"/is_sleeping": {"is_sleeping": False}, "/weight_info": {"weight_version": "7"}}, EngineHealth(7)),
        ({"/is_sleeping": {"is_sleeping": False}, "/weight_info": {"weight_version": "default"}}, EngineHealth(None)),
        (
            {"/is_sleeping": {"is_sleeping": True}, "/weight_info": {"weight_version": "7"}},
            EngineHealth(is_asleep=True),
        ),
        ({"/weight_info": {"weight_version": "7"}}, EngineHealth(7)),  # offers no /is_sleeping
        ({"/is_sleeping": None, "/health": {}}, EngineHealth(is_stuck=True)),
        ({"/is_sleeping": {}, "/weight_info": None, "/health": {}}, EngineHealth(is_stuck=True)),
    ],
)
def test_running_server_tells_its_health(
    answers: dict[str, Any], health: EngineHealth, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health_check, "_CORE", 0.3 if None in answers.values() else 60.0)
    with server(answers) as url, VllmHealthCheck(url) as check:
        assert check.check() == health


def test_server_that_an_update_left_paused_does_not_sleep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise it would never be reloaded."""
    monkeypatch.setattr(shared_directory, "_SHARED_MEMORY", tmp_path)
    with server({"/is_sleeping": {"is_sleeping": True}}) as url, closing(VllmEngine(url)) as engine:
        assert engine.check_health() == EngineHealth(is_asleep=True)
        engine._shared.path.mkdir()
        engine._shared.paused_mark.touch()
        assert engine.check_health() == EngineHealth(is_paused=True)


def test_server_that_answers_nothing_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health_check, "_CORE", 0.2)
    monkeypatch.setattr(health_check, "_FRONT_END", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with (
            VllmHealthCheck(url) as check,
            pytest.raises(EngineGone, match=r"does not answer within 0\.\d s") as caught,
        ):
            check.check()
    assert "it hangs" in str(caught.value.hint)


def test_server_that_is_not_there_is_gone() -> None:
    with VllmHealthCheck("http://127.0.0.1:9") as check, pytest.raises(EngineGone, match="cannot be reached"):
        check.check()


def test_check_and_the_time_between_two_take_less_than_five_seconds() -> None:
    from weightwire.engines import engine_monitor

    assert sum(CHECK_TIMES) + engine_monitor._EVERY < 5


def test_closed_connection_asks_nobody() -> None:
    with server({"/is_sleeping": {}, "/weight_info": {}}) as url:
        check = VllmHealthCheck(url)
        check.check()
        check.close()
        with pytest.raises(EngineGone, match="the connection is closed"):
            check.check()
