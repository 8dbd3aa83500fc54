"""weightwire: ships a model's weight changes from a trainer to its inference servers.

`diff` makes the smallest exact delta between two sets of weights, `patch` applies it, `digest` proves that two
places hold the same bits.
"""

from weightwire.apply import patch
from weightwire.delta import Delta, Entry
from weightwire.dtypes import DTYPES, Dtype
from weightwire.errors import (
    CheckpointError,
    CorruptDelta,
    OutputError,
    UnsupportedFormat,
    WeightwireError,
    WrongBase,
)
from weightwire.make import anchor, diff
from weightwire.state import State, TensorState, digest
from weightwire.weights import Tensor

__all__ = [
    "DTYPES",
    "CheckpointError",
    "CorruptDelta",
    "Delta",
    "Dtype",
    "Entry",
    "OutputError",
    "State",
    "Tensor",
    "TensorState",
    "UnsupportedFormat",
    "WeightwireError",
    "WrongBase",
    "anchor",
    "diff",
    "digest",
    "patch",
]

__version__ = "0.1.0"
