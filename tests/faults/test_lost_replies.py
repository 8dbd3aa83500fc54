"""Lost requests and replies: a publisher finds out which requests succeeded, and publishes each version once."""

from __future__ import annotations

import importlib
import itertools
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from faults.actors import bits_at, weights_at
from faults.kills import wait_for
from faults.promises import read_commits
from faults.proxy import Proxy, Reply, Send, Trouble, late, lose_reply, lose_request
from support.small_run import bits_of
from support.stores import SeaweedFS, environment, use
from weightwire import digest
from weightwire.bucket.bucket import Bucket
from weightwire.bucket.registry import open_bucket
from weightwire.errors import Fenced, Unavailable
from weightwire.follower.follower import Follower
from weightwire.publisher.publisher import Publisher
from weightwire.telemetry.events import Event

SEED = 3
fresh = itertools.count()


@pytest.fixture
def proxy(seaweedfs: SeaweedFS) -> Iterator[Proxy]:
    with Proxy(seaweedfs.endpoint) as proxy:
        yield proxy


@pytest.fixture(autouse=True)
def without_probe_race(monkeypatch: pytest.MonkeyPatch) -> None:
    """Probes the store without a race, because SeaweedFS makes the losers wait for seconds."""
    monkeypatch.setattr(importlib.import_module("weightwire.bucket.probe"), "_RACERS", 1)


@pytest.fixture
def direct(seaweedfs: SeaweedFS, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    use(monkeypatch, seaweedfs.env)
    return open_bucket(seaweedfs.url(f"lost-replies-{next(fresh)}"))


@pytest.fixture
def proxied(direct: Bucket, proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """The same bucket, through the proxy."""
    use(monkeypatch, environment(proxy.endpoint, "admin-key", "admin-secret"))
    return open_bucket(direct.url)


class EventLog:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def __call__(self, event: Event) -> None:
        self.events.append(event)

    @property
    def warnings(self) -> list[str]:
        return [event.message for event in self.events if event.stage == "warning"]


class Held:
    """Holds requests until it may go on."""

    def __init__(self, then: Trouble) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()
        self._then = then

    def __call__(self, send: Send) -> Reply | None:
        self.reached.set()
        self.go_on.wait(120)
        return self._then(send)


def publish(publisher: Publisher, step: int) -> int:
    return publisher.publish(weights_at(SEED, step), step=step).wait(120)


def assert_published(bucket: Bucket, steps: list[int | None], into: Path) -> None:
    """Checks that exactly these steps were published with their states, and that a follower gets the bits."""
    commits = read_commits(bucket)
    assert [commit.step for commit in commits.values()] == steps
    for commit in commits.values():
        if commit.step is not None:
            assert commit.after == digest(weights_at(SEED, commit.step)).hex
    with Follower(bucket, into=into, on_event=EventLog()) as follower:
        assert follower.once() == len(steps) - 1
        newest = [step for step in steps if step is not None][-1]
        assert bits_of(follower.checkpoint()) == bits_at(SEED, newest)


@pytest.mark.parametrize("times", [1, pytest.param(6, marks=pytest.mark.slow)], ids=lambda times: f"{times} times")
@pytest.mark.parametrize("trouble", [lose_reply, lose_request, late(0.3)], ids=["reply", "request", "late"])
def test_a_lost_commit_is_published_once(
    direct: Bucket, proxied: Bucket, proxy: Proxy, tmp_path: Path, trouble: Trouble, times: int
) -> None:
    with Publisher(proxied, on_event=EventLog()) as publisher:
        assert publish(publisher, 0) == 1

        proxy.trouble("PUT", "/commits/", trouble, times)
        assert publish(publisher, 1) == 2
        assert publish(publisher, 2) == 3

    assert proxy.count("PUT", r"/commits/0*2\.json", 200) == 1
    assert_published(direct, [None, 0, 1, 2], tmp_path)


@pytest.mark.slow
def test_a_lost_commit_is_published_once_even_if_its_check_is_lost(
    direct: Bucket, proxied: Bucket, proxy: Proxy, tmp_path: Path
) -> None:
    with Publisher(proxied, on_event=EventLog()) as publisher:
        publish(publisher, 0)
        proxy.trouble("PUT", "/commits/", lose_reply, 5)
        proxy.trouble("GET", "/commits/", lose_reply, 5)
        assert publish(publisher, 1) == 2

    assert_published(direct, [None, 0, 1], tmp_path)


@pytest.mark.parametrize("what", ["run.json", "/epochs/", "/commits/", "/probe/"])
def test_a_lost_reply_at_the_start_is_recovered(
    direct: Bucket, proxied: Bucket, proxy: Proxy, tmp_path: Path, what: str
) -> None:
    proxy.trouble("PUT", what, lose_reply, 1)
    with Publisher(proxied, on_event=EventLog()) as publisher:
        assert publish(publisher, 0) == 1

    assert proxy.count("PUT", what, 412) > 0  # it sent the request again
    assert_published(direct, [None, 0], tmp_path)


@pytest.mark.slow
def test_a_lost_delta_is_sent_again(direct: Bucket, proxied: Bucket, proxy: Proxy, tmp_path: Path) -> None:
    with Publisher(proxied, on_event=EventLog()) as publisher:
        publish(publisher, 0)
        proxy.trouble("PUT", "/deltas/", lose_request, 6)
        assert publish(publisher, 1) == 2

    assert_published(direct, [None, 0, 1], tmp_path)


@pytest.mark.slow
def test_a_failed_upload_is_part_of_the_next_version(
    direct: Bucket, proxied: Bucket, proxy: Proxy, tmp_path: Path
) -> None:
    """A newer version waits, so the older one is not retried forever."""
    with Publisher(proxied, on_event=EventLog()) as publisher:
        publish(publisher, 0)
        losing = Held(lose_request)
        losing.go_on.set()
        proxy.trouble("PUT", "/deltas/2/", losing, float("inf"))
        first = publisher.publish(weights_at(SEED, 1), step=1)
        assert losing.reached.wait(60)
        second = publisher.publish(weights_at(SEED, 2), step=2)
        with pytest.raises(Unavailable):
            first.wait(120)
        proxy.calm()
        assert second.wait(120) == 2

    assert_published(direct, [None, 0, 2], tmp_path)


def test_a_publisher_replaced_after_a_lost_request_is_fenced(
    direct: Bucket, proxied: Bucket, proxy: Proxy, tmp_path: Path
) -> None:
    """Another publisher takes over during the retries. The lost version is not published, and raises Fenced."""
    log = EventLog()
    with Publisher(proxied, on_event=log) as publisher:
        publish(publisher, 0)
        proxy.trouble("PUT", "/commits/", lose_request, float("inf"))
        lost = publisher.publish(weights_at(SEED, 1), step=1)
        wait_for(lambda: any("trying again" in warning for warning in log.warnings), "trouble")
        assert not lost.done
        with Publisher(direct, on_event=EventLog()) as successor:
            assert publish(successor, 2) == 3
        proxy.calm()
        with pytest.raises(Fenced, match="another publisher"):
            lost.wait(120)

    assert_published(direct, [None, 0, None, 2], tmp_path)


@pytest.mark.slow
def test_a_publisher_replaced_after_a_lost_reply_gets_its_version_before_the_fence(
    direct: Bucket, proxied: Bucket, proxy: Proxy, tmp_path: Path
) -> None:
    """The version was published before the takeover. The next version raises Fenced."""
    log = EventLog()
    with Publisher(proxied, on_event=log) as publisher:
        publish(publisher, 0)
        proxy.trouble("PUT", "/commits/", lose_reply, float("inf"))
        proxy.trouble("GET", "/commits/", lose_request, float("inf"))
        lost = publisher.publish(weights_at(SEED, 1), step=1)
        wait_for(lambda: any("trying again" in warning for warning in log.warnings), "trouble")
        assert not lost.done
        with Publisher(direct, on_event=EventLog()) as successor:
            assert publish(successor, 2) == 4
        proxy.calm()
        assert lost.wait(120) == 2
        with pytest.raises(Fenced):
            publish(publisher, 3)

    assert_published(direct, [None, 0, 1, None, 2], tmp_path)


@pytest.mark.slow
def test_a_slow_store_costs_no_trainer_time(direct: Bucket, proxied: Bucket, proxy: Proxy, tmp_path: Path) -> None:
    with Publisher(proxied, on_event=EventLog()) as publisher:
        publish(publisher, 0)
        held = Held(lambda send: send())
        proxy.trouble("PUT", "/commits/", held, float("inf"))
        first = publisher.publish(weights_at(SEED, 1), step=1)
        assert held.reached.wait(60)
        for step in (2, 3):  # these return, although the store does not answer
            last = publisher.publish(weights_at(SEED, step), step=step)
        assert not first.done
        held.go_on.set()
        last.wait(120)

    assert_published(direct, [None, 0, 1, 3], tmp_path)


@pytest.mark.slow
def test_a_follower_survives_lost_replies(direct: Bucket, proxied: Bucket, proxy: Proxy, tmp_path: Path) -> None:
    with Publisher(direct, on_event=EventLog()) as publisher:
        publish(publisher, 0)
        for method, path in (("GET", "/commits/"), ("GET", "/anchors/"), ("GET", "run.json")):
            proxy.trouble(method, path, lose_reply, 2)
        with Follower(proxied, into=tmp_path, on_event=EventLog()) as follower:
            watching = follower.watch()
            assert next(watching).version == 1
            for step in (1, 2, 3):
                proxy.trouble("GET", "/(commits|deltas)/", lose_reply, 2)
                version = publish(publisher, step)
                assert next(update for update in watching if update.version == version).step == step
            assert bits_of(follower.checkpoint()) == bits_at(SEED, 3)


@pytest.mark.slow
def test_a_follower_survives_an_outage(direct: Bucket, proxied: Bucket, proxy: Proxy, tmp_path: Path) -> None:
    log = EventLog()
    with (
        Publisher(direct, on_event=EventLog()) as publisher,
        Follower(proxied, into=tmp_path, on_event=log) as follower,
    ):
        publish(publisher, 0)
        follower.start()
        wait_for(lambda: follower.version == 1, "the first version")
        proxy.trouble("GET", "", lose_request, float("inf"))
        publish(publisher, 1)
        wait_for(lambda: follower.trouble, "the follower to notice")
        proxy.calm()
        wait_for(lambda: follower.version == 2 and not follower.trouble, "the follower to continue")
        assert bits_of(follower.checkpoint()) == bits_at(SEED, 1)
    # Once for all retries. On a busy machine the store may also be reported as slow.
    assert len([warning for warning in log.warnings if "has not answered for" not in warning]) == 1
