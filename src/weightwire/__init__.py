"""weightwire: ships a model's weight changes from a trainer to its inference servers, through a bucket.

A `Publisher` publishes versions of the weights, a `Follower` rebuilds them bit for bit. Below them, `diff` makes the
smallest exact delta between two sets of weights, `patch` applies it, and `digest` proves that two places hold the same.
Every error has a stable `code`, and `WeightwireError` is the root of all.
"""

from weightwire.bucket import Bucket, ObjectInfo, open_bucket
from weightwire.delta import Delta, State, anchor, diff, digest, patch
from weightwire.errors import (
    AlreadyExists,
    BrokenChain,
    BucketError,
    CannotListen,
    CheckpointError,
    Closed,
    CorruptDelta,
    DataGone,
    EngineError,
    EngineGone,
    Fenced,
    ForeignRun,
    Interrupted,
    NoBucket,
    NoRun,
    NotFound,
    OutputError,
    PermissionDenied,
    ProcessFailed,
    RankFailed,
    ReplicaError,
    RunError,
    SchemaChanged,
    Truncated,
    Unavailable,
    UnsafeBucket,
    UnsupportedFormat,
    WeightwireError,
    WrongBase,
)
from weightwire.follower import Follower, Update
from weightwire.publisher import Publication, Publisher
from weightwire.telemetry import Event
from weightwire.weights import Tensor

__all__ = [
    "AlreadyExists",
    "BrokenChain",
    "Bucket",
    "BucketError",
    "CannotListen",
    "CheckpointError",
    "Closed",
    "CorruptDelta",
    "DataGone",
    "Delta",
    "EngineError",
    "EngineGone",
    "Event",
    "Fenced",
    "Follower",
    "ForeignRun",
    "Interrupted",
    "NoBucket",
    "NoRun",
    "NotFound",
    "ObjectInfo",
    "OutputError",
    "PermissionDenied",
    "ProcessFailed",
    "Publication",
    "Publisher",
    "RankFailed",
    "ReplicaError",
    "RunError",
    "SchemaChanged",
    "State",
    "Tensor",
    "Truncated",
    "Unavailable",
    "UnsafeBucket",
    "UnsupportedFormat",
    "Update",
    "WeightwireError",
    "WrongBase",
    "anchor",
    "diff",
    "digest",
    "open_bucket",
    "patch",
]

__version__ = "0.1.0"
