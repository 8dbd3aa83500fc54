"""Closing a publisher whose bucket accepts no writes."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from support.failing_bucket import Act, Troubled, slow
from support.run_contents import version_in
from support.small_weights import initial, train
from support.special_files import in_time
from weightwire import digest
from weightwire.errors import NotPublished, Unavailable
from weightwire.publisher import publisher
from weightwire.publisher.publisher import Publisher
from weightwire.publisher.settings import PublisherSettings


async def full(act: Act) -> Any:
    raise Unavailable("no space left")


class TestCloseOnABucketThatAcceptsNothing:
    """A full bucket, for example. `patience` stands for five minutes."""

    def open(self, bucket: Troubled, monkeypatch: pytest.MonkeyPatch, patience: float = 0.3) -> Publisher:
        monkeypatch.setattr(publisher, "_LOOK", 0.05)
        monkeypatch.setattr(publisher, "PublisherSettings", partial(PublisherSettings, retry_seconds=patience))
        return Publisher(bucket, on_event=lambda event: None)

    def test_close_gives_up_and_names_what_was_not_published(
        self, bucket: Troubled, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        opened = self.open(bucket, monkeypatch)
        opened.publish(initial(), step=1).wait()
        bucket.trouble("create", "commits/", full, times=1e9)
        weights = initial()
        train(weights)
        handle = opened.publish(weights, step=2)
        found = in_time(opened.close)
        assert isinstance(found, NotPublished)
        assert found.message == "step 2: not published before the publisher was closed (no space left)"
        assert found.hint
        with pytest.raises(NotPublished):
            handle.wait(60)

        bucket.calm()  # the next publisher continues
        with Publisher(bucket, on_event=lambda event: None) as again:
            again.publish(weights, step=2)
        assert version_in(bucket) == digest(weights)

    def test_close_gives_up_on_the_first_commit_of_a_run(
        self, bucket: Troubled, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        opened = self.open(bucket, monkeypatch)
        bucket.trouble("create", "commits/00000000000000000001", full, times=1e9)
        opened.publish(initial(), step=1)
        assert isinstance(in_time(opened.close), NotPublished)

    def test_close_waits_for_a_bucket_that_is_only_slow(
        self, bucket: Troubled, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        opened = self.open(bucket, monkeypatch)
        bucket.trouble("put", "anchors/", slow(1.5))
        opened.publish(initial(), step=1)
        assert in_time(opened.close) is None
        assert version_in(bucket) == digest(initial())

    def test_close_waits_for_a_bucket_that_works_again(self, bucket: Troubled, monkeypatch: pytest.MonkeyPatch) -> None:
        opened = self.open(bucket, monkeypatch, patience=300)
        bucket.trouble("create", "commits/", full, times=3)
        opened.publish(initial(), step=1)
        assert in_time(opened.close) is None
        assert version_in(bucket) == digest(initial())
