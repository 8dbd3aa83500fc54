"""What commands on a run write with `--json`, one type per command. See `json_output` for the rules of names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Meta
from msgspec.structs import asdict

from weightwire.chain import ANCHOR, BASE, Commit, PublicKey, StageTiming
from weightwire.cli.shared.json_output import Changed, JsonOutput, Seconds, WeightCount, WeightsBytes
from weightwire.inspection import ReplicaStatus, RunHistory, RunStatus, Verification, VersionStatus
from weightwire.upkeep import Removal, Sweep

__all__ = [
    "DemoOutput",
    "FollowOutput",
    "GcOutput",
    "LogOutput",
    "PublishOutput",
    "RestoreOutput",
    "RewardOutput",
    "StatusOutput",
    "VerifyOutput",
    "VersionOutput",
]

RunUrl = Annotated[str, Meta(description="URL of the run")]
RunId = Annotated[str, Meta(description="id of the run")]
VersionState = Annotated[str | None, Meta(description="digest of all weights; null before the first weights")]
VersionMetrics = Annotated[
    dict[str, float | None], Meta(description="the trainer's metrics; null for NaN and infinity")
]


# --- versions ----------------------------------------------------------------------------------------------------


class StageOutput(JsonOutput, frozen=True, kw_only=True):
    seconds: Annotated[float, Meta(description="how long the stage took")]
    bytes: Annotated[int, Meta(description="bytes that went through it")]
    time: Annotated[float | None, Meta(description="when it ended")]

    @classmethod
    def of(cls, stage: StageTiming) -> StageOutput:
        return cls(seconds=stage.seconds, bytes=stage.bytes, time=stage.at or None)


Stages = Annotated[dict[str, StageOutput], Meta(description="timings by stage, such as `encode` and `upload`")]


def _stages(stages: Mapping[str, StageTiming]) -> dict[str, StageOutput]:
    return {name: StageOutput.of(stage) for name, stage in stages.items()}


class _AnyVersion(JsonOutput, frozen=True, kw_only=True):
    version: Annotated[int, Meta(description="number of the version")]
    step: Annotated[int | None, Meta(description="the trainer's step; null if it gave none")]
    state: VersionState
    time: Annotated[float, Meta(description="commit time by the publisher's clock")]
    metrics: VersionMetrics


class VersionOutput(_AnyVersion, frozen=True, kw_only=True):
    kind: Annotated[
        str, Meta(pattern="^(fence|base|anchor|delta)$", description="`fence`, `base`, `anchor` or `delta`")
    ]
    epoch: Annotated[int, Meta(description="epoch of its publisher")]
    bytes: Annotated[int, Meta(description="size of its data in the bucket")]
    changed: Changed
    anchor_bytes: Annotated[int | None, Meta(description="size of the anchor beside it; null if there is none")]
    stages: Stages

    @classmethod
    def of(cls, version: VersionStatus) -> VersionOutput:
        return cls(
            version=version.version,
            step=version.step,
            state=version.state or None,
            time=version.time,
            metrics=version.metrics,
            kind=version.kind,
            epoch=version.epoch,
            bytes=version.nbytes,
            changed=None if version.kind in (ANCHOR, BASE) else version.changed,
            anchor_bytes=version.anchor_bytes,
            stages=_stages(version.stages),
        )


class PublishOutput(VersionOutput, frozen=True, kw_only=True):
    """One document; with `--watch`, one line per version."""

    url: RunUrl
    run: RunId
    published: Annotated[bool, Meta(description="false if these weights already were the newest version")]
    checkpoint: Annotated[str, Meta(description="path of the published checkpoint")]
    weights: WeightCount
    weights_bytes: WeightsBytes
    seconds: Seconds

    @classmethod
    def of_commit(cls, commit: Commit, anchor_bytes: int | None, **fields: Any) -> PublishOutput:
        """`fields` are those that a commit does not have."""
        version = VersionOutput.of(VersionStatus.of(commit, anchor_bytes))
        return cls(**asdict(version), run=commit.run, **fields)


class RestoreOutput(_AnyVersion, frozen=True, kw_only=True):
    url: RunUrl
    run: RunId
    bytes: Annotated[int, Meta(description="bytes fetched")]
    weights: WeightCount
    weights_bytes: WeightsBytes
    checkpoint: Annotated[str | None, Meta(description="path of a checkpoint of this version")]
    seconds: Seconds


class FollowOutput(RestoreOutput, frozen=True, kw_only=True):
    """With `--once` one document, otherwise one line per version. `checkpoint` is null while DIR/current is older.

    `seconds` is counted from the moment when the follower starts to catch up.
    """

    behind_seconds: Annotated[float | None, Meta(description="time since the commit; null if nothing was fetched")]
    served_version: Annotated[
        int | None, Meta(description="lowest version that its engines serve; null if one serves none or it has none")
    ]
    pause_seconds: Annotated[dict[str, float], Meta(description="by engine: how long it paused for the update")]


class LogOutput(JsonOutput, frozen=True, kw_only=True):
    url: RunUrl
    run: RunId
    versions: Annotated[list[VersionOutput], Meta(description="the newest first")]

    @classmethod
    def of(cls, history: RunHistory) -> LogOutput:
        return cls(url=history.url, run=history.run, versions=[VersionOutput.of(one) for one in history.versions])


# --- status ------------------------------------------------------------------------------------------------------


class PublisherOutput(JsonOutput, frozen=True, kw_only=True):
    epoch: Annotated[int, Meta(description="the newest epoch")]
    host: Annotated[str | None, Meta(description="host of the publisher")]
    time: Annotated[float, Meta(description="when it claimed the run")]


class DeltasOutput(JsonOutput, frozen=True, kw_only=True):
    count: Annotated[int, Meta(description="newest deltas that the averages are taken over")]
    average_bytes: Annotated[float | None, Meta(description="average size of a delta")]
    ratio: Annotated[float | None, Meta(description="how many times smaller that is than all weights")]


class AnchorOutput(JsonOutput, frozen=True, kw_only=True):
    version: Annotated[int, Meta(description="number of the version")]
    bytes: Annotated[int, Meta(description="size of the anchor")]


class ReplicaOutput(JsonOutput, frozen=True, kw_only=True):
    name: Annotated[str, Meta(description="name of the replica")]
    host: Annotated[str | None, Meta(description="host of the follower")]
    version: Annotated[int | None, Meta(description="version held; null before the first")]
    served_version: Annotated[
        int | None, Meta(description="lowest version that its engines serve; null if they serve none or it has none")
    ]
    behind: Annotated[int | None, Meta(description="versions behind the newest; null if it holds none")]
    seen_seconds: Annotated[float, Meta(description="time since its last heartbeat")]
    alive: Annotated[
        bool, Meta(description="its last heartbeat is less than a lease (60 s) old, and it was not stopped")
    ]
    stopped: Annotated[bool, Meta(description="it was stopped on purpose")]
    trouble: Annotated[str | None, Meta(description="what keeps it from following")]
    stages: Stages

    @classmethod
    def of(cls, replica: ReplicaStatus) -> ReplicaOutput:
        version = _version(replica.version)
        return cls(
            name=replica.name,
            host=replica.host or None,
            version=version,
            served_version=_version(replica.served),
            behind=None if version is None else replica.behind,
            seen_seconds=replica.seen,
            alive=replica.alive,
            stopped=replica.stopped,
            trouble=replica.trouble or None,
            stages=_stages(replica.stages),
        )


class RunSizeOutput(JsonOutput, frozen=True, kw_only=True):
    url: RunUrl
    run: RunId
    mode: Annotated[str, Meta(description="`strict`, or `single-writer` where nothing stops a second publisher")]
    time: Annotated[float, Meta(description="when the run was started")]
    tensors: Annotated[int, Meta(description="number of tensors")]
    weights: WeightCount
    weights_bytes: WeightsBytes


class StatusOutput(RunSizeOutput, frozen=True, kw_only=True):
    publisher: Annotated[PublisherOutput | None, Meta(description="the publisher that claimed the run last")]
    newest: Annotated[VersionOutput | None, Meta(description="the newest version; null before the first")]
    age_seconds: Annotated[float | None, Meta(description="time since the newest version was committed")]
    deltas: Annotated[DeltasOutput, Meta(description="sizes of recent deltas")]
    anchor: Annotated[AnchorOutput | None, Meta(description="the newest anchor")]
    below_version: Annotated[
        int | None, Meta(description="`gc` has deleted the data below this version; null if it has deleted nothing")
    ]
    keys: Annotated[list[str], Meta(description="public keys that may sign; empty if the run is not signed")]
    replicas: Annotated[list[ReplicaOutput], Meta(description="all that have written a heartbeat")]

    @classmethod
    def of(cls, status: RunStatus) -> StatusOutput:
        claim, anchor = status.publisher, status.anchor
        return cls(
            url=status.url,
            run=status.run,
            mode=status.rights.mode,
            time=status.started,
            tensors=status.weights.tensors,
            weights=status.weights.parameters,
            weights_bytes=status.weights.nbytes,
            publisher=None
            if claim is None
            else PublisherOutput(epoch=claim.epoch, host=claim.host or None, time=claim.time),
            newest=None if status.head is None else VersionOutput.of(status.head),
            age_seconds=status.age,
            deltas=DeltasOutput(
                count=status.deltas.recent, average_bytes=status.deltas.average, ratio=status.deltas.ratio
            ),
            anchor=None if anchor is None else AnchorOutput(version=anchor.version, bytes=anchor.nbytes),
            below_version=status.below or None,
            keys=[str(PublicKey(key)) for key in status.rights.keys],
            replicas=[ReplicaOutput.of(one) for one in status.replicas],
        )


def _version(number: int | None) -> int | None:
    return None if number is None or number < 0 else number


# --- keys --------------------------------------------------------------------------------------------------------


class KeyOutput(JsonOutput, frozen=True, kw_only=True):
    key: Annotated[str, Meta(description="the public key")]


class KeysOutput(JsonOutput, frozen=True, kw_only=True):
    url: RunUrl
    keys: Annotated[list[str], Meta(description="public keys that may sign; empty if the run is not signed")]


# --- upkeep ------------------------------------------------------------------------------------------------------


class RemovalOutput(JsonOutput, frozen=True, kw_only=True):
    path: Annotated[str, Meta(description="path of the object in the bucket")]
    bytes: Annotated[int, Meta(description="its size")]
    why: Annotated[str, Meta(description="why it is not needed")]
    time: Annotated[float | None, Meta(description="in `waiting`: from when on `gc` may delete it; null in `removed`")]

    @classmethod
    def of(cls, removal: Removal) -> RemovalOutput:
        return cls(path=removal.path, bytes=removal.size, why=removal.why, time=removal.due)


class LimitOutput(JsonOutput, frozen=True, kw_only=True):
    version: Annotated[int, Meta(description="data from this version on is kept")]
    why: Annotated[str, Meta(description="what needs it")]


class LeaseOutput(JsonOutput, frozen=True, kw_only=True):
    name: Annotated[str, Meta(description="name of the replica")]
    version: Annotated[int | None, Meta(description="version that it holds")]
    time: Annotated[
        float, Meta(description="when its lease ends unless it writes another heartbeat, by the store's clock")
    ]


class DamageOutput(JsonOutput, frozen=True, kw_only=True):
    path: Annotated[str, Meta(description="path in the bucket")]
    message: Annotated[str, Meta(description="what is wrong")]


class SweptRun(JsonOutput, frozen=True, kw_only=True):
    url: RunUrl
    run: RunId
    dry_run: Annotated[bool, Meta(description="nothing was deleted, only listed")]
    version: Annotated[int | None, Meta(description="the newest version")]


class GcOutput(SweptRun, frozen=True, kw_only=True):
    below_version: Annotated[int, Meta(description="`gc` may delete data below this version")]
    limits: Annotated[list[LimitOutput], Meta(description="what keeps it from being higher, the lowest first")]
    anchor_versions: Annotated[list[int], Meta(description="anchors that are kept")]
    leases: Annotated[list[LeaseOutput], Meta(description="replicas that are alive")]
    removed: Annotated[list[RemovalOutput], Meta(description="deleted, or would be in a dry run")]
    waiting: Annotated[list[RemovalOutput], Meta(description="announced: a later `gc` deletes them")]
    damaged: Annotated[list[DamageOutput], Meta(description="anchors that were read and do not count")]
    bytes: Annotated[int, Meta(description="total size of `removed`")]
    time: Annotated[float, Meta(description="now, by the store's clock")]

    @classmethod
    def of(cls, url: str, sweep: Sweep) -> GcOutput:
        return cls(
            url=url,
            run=sweep.run,
            dry_run=sweep.dry_run,
            version=_version(sweep.head),
            below_version=sweep.below,
            limits=[LimitOutput(version=one.version, why=one.why) for one in sweep.limits],
            anchor_versions=list(sweep.anchors),
            leases=[LeaseOutput(name=one.name, version=_version(one.version), time=one.until) for one in sweep.leases],
            removed=[RemovalOutput.of(one) for one in sweep.removed],
            waiting=[RemovalOutput.of(one) for one in sweep.waiting],
            damaged=[DamageOutput(path=one.path, message=one.why) for one in sweep.damaged],
            bytes=sweep.nbytes,
            time=sweep.now,
        )


class ProblemOutput(JsonOutput, frozen=True, kw_only=True):
    version: Annotated[int | None, Meta(description="version that it belongs to")]
    path: Annotated[str, Meta(description="path in the bucket")]
    message: Annotated[str, Meta(description="what is wrong")]


class VersionRange(JsonOutput, frozen=True, kw_only=True):
    first_version: Annotated[int, Meta(description="first version of the range")]
    last_version: Annotated[int, Meta(description="last version of the range")]


class RebuildOutput(JsonOutput, frozen=True, kw_only=True):
    versions: Annotated[list[VersionRange], Meta(description="versions whose weights were rebuilt")]
    compared_anchors: Annotated[int, Meta(description="anchors equal to the rebuilt weights")]

    @classmethod
    def of(cls, found: Verification) -> RebuildOutput:
        ranges = [VersionRange(first_version=first, last_version=last) for first, last in found.rebuilt]
        return cls(versions=ranges, compared_anchors=found.compared)


class VerifyOutput(JsonOutput, frozen=True, kw_only=True):
    """Written with exit code 1 as well, if there are problems."""

    url: RunUrl
    run: RunId
    version: Annotated[int | None, Meta(description="the newest version")]
    whole_version: Annotated[int | None, Meta(description="the chain is complete up to this version")]
    files: Annotated[int, Meta(description="data files whose bytes are as published")]
    bytes: Annotated[int, Meta(description="total size of `files`")]
    deleted_files: Annotated[int, Meta(description="data files that `gc` has deleted")]
    below_version: Annotated[int | None, Meta(description="`gc` may delete data below this version; null if none")]
    rebuild: Annotated[RebuildOutput | None, Meta(description="what `--rebuild` found; null without it")]
    signatures: Annotated[str, Meta(description="`checked`; `unchecked` without `--trust`; `none` if not signed")]
    problems: Annotated[list[ProblemOutput], Meta(description="everything that is wrong")]
    ok: Annotated[bool, Meta(description="whether there are no problems")]

    @classmethod
    def of(cls, url: str, found: Verification, *, rebuild: bool, trusted: bool) -> VerifyOutput:
        return cls(
            url=url,
            run=found.run,
            version=_version(found.head),
            whole_version=_version(found.whole),
            files=found.files,
            bytes=found.nbytes,
            deleted_files=found.gone,
            below_version=found.below or None,
            rebuild=RebuildOutput.of(found) if rebuild else None,
            signatures="checked" if trusted else "unchecked" if found.signed else "none",
            problems=[ProblemOutput(version=one.version, path=one.path, message=one.what) for one in found.problems],
            ok=found.fine,
        )


class RewardOutput(JsonOutput, frozen=True, kw_only=True):
    first: Annotated[float, Meta(description="mean reward of the first fifth of the steps")]
    last: Annotated[float, Meta(description="mean reward of the last fifth")]


class DemoOutput(JsonOutput, frozen=True, kw_only=True):
    url: RunUrl
    version: Annotated[int, Meta(description="the newest version")]
    state: Annotated[str, Meta(description="digest that all holders have in common")]
    holders: Annotated[list[str], Meta(description="the trainer and the replicas whose bits were compared")]
    bytes: Annotated[int, Meta(description="bytes that a replica fetches if it follows from the start")]
    anchor_bytes: Annotated[int, Meta(description="size of the anchors beside them, for late joiners")]
    full_bytes: Annotated[int, Meta(description="what sending all weights for each version would take")]
    changed_fraction: Annotated[float | None, Meta(description="share of the weights that a step changes, on average")]
    reward: Annotated[RewardOutput | None, Meta(description="null if there were fewer than five steps")]
    pause_seconds: Annotated[dict[str, float | None], Meta(description="by replica: its last pause for an update")]
    seconds: Seconds
    page: Annotated[str, Meta(description="path of the exported page")]
