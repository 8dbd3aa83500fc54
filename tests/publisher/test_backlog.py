"""Versions that wait for a slow bucket are counted in the publisher's warnings."""

from __future__ import annotations

import asyncio

import pytest

from support.failing_bucket import failed
from support.publish_scene import HeldRequests, LoopTrainer, over, play, until
from weightwire.publisher.backlog import Backlog
from weightwire.publisher.publication import Publication


@pytest.fixture(autouse=True)
def patient() -> None:
    """Time is virtual here."""


def test_backlog_counts_waiting_and_superseded_publications() -> None:
    backlog = Backlog()
    assert str(backlog) == ""
    first, second, third = Publication(), Publication(), Publication()
    backlog.add(first)
    assert str(backlog) == "1 version waits"
    backlog.add(second)
    assert str(backlog) == "2 versions wait"
    second.supersede(third)
    assert str(backlog) == "1 version waits, 1 superseded"
    backlog.add(third)
    assert str(backlog) == "2 versions wait, 1 superseded"
    first.supersede(third)  # stands for any end
    backlog.commit()
    assert str(backlog) == "1 version waits"


def test_backlog_is_empty_if_nothing_waits() -> None:
    backlog, first, second = Backlog(), Publication(), Publication()
    backlog.add(first)
    first.supersede(second)
    assert str(backlog) == ""  # the newer one has not been added yet


def test_a_publisher_reports_a_silent_store_and_its_backlog() -> None:
    async def scene(trainer: LoopTrainer) -> None:
        held = HeldRequests()
        trainer.bucket.trouble("put", "deltas/", held)
        first = trainer.publish()
        await until(lambda: bool(trainer.warnings))
        for _ in range(3):
            trainer.publish()
            await asyncio.sleep(1)
        held.set()
        await over(first)

    trainer = play(scene)
    url = trainer.bucket.url
    assert trainer.warnings == [f"{url} has not answered for 5 s (1 version waits); still waiting"]
    recovered = [event.message for event in trainer.heard if event.stage == "recovered"]
    assert len(recovered) == 1
    assert recovered[0].startswith(f"{url} answers again after ")
    assert recovered[0].endswith(" s (2 versions wait, 2 superseded)")


def test_a_retry_warning_counts_waiting_versions() -> None:
    async def scene(trainer: LoopTrainer) -> None:
        trainer.bucket.trouble("put", "deltas/", failed)
        await over(trainer.publish())

    assert play(scene).warnings == ["the request failed (1 version waits); trying again"]
