"""File names in a checkpoint directory: weights and side files."""

from __future__ import annotations

from collections.abc import Collection

__all__ = [
    "ABOUT_FILE",
    "ADAPTER_CONFIG",
    "ADAPTER_FILE",
    "ADAPTER_PREFIX",
    "MODEL_FILE",
    "is_side_file_name",
    "is_weights_file",
    "weights_file_name",
]

MODEL_FILE = "model.safetensors"
ADAPTER_FILE = "adapter_model.safetensors"  # PEFT and inference servers look for an adapter under this name
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_PREFIX = "base_model.model."  # of all names of an adapter's weights
ABOUT_FILE = "weightwire.json"  # the run and version of a checkpoint


def weights_file_name(names: Collection[str]) -> str:
    """The file in which loaders expect weights of these names: those of a model, or of an adapter."""
    return ADAPTER_FILE if names and all(name.startswith(ADAPTER_PREFIX) for name in names) else MODEL_FILE


def is_weights_file(name: str) -> bool:
    """True for files that hold weights, and for their index."""
    return name.endswith((".safetensors", ".safetensors.index.json"))


def is_side_file_name(name: str) -> bool:
    """True if the name stays inside the checkpoint directory. Names come from a bucket."""
    plain = all(part and not part.startswith(".") for part in name.split("/"))
    return plain and "\\" not in name and name.isprintable()
