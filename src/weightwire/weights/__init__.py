"""Read and write: weights as named flat arrays of bits, from checkpoints, NumPy arrays and torch, and back to files."""

from weightwire.weights.adapter import adapter_config, adapter_weights
from weightwire.weights.checkpoint import Checkpoint
from weightwire.weights.checkpoint_writer import CheckpointWriter, file_to_replace, replacing
from weightwire.weights.dtypes import BY_CODE, DTYPES, Dtype
from weightwire.weights.file_names import (
    ABOUT_FILE,
    ADAPTER_CONFIG,
    ADAPTER_FILE,
    ADAPTER_PREFIX,
    MODEL_FILE,
    is_side_file_name,
    is_weights_file,
    weights_file_name,
)
from weightwire.weights.peft import adapter_layers, has_adapters
from weightwire.weights.safetensors_file import (
    INCOMPLETE,
    LENGTH_SIZE,
    MAX_DIMS,
    MAX_INT,
    METADATA,
    Header,
    Slot,
    build_header,
    is_unicode,
    read_header,
    read_size,
)
from weightwire.weights.schema import Schema, check_schema, copy_weights, schema_of_weights
from weightwire.weights.side_files import LARGEST_SIDE_FILE, named_step, side_files
from weightwire.weights.source import mark_changed, present, read_weights
from weightwire.weights.tensor import Bits, HeldWeights, Rows, Tensor, Weights, nbytes_of
from weightwire.weights.torch_source import DEFAULT_DTYPE, Casting, as_mapping, plain_names, read_live, untie, unwrapped
from weightwire.weights.torch_tensor import as_torch_integers, note_torch_write, torch_integer_dtype

__all__ = [
    "ABOUT_FILE",
    "ADAPTER_CONFIG",
    "ADAPTER_FILE",
    "ADAPTER_PREFIX",
    "BY_CODE",
    "DEFAULT_DTYPE",
    "DTYPES",
    "INCOMPLETE",
    "LARGEST_SIDE_FILE",
    "LENGTH_SIZE",
    "MAX_DIMS",
    "MAX_INT",
    "METADATA",
    "MODEL_FILE",
    "Bits",
    "Casting",
    "Checkpoint",
    "CheckpointWriter",
    "Dtype",
    "Header",
    "HeldWeights",
    "Rows",
    "Schema",
    "Slot",
    "Tensor",
    "Weights",
    "adapter_config",
    "adapter_layers",
    "adapter_weights",
    "as_mapping",
    "as_torch_integers",
    "build_header",
    "check_schema",
    "copy_weights",
    "file_to_replace",
    "has_adapters",
    "is_side_file_name",
    "is_unicode",
    "is_weights_file",
    "mark_changed",
    "named_step",
    "nbytes_of",
    "note_torch_write",
    "plain_names",
    "present",
    "read_header",
    "read_live",
    "read_size",
    "read_weights",
    "replacing",
    "schema_of_weights",
    "side_files",
    "torch_integer_dtype",
    "untie",
    "unwrapped",
    "weights_file_name",
]
