"""Followers are woken after a version, and waited for."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from support.failing_bucket import Troubled
from support.run_contents import run_in
from support.small_weights import initial
from weightwire.chain.records import Heartbeat, heartbeat_path, seal
from weightwire.publisher.publisher import Publisher
from weightwire.telemetry.events import Event


class TestReplicas:
    def beat(self, bucket: Troubled, name: str, version: int, run: str | None = None) -> None:
        """What a follower writes."""
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
            assert publisher.wait(replicas=2, timeout=10) == 1

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
            assert publisher.wait(replicas=1, timeout=10) == 2

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
    @contextmanager
    def listening(self) -> Iterator[tuple[str, list[Any], threading.Event]]:
        """A server that wants to hear of new versions."""
        told: list[Any] = []
        third = threading.Event()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                told.append((self.path, self.headers["Content-Type"], json.loads(body)))
                self.send_response(204)
                self.end_headers()
                if len(told) == 3:
                    third.set()

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
            assert third.wait(10)
        assert sorted(body["version"] for _, _, body in told) == [1, 2, 3]
        assert {(path, kind) for path, kind, _ in told} == {("/wake", "application/json")}

    def test_followers_that_do_not_listen_harm_nothing(self, bucket: Troubled) -> None:
        warned = threading.Event()
        warnings: list[Event] = []

        def listen(event: Event) -> None:
            if event.stage == "warning":
                warnings.append(event)
                warned.set()

        with Publisher(bucket, notify=["http://127.0.0.1:1/", "nonsense"], on_event=listen) as publisher:
            assert publisher.publish(initial()).wait() == 1
            assert warned.wait(10)
        assert "http://127.0.0.1:1/: could not be woken" in warnings[0].message
