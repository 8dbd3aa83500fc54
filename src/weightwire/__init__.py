"""weightwire: ships a model's weight changes from a trainer to its inference servers, through a bucket.

A `Publisher` publishes versions of the weights, and a `Follower` rebuilds them bit for bit. `diff` makes the smallest
exact delta between two sets of weights, `patch` applies it, and `digest` proves that two places hold the same weights.
Every error is a `WeightwireError` with a stable `code`.
"""

from typing import TYPE_CHECKING

from weightwire.errors import (
    AlreadyExists,
    BadKey,
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
    MissingDependency,
    NoBucket,
    NoRun,
    NotFound,
    NotPublished,
    OutOfMemory,
    OutputError,
    PermissionDenied,
    ProcessFailed,
    RankFailed,
    ReplicaError,
    RunError,
    SchemaChanged,
    Stale,
    TooLarge,
    Truncated,
    Unavailable,
    UnsafeBucket,
    UnsupportedFormat,
    Untrusted,
    WeightwireError,
    WrongBase,
)
from weightwire.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from weightwire.bucket import Bucket, ObjectInfo, open_bucket
    from weightwire.delta import Delta, State, anchor, diff, digest, patch
    from weightwire.follower import Follower, Update
    from weightwire.publisher import Publication, Publisher
    from weightwire.telemetry import Event
    from weightwire.weights import Tensor

__all__ = [
    "AlreadyExists",
    "BadKey",
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
    "MissingDependency",
    "NoBucket",
    "NoRun",
    "NotFound",
    "NotPublished",
    "ObjectInfo",
    "OutOfMemory",
    "OutputError",
    "PermissionDenied",
    "ProcessFailed",
    "Publication",
    "Publisher",
    "RankFailed",
    "ReplicaError",
    "RunError",
    "SchemaChanged",
    "Stale",
    "State",
    "Tensor",
    "TooLarge",
    "Truncated",
    "Unavailable",
    "UnsafeBucket",
    "UnsupportedFormat",
    "Untrusted",
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

__dir__ = __all__.copy  # for completion in a shell

# Imported on first use, so that the command line can handle a Ctrl-C while they load. Type checkers see the imports.
if not TYPE_CHECKING:
    __getattr__ = lazy_exports(
        __name__,
        {
            "Bucket": "bucket",
            "Delta": "delta",
            "Event": "telemetry",
            "Follower": "follower",
            "ObjectInfo": "bucket",
            "Publication": "publisher",
            "Publisher": "publisher",
            "State": "delta",
            "Tensor": "weights",
            "Update": "follower",
            "anchor": "delta",
            "diff": "delta",
            "digest": "delta",
            "open_bucket": "bucket",
            "patch": "delta",
        },
    )
