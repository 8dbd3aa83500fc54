"""weightwire: ships a model's weight changes from a trainer to its inference servers, through a bucket.

A `Publisher` publishes versions of the weights, a `Follower` rebuilds them bit for bit. Below them, `diff` makes the
smallest exact delta between two sets of weights, `patch` applies it, and `digest` proves that two places hold the same.
"""

from weightwire.delta import Delta, Entry, State, TensorState, anchor, diff, digest, patch
from weightwire.errors import (
    BrokenChain,
    BucketError,
    CheckpointError,
    CorruptDelta,
    DataGone,
    Fenced,
    ForeignRun,
    NoRun,
    OutputError,
    PermissionDenied,
    RankFailed,
    ReplicaError,
    RunError,
    SchemaChanged,
    Unavailable,
    UnsafeBucket,
    UnsupportedFormat,
    WeightwireError,
    WrongBase,
)
from weightwire.follower import Follower, Update
from weightwire.publisher import Publication, Publisher
from weightwire.telemetry import Event
from weightwire.weights import DTYPES, Dtype, Tensor

__all__ = [
    "DTYPES",
    "BrokenChain",
    "BucketError",
    "CheckpointError",
    "CorruptDelta",
    "DataGone",
    "Delta",
    "Dtype",
    "Entry",
    "Event",
    "Fenced",
    "Follower",
    "ForeignRun",
    "NoRun",
    "OutputError",
    "PermissionDenied",
    "Publication",
    "Publisher",
    "RankFailed",
    "ReplicaError",
    "RunError",
    "SchemaChanged",
    "State",
    "Tensor",
    "TensorState",
    "Unavailable",
    "UnsafeBucket",
    "UnsupportedFormat",
    "Update",
    "WeightwireError",
    "WrongBase",
    "anchor",
    "diff",
    "digest",
    "patch",
]

__version__ = "0.1.0"
