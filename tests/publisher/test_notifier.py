"""Followers are woken after each version, and a publisher can wait for them."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from support.failing_bucket import Troubled
from support.records import chain_of
from support.run_contents import run_in
from support.small_weights import initial
from weightwire.chain.record_paths import commit_path, heartbeat_path
from weightwire.chain.records import Heartbeat, seal
from weightwire.publisher import notifier
from weightwire.publisher.notifier import FollowerNotifier
from weightwire.publisher.publisher import Publisher
from weightwire.system import Runtime
from weightwire.telemetry.events import Event


class TestReplicas:
    def beat(self, bucket: Troubled, name: str, version: int, run: str | None = None) -> None:
        """Writes a follower's heartbeat."""
        run = run or run_in(bucket).run
        beat = Heartbeat(run=run, name=name, version=version, head=version, lease=60.0)
        asyncio.run(bucket.inner.put(heartbeat_path(name), seal(beat).data))

    def test_wait_returns_when_enough_replicas_hold_the_version(self, bucket: Troubled) -> None:
        with Publisher(bucket) as publisher:
            publisher.publish(initial()).wait()
            self.beat(bucket, "one", 1)
            assert publisher.wait(replicas=1) == 1
            with pytest.raises(TimeoutError):
                publisher.wait(replicas=2, timeout=0.05)
            threading.Timer(0.05, self.beat, [bucket, "two", 1]).start()
            assert publisher.wait(replicas=2, timeout=60) == 1

    def test_replicas_that_are_behind_do_not_count(self, bucket: Troubled) -> None:
        with Publisher(bucket) as publisher:
            publisher.publish(initial()).wait()
            self.beat(bucket, "behind", 1)
            publisher.publish(initial()).wait()
            with pytest.raises(TimeoutError):
                publisher.wait(replicas=1, timeout=0.05)
            self.beat(bucket, "ahead", 5)
            with pytest.raises(TimeoutError):
                publisher.wait(replicas=1, timeout=0.05)
            self.beat(bucket, "there", 2)
            assert publisher.wait(replicas=1, timeout=60) == 2

    def test_replicas_of_other_runs_do_not_count(self, bucket: Troubled) -> None:
        with Publisher(bucket) as publisher:
            publisher.publish(initial()).wait()
            self.beat(bucket, "lost", 9, run="0" * 32)
            asyncio.run(bucket.put("replicas/rotten.json", b"?"))
            with pytest.raises(TimeoutError):
                publisher.wait(replicas=1, timeout=0.05)

    def test_a_heartbeat_copied_to_another_name_does_not_count_twice(self, bucket: Troubled) -> None:
        with Publisher(bucket) as publisher:
            publisher.publish(initial()).wait()
            self.beat(bucket, "one", 1)
            copied = asyncio.run(bucket.get(heartbeat_path("one")))
            asyncio.run(bucket.put(heartbeat_path("two"), copied))
            with pytest.raises(TimeoutError):
                publisher.wait(replicas=2, timeout=0.5)


class TestNotify:
    @pytest.fixture(autouse=True)
    def patiently(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(notifier, "_TIMEOUT", 60.0)

    @contextmanager
    def listening(self) -> Iterator[tuple[str, list[Any], threading.Event]]:
        """A server that receives wake-ups."""
        told: list[Any] = []
        third = threading.Event()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                told.append((self.path, self.headers["Content-Type"], body, self.headers["Authorization"]))
                if len(told) == 3:
                    third.set()
                if self.path == "/moved":
                    self.send_response(302)
                    self.send_header("Location", "/wake")
                else:
                    self.send_response(204)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        server = HTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/wake", told, third
        finally:
            server.shutdown()
            thread.join()
            server.server_close()

    def test_followers_are_woken_after_every_version(self, bucket: Troubled) -> None:
        with self.listening() as (url, told, third), Publisher(bucket, notify=[url]) as publisher:
            for _ in range(3):
                publisher.publish(initial()).wait()
            assert third.wait(60)
        stored = [asyncio.run(bucket.inner.get(commit_path(version))) for version in (1, 2, 3)]
        assert sorted(body for _, _, body, _ in told) == sorted(stored)
        assert {(path, kind) for path, kind, _, _ in told} == {("/wake", "application/x-ndjson")}

    def test_a_follower_that_hangs_does_not_delay_the_others(self, bucket: Troubled) -> None:
        with socket.create_server(("127.0.0.1", 0)) as hanging, self.listening() as (url, told, third):
            silent = f"http://127.0.0.1:{hanging.getsockname()[1]}/"
            with Publisher(bucket, notify=[silent, url], on_event=lambda event: None) as publisher:
                for _ in range(3):
                    publisher.publish(initial()).wait()
                assert third.wait(30)  # the patience with the other one is a minute
                hanging.close()
        assert len(told) == 3

    def test_unreachable_followers_are_only_a_warning(self, bucket: Troubled) -> None:
        warned = threading.Event()
        warnings: list[Event] = []

        def listen(event: Event) -> None:
            if event.stage == "warning":
                warnings.append(event)
                if len(warnings) == 2:
                    warned.set()

        with Publisher(bucket, notify=["http://127.0.0.1:1/", "nonsense"], on_event=listen) as publisher:
            assert publisher.publish(initial()).wait() == 1
            assert warned.wait(60)
        assert any("http://127.0.0.1:1/: the follower could not be woken" in one.message for one in warnings)

    def post(self, url: str) -> list[str]:
        """The warnings of one wake-up."""
        events: list[Event] = []
        asyncio.run(FollowerNotifier((url,), Runtime(), events.append).notify(chain_of(1)[0]))
        return [event.message for event in events]

    def test_the_token_of_the_environment_is_sent(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with self.listening() as (url, told, _):
            monkeypatch.delenv("WEIGHTWIRE_TOKEN", raising=False)
            assert self.post(url) == []
            monkeypatch.setenv("WEIGHTWIRE_TOKEN", "t" * 32)
            assert self.post(url) == []
            assert [header for _, _, _, header in told] == [None, "Bearer " + "t" * 32]

    def test_a_redirect_is_not_followed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """It could take the token to another server."""
        monkeypatch.setenv("WEIGHTWIRE_TOKEN", "t" * 32)
        with self.listening() as (url, told, _):
            [warned] = self.post(url.replace("/wake", "/moved"))
            assert "302" in warned
            assert [path for path, _, _, _ in told] == ["/moved"]

    def test_an_invalid_token_is_a_warning_that_does_not_repeat_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("WEIGHTWIRE_TOKEN", "short")
        with self.listening() as (url, told, _):
            [warned] = self.post(url)
        assert "WEIGHTWIRE_TOKEN: not a valid token" in warned
        assert "short" not in warned
        assert told == []
