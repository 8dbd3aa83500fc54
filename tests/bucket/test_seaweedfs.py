"""Publisher and follower on a real object store: keys with few permissions, outages, large objects."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from faults.actors import bits_at, weights_at
from faults.promises import read_commits
from faults.proxy import Proxy, deny_missing, lose_request
from support.small_run import bits_of
from support.stores import SeaweedFS, environment, running, use
from weightwire import Tensor, digest
from weightwire.bucket.bucket import Bucket
from weightwire.bucket.registry import open_bucket
from weightwire.errors import PermissionDenied, Unavailable
from weightwire.follower.follower import Follower
from weightwire.publisher.publisher import Publisher
from weightwire.telemetry.events import Event
from weightwire.weights import DTYPES

SEED = 5
fresh = itertools.count()


class Recorder:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def __call__(self, event: Event) -> None:
        self.events.append(event)

    @property
    def warnings(self) -> list[str]:
        """Without those about a store that is slow, as it may be on a busy machine."""
        told = [event.message for event in self.events if event.stage == "warning"]
        return [message for message in told if "has not answered for" not in message]


class Opener:
    """Opens one prefix with any key, through any endpoint."""

    def __init__(self, server: SeaweedFS, monkeypatch: pytest.MonkeyPatch) -> None:
        self._server = server
        self._monkeypatch = monkeypatch
        self.url = server.url(f"seaweedfs-{next(fresh)}")

    def __call__(self, key: str = "admin", endpoint: str | None = None) -> Bucket:
        use(self._monkeypatch, environment(endpoint or self._server.endpoint, f"{key}-key", f"{key}-secret"))
        return open_bucket(self.url)


@pytest.fixture
def opened(seaweedfs: SeaweedFS, monkeypatch: pytest.MonkeyPatch) -> Opener:
    return Opener(seaweedfs, monkeypatch)


def publish(publisher: Publisher, step: int) -> int:
    return publisher.publish(weights_at(SEED, step), step=step).wait(60)


def until(done: Callable[[], object], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.02)


def assert_holds(follower: Follower, step: int) -> None:
    assert bits_of(follower.checkpoint()) == bits_at(SEED, step)


def heartbeats(bucket: Bucket) -> list[str]:
    return [one.path for one in asyncio.run(bucket.list("replicas/"))]


# --- keys ------------------------------------------------------------------------------------------------------------


def test_follower_with_a_read_only_key_follows(opened: Opener, tmp_path: Path) -> None:
    recorder = Recorder()
    with (
        Publisher(opened(), on_event=Recorder()) as publisher,
        Follower(opened("reader"), into=tmp_path, on_event=recorder) as follower,
    ):
        publish(publisher, 0)
        follower.start()
        for step in (1, 2, 3):
            publish(publisher, step)
            until(lambda: follower.version == publisher.version)
        assert_holds(follower, 3)
        assert follower.trouble == ""

    assert [warning for warning in recorder.warnings if "write permission" in warning] == [
        "this key has no write permission, so this follower writes no heartbeats"
    ]
    assert heartbeats(opened()) == []


def test_follower_with_a_writing_key_writes_heartbeats(opened: Opener, tmp_path: Path) -> None:
    with (
        Publisher(opened(), on_event=Recorder()) as publisher,
        Follower(opened(), into=tmp_path, name="one", on_event=Recorder()) as follower,
    ):
        follower.start()
        publish(publisher, 0)
        assert publisher.wait(replicas=1, timeout=60) == 1
        assert follower.version == 1

    assert heartbeats(opened()) == ["replicas/one.json"]


def test_publisher_with_a_read_only_key_fails_at_start(opened: Opener) -> None:
    with pytest.raises(PermissionDenied) as caught:
        Publisher(opened("reader"), on_event=Recorder())

    assert caught.value.hint
    assert "AWS_ACCESS_KEY_ID" in caught.value.hint


@pytest.fixture
def s3_without_listing(seaweedfs: SeaweedFS) -> Iterator[str]:
    """Answers 403 for missing objects to a key without list permission, as S3 does. SeaweedFS answers 404."""
    with Proxy(seaweedfs.endpoint) as proxy:
        for method in ("GET", "HEAD"):
            proxy.trouble(method, "", deny_missing, float("inf"))
        yield proxy.endpoint


@pytest.mark.parametrize("versions", [1, 7])
def test_follower_with_a_key_without_list_permission_follows(
    opened: Opener, s3_without_listing: str, tmp_path: Path, versions: int
) -> None:
    recorder = Recorder()
    with (
        Publisher(opened(), anchor_every=3, on_event=Recorder()) as publisher,
        Follower(opened("blind", s3_without_listing), into=tmp_path, on_event=recorder) as follower,
    ):
        for step in range(versions):
            publish(publisher, step)
        follower.start()
        until(lambda: follower.version == versions)
        for step in (versions, versions + 1):
            publish(publisher, step)
        until(lambda: follower.version == versions + 2)
        assert_holds(follower, versions + 1)
        until(lambda: follower.trouble == "")

    assert not [warning for warning in recorder.warnings if "write permission" not in warning]


def test_wrong_key_is_permission_denied_and_not_an_idle_run(
    opened: Opener, s3_without_listing: str, tmp_path: Path
) -> None:
    with Publisher(opened(), on_event=Recorder()) as publisher:
        publish(publisher, 0)
    for endpoint in (None, s3_without_listing):
        with (
            Follower(opened("nobody", endpoint), into=tmp_path, on_event=Recorder()) as follower,
            pytest.raises(PermissionDenied),
        ):
            follower.once()


# --- outages ---------------------------------------------------------------------------------------------------------


class Moody(SeaweedFS):
    """SeaweedFS with keys that change while it runs."""

    def swap_secret(self, old: str, new: str) -> None:
        config = self.root / "s3.json"
        config.write_text(config.read_text().replace(old, new))
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGHUP)


@pytest.fixture(scope="module")
def moody(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Moody]:
    server = Moody(tmp_path_factory.mktemp("moody"))
    with running(server):
        yield server


@pytest.mark.slow
def test_publisher_and_follower_recover_from_a_wrong_secret(
    moody: Moody, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Opener(moody, monkeypatch)
    events = Recorder()
    with (
        Publisher(opened(), on_event=Recorder()) as publisher,
        Follower(opened(), into=tmp_path, name="one", on_event=events) as follower,
    ):
        publish(publisher, 0)
        follower.start()
        until(lambda: follower.version == 1)

        moody.swap_secret("admin-secret", "other-secret")
        until(lambda: "SignatureDoesNotMatch" in follower.trouble)
        with pytest.raises(PermissionDenied):
            publish(publisher, 1)
        assert_holds(follower, 0)
        follower._background.call(follower._work.beat())  # as it does periodically

        moody.swap_secret("other-secret", "admin-secret")
        until(lambda: follower.trouble == "")
        assert publish(publisher, 2) == 2
        until(lambda: follower.version == 2)
        assert_holds(follower, 2)
        # Its heartbeats resume, or wait() would block forever.
        assert publisher.wait(replicas=1, timeout=60) == 2

    assert len([warning for warning in events.warnings if "SignatureDoesNotMatch" in warning]) <= 3


@pytest.mark.slow
def test_publisher_and_follower_recover_from_a_restart_of_the_server(
    moody: Moody, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Opener(moody, monkeypatch)
    with (
        Publisher(opened(), on_event=Recorder()) as publisher,
        Follower(opened(), into=tmp_path, on_event=Recorder()) as follower,
    ):
        publish(publisher, 0)
        follower.start()
        until(lambda: follower.version == 1)

        moody.kill()
        began = time.monotonic()
        publications = [publisher.publish(weights_at(SEED, step), step=step) for step in range(1, 6)]
        assert time.monotonic() - began < 30  # the trainer is not blocked
        until(lambda: follower.trouble)
        assert_holds(follower, 0)
        with pytest.raises(TimeoutError):
            publications[-1].wait(0)

        moody.start()
        newest = publications[-1].wait(60)
        until(lambda: follower.version == newest)
        assert_holds(follower, 5)
        until(lambda: follower.trouble == "")

    commits = read_commits(opened())
    assert [commit.step for commit in commits.values()][-1] == 5
    assert 3 <= len(commits) <= 4  # one commit covers all steps of the outage


@pytest.mark.slow
def test_publisher_and_follower_recover_from_a_silent_server(
    moody: Moody, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connections stay open, but nothing is answered."""
    opened = Opener(moody, monkeypatch)
    with (
        Publisher(opened(), on_event=Recorder()) as publisher,
        Follower(opened(), into=tmp_path, on_event=Recorder()) as follower,
    ):
        publish(publisher, 0)
        follower.start()
        until(lambda: follower.version == 1)
        moody.pause()
        try:
            publication = publisher.publish(weights_at(SEED, 1), step=1)
            time.sleep(2)
            assert not publication.done
        finally:
            moody.resume()
        assert publication.wait(60) == 2
        until(lambda: follower.version == 2)
        assert_holds(follower, 1)


def test_publisher_fails_if_the_server_is_unreachable(opened: Opener) -> None:
    with pytest.raises(Unavailable, match="Connection refused"):
        Publisher(opened(endpoint="http://127.0.0.1:1"), on_event=Recorder())


# --- size -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_large_anchor_is_uploaded_in_parts(seaweedfs: SeaweedFS, opened: Opener, tmp_path: Path) -> None:
    """It is larger than the memory limit, and some of its parts are lost on the way."""
    rng = np.random.default_rng(SEED)
    count = 35_000_000
    bits = rng.integers(0, 1 << 16, count, np.uint16)
    weights = {"layer": Tensor(DTYPES["BF16"], (count // 1000, 1000), bits)}
    with Proxy(seaweedfs.endpoint) as proxy:
        proxy.trouble("PUT", "partNumber=3&", lose_request, 2)
        with Publisher(opened(endpoint=proxy.endpoint), on_event=Recorder()) as publisher:
            assert publisher.publish(weights, step=0).wait(180) == 1
            bits[::1000] ^= 1
            assert publisher.publish(weights, step=1).wait(180) == 2
        assert proxy.count("PUT", "partNumber=") >= 9

    commits = read_commits(opened())
    assert commits[1].nbytes > 64 << 20
    assert commits[2].after == digest(weights).hex
    with Follower(opened(), into=tmp_path, on_event=Recorder()) as follower:
        assert follower.once() == 2
        assert bits_of(follower.checkpoint()) == bits_of(weights)
