"""The tested programs, put together for a simulation: the only place that constructs a publisher or a follower."""

from __future__ import annotations

from faults.simulated_runtime import Process, SimRuntime
from faults.simulated_store import SimBucket, Store
from weightwire.chain.writer import Signer
from weightwire.follower.follow_context import FollowContext
from weightwire.follower.follow_loop import FollowLoop
from weightwire.follower.trust_settings import TrustSettings
from weightwire.publisher.publish_context import PublishContext
from weightwire.publisher.publish_loop import PublishLoop
from weightwire.publisher.settings import PublisherSettings
from weightwire.publisher.single_process import SingleProcess
from weightwire.replica.replica import Replica
from weightwire.telemetry.events import Listener
from weightwire.upkeep.gc import Sweep, sweep
from weightwire.upkeep.key_change import change_keys
from weightwire.upkeep.retention import Retention

SIDE_FILES = {"config.json": b'{"layers": 1}', "tokens/vocabulary.txt": b"a\nb\n"}


def publisher(store: Store, process: Process, settings: PublisherSettings, listen: Listener) -> PublishLoop:
    context = PublishContext(SimBucket(store, process), SimRuntime(process), settings, listen)
    return PublishLoop(context, SingleProcess(context))


def follower(bucket: SimBucket, replica: Replica, listen: Listener, trust: TrustSettings) -> FollowLoop:
    process = bucket.process
    bucket.poll_interval = 1.5  # fast enough here, and idle followers cost less
    context = FollowContext(bucket, SimRuntime(process), replica, listen, threads=1, trust=trust)
    return FollowLoop(context, process.name)


async def swept(store: Store, process: Process, retention: Retention) -> Sweep:
    return await sweep(SimBucket(store, process), SimRuntime(process), retention)


async def rekeyed(
    store: Store, process: Process, signer: Signer, add: frozenset[str], revoke: frozenset[str]
) -> int | None:
    return await change_keys(SimBucket(store, process), SimRuntime(process), signer, add, revoke, lambda message: None)
