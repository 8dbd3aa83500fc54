"""Errors of publishers: settings, weights that do not fit the run, and ranks that do not publish together."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

import weightwire
from project.provocations.case import OTHER, WEIGHTS, Case, Provocation, publish
from support.failing_bucket import Troubled, failed, in_memory
from support.rank_circle import RankCircle, at_once, at_step, on_all, shard
from weightwire import Publisher, WeightwireError
from weightwire.chain.records import RECORD_LIMITS
from weightwire.publisher import publisher as publisher_module
from weightwire.publisher.ranks import rank_process, turns
from weightwire.publisher.ranks.protocol import Meeting
from weightwire.publisher.settings import PublisherSettings
from weightwire.trainers.process_group import Ranks


def publisher(work: Callable[[Publisher], Any], **settings: Any) -> Provocation:
    def provoke(case: Case) -> None:
        with Publisher(case.run, threads=1, **settings) as one:
            work(one)

    return provoke


def closed_publisher(one: Publisher) -> None:
    one.close()
    one.publish(WEIGHTS)


def bucket_with_other_files(case: Case) -> None:
    case.file("run/notes.txt", "mine")
    publish(case)


def weights_of_another_shape(case: Case) -> None:
    publish(case)
    publish(case, {"w": np.zeros(7, np.float32), "norm": WEIGHTS["norm"]})


def missing_tensor(case: Case) -> None:
    publish(case)
    publish(case, {"w": WEIGHTS["w"], "v": WEIGHTS["norm"]})


def weights_of_another_dtype(case: Case) -> None:
    for dtype in (np.float32, np.float16):
        publish(case, {"w": np.ones(6, dtype), "v": np.ones(6, dtype)})


def unreadable_side_file(case: Case) -> None:
    publish(case, files={"config.json": case.here / "config.json"})


def closed_while_the_store_hangs(verbs: str) -> Provocation:
    """Closed once a request with one of these verbs has been sent. The store never answers it."""

    def provoke(case: Case) -> None:
        asked = threading.Event()

        async def never(act: Any) -> Any:
            asked.set()
            await asyncio.sleep(3600)

        bucket = in_memory()
        one = Publisher(bucket, threads=1)
        bucket.trouble(verbs, "", never, times=1e9)
        publication = one.publish(WEIGHTS)
        assert asked.wait(60)
        with suppress(TimeoutError):
            one.close(timeout=0.05)
        publication.wait(60)

    return provoke


def run_record_over_its_limit(case: Case) -> None:
    case.patch.setitem(RECORD_LIMITS, "run.json", 100)
    publish(case)


def commit_over_its_limit(case: Case) -> None:
    case.patch.setitem(RECORD_LIMITS, "commits/", 1000)
    with Publisher(case.run, blocking=True, threads=1) as one:
        one.publish(WEIGHTS, metrics={f"reward {number}": 0.5 for number in range(100)})


def closed_with_a_full_bucket(case: Case) -> None:
    case.patch.setattr(publisher_module, "PublisherSettings", partial(PublisherSettings, retry_seconds=0.2))
    bucket = in_memory()
    one = Publisher(bucket, threads=1)
    one.publish(WEIGHTS, step=1).wait(60)
    bucket.trouble("create", "commits/", failed, times=1e9)
    one.publish(OTHER, step=2)
    one.close()


def publisher_after_a_fork(case: Case) -> None:
    one = Publisher(case.run, threads=1)
    try:
        case.patch.setattr(os, "getpid", lambda: 1)
        one.publish(WEIGHTS)
    finally:
        case.patch.undo()
        one.close()


def failing_encoder(case: Case) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise TypeError("unexpected None")

    with Publisher(case.run, threads=1) as one:
        one.publish(WEIGHTS).wait(60)
        case.patch.setattr("weightwire.publisher.single_process.encode_version", fail)
        one.publish(OTHER).wait(60)


def wrong_encoder(case: Case) -> None:
    from weightwire import codec

    with Publisher(case.run, threads=1) as one:
        one.publish(WEIGHTS).wait(60)
        case.patch.setattr(codec, "apply", lambda *_, **__: (None, (1, 1)))
        one.publish(OTHER).wait(60)


# --- ranks -------------------------------------------------------------------------------------------------------


def ranks(work: Callable[[Publisher, int], Any], size: int = 2, raised_by: int = 0) -> Provocation:
    """Work on several ranks at once. Raises the error of one of them."""

    def provoke(case: Case) -> None:
        case.patch.setattr(turns, "LATE", 0.05)
        case.patch.setattr(rank_process, "PULSE", 600.0)  # rank 0 looks at the others only when it publishes or closes
        found: dict[int, WeightwireError] = {}

        def one(publisher: Publisher, rank: int) -> None:
            try:
                work(publisher, rank)
            except WeightwireError as problem:
                found[rank] = problem

        on_all(in_memory(), size, one)
        raise found[raised_by]

    return provoke


def missing_rows(publisher: Publisher, rank: int) -> None:
    publisher.publish(shard(at_step(0), rank, 3), step=0).wait(60)


def overlapping_rows(publisher: Publisher, rank: int) -> None:
    weights = {"w": np.zeros((6, 2))}
    publisher.publish(shard(weights, 0, 2) if rank else shard(weights, 1, 3), step=0).wait(60)


def different_shapes(publisher: Publisher, rank: int) -> None:
    publisher.publish({"w": np.zeros(3 + rank)}).wait(60)


def different_steps(publisher: Publisher, rank: int) -> None:
    publisher.publish(shard(at_step(rank), rank, 2), step=rank).wait(60)


def wait_for_an_older_version() -> Callable[[Publisher, int], None]:
    go = threading.Event()

    def work(publisher: Publisher, rank: int) -> None:
        publisher.publish(shard(at_step(0), rank, 2), step=0).wait(60)
        if rank == 0:
            go.wait(60)
        publication = publisher.publish(shard(at_step(1), rank, 2), step=1)
        if rank == 1:
            publication = publisher.publish(shard(at_step(2), rank, 2), step=2)
            go.set()
        publication.wait(60)

    return work


def rank_that_closes_early(publisher: Publisher, rank: int) -> None:
    publisher.publish(shard(at_step(0), rank, 2), step=0).wait(60)
    if rank == 0:
        publisher.publish(shard(at_step(1), rank, 2), step=1).wait(60)


def rank_that_closes_before_the_first_publish(publisher: Publisher, rank: int) -> None:
    if rank == 0:
        publisher.publish(shard(at_step(0), rank, 2), step=0).wait(60)


def rank_0_that_closes() -> Callable[[Publisher, int], None]:
    ended = threading.Event()

    def work(publisher: Publisher, rank: int) -> None:
        publisher.publish(shard(at_step(0), rank, 2), step=0).wait(60)
        if rank == 1:
            ended.wait(60)
            time.sleep(0.1)
            publisher.publish(shard(at_step(1), rank, 2), step=1).wait(60)
        else:
            publisher.close()
            ended.set()

    return work


def failure_on_one_rank(publisher: Publisher, rank: int) -> None:
    publisher.publish(shard(at_step(0), rank, 2), step=0).wait(60)
    publisher.publish({"x": "y"} if rank else shard(at_step(1), rank, 2), step=1).wait(60)


def run_started_by_another_publisher(case: Case) -> None:
    bucket = in_memory()

    async def overtaken(act: Any) -> Any:
        await act()

        def other() -> None:
            with Publisher(Troubled(bucket.inner), threads=1) as one:
                one.publish(at_step(7), step=7).wait(60)

        await asyncio.to_thread(other)

    bucket.trouble("put", "anchors/1/e1-r0", overtaken)
    found: dict[int, WeightwireError] = {}

    def work(publisher: Publisher, rank: int) -> None:
        try:
            publisher.publish(shard(at_step(0), rank, 2), step=0).wait(60)
        except WeightwireError as problem:
            found[rank] = problem

    on_all(bucket, 2, work)
    raise found[0]


def ranks_out_of_step(case: Case) -> None:
    circle = RankCircle(2)

    def one(rank: int) -> WeightwireError | None:
        async def meet() -> None:
            await Meeting(circle.seat(rank)).exchange(("turn", "share")[rank], None)

        try:
            asyncio.run(meet())
        except WeightwireError as problem:
            return problem
        return None

    found = at_once(2, one)[0]
    assert found
    raise found


def missing_process_group(case: Case) -> None:
    Ranks()


def process_group_after_leaving(case: Case) -> None:
    """A rank publishes after it has left the group."""
    with _process_group(case) as ranks:
        ranks.close()
        asyncio.run(ranks.gather(b""))


@contextmanager
def _process_group(case: Case) -> Iterator[Ranks]:
    """A group of one process."""
    dist.init_process_group("gloo", init_method=f"file://{case.here}/group", rank=0, world_size=1)
    try:
        yield Ranks()
    finally:
        dist.destroy_process_group()


# --- trainers ----------------------------------------------------------------------------------------------------


def transfer_to_an_engine_without_rollouts(case: Case) -> None:
    from weightwire.engines import registry

    kind = registry.EngineKind(connect=lambda url: None)  # type: ignore[arg-type,return-value]
    case.patch.setattr(registry, "find_engine", lambda name: kind)
    case.patch.setattr("weightwire.trainers.trl.find_engine", lambda name: kind)
    from weightwire.trainers.trl import BucketTransfer

    BucketTransfer(case.run, server="other=http://127.0.0.1:8000")


PROVOCATIONS: list[Provocation] = [
    publisher(lambda one: one.wait()),
    publisher(closed_publisher),
    publisher(lambda one: one.publish({})),
    publisher(lambda one: one.publish(WEIGHTS), base={}),
    publisher(lambda one: one.publish(WEIGHTS), files={"config.json": 7}),
    run_record_over_its_limit,
    commit_over_its_limit,
    closed_with_a_full_bucket,
    publisher(lambda one: one.publish(WEIGHTS).wait(60), files={"../config.json": b""}),
    unreadable_side_file,
    bucket_with_other_files,
    weights_of_another_shape,
    missing_tensor,
    weights_of_another_dtype,
    closed_while_the_store_hangs("put"),  # after the capture was taken
    closed_while_the_store_hangs("get find list create"),  # while the run is being opened
    publisher_after_a_fork,
    failing_encoder,
    wrong_encoder,
    ranks(missing_rows),
    ranks(lambda publisher, rank: publisher.publish({}).wait(60)),
    ranks(overlapping_rows),
    ranks(different_shapes),
    ranks(different_steps),
    ranks(wait_for_an_older_version()),
    ranks(rank_that_closes_early),
    ranks(rank_that_closes_before_the_first_publish),
    ranks(rank_0_that_closes(), raised_by=1),
    ranks(failure_on_one_rank),
    run_started_by_another_publisher,
    ranks_out_of_step,
    missing_process_group,
    process_group_after_leaving,
    transfer_to_an_engine_without_rollouts,
    lambda case: weightwire.Publisher(Path("s3:/bucket")),
]
