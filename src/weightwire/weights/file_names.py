"""The names of files in a checkpoint directory: which hold weights, and what may lie beside them."""

from __future__ import annotations

__all__ = ["ABOUT_FILE", "MODEL_FILE", "is_side_file_name", "is_weights_file"]

MODEL_FILE = "model.safetensors"
ABOUT_FILE = "weightwire.json"  # says which version of which run a checkpoint is


def is_weights_file(name: str) -> bool:
    """Whether a file belongs to the weights: it holds some, or is the index of those that do."""
    return name.endswith((".safetensors", ".safetensors.index.json"))


def is_side_file_name(name: str) -> bool:
    """Whether a name may be written below a checkpoint: names come from a bucket, and none may lead out of it."""
    plain = all(part and not part.startswith(".") for part in name.split("/"))
    return plain and "\\" not in name and name.isprintable()
