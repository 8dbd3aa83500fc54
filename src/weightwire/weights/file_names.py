"""File names in a checkpoint directory: weights and side files."""

from __future__ import annotations

__all__ = ["ABOUT_FILE", "MODEL_FILE", "is_side_file_name", "is_weights_file"]

MODEL_FILE = "model.safetensors"
ABOUT_FILE = "weightwire.json"  # the run and version of a checkpoint


def is_weights_file(name: str) -> bool:
    """True for files that hold weights, and for their index."""
    return name.endswith((".safetensors", ".safetensors.index.json"))


def is_side_file_name(name: str) -> bool:
    """True if the name stays inside the checkpoint directory. Names come from a bucket."""
    plain = all(part and not part.startswith(".") for part in name.split("/"))
    return plain and "\\" not in name and name.isprintable()
