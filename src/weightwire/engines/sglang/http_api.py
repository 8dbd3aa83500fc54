"""SGLang's requests for weight updates, for 0.5.12 and newer.

From 0.5.21 on, an update must stand between begin and end, and names the model that it is for by `selector`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

__all__ = [
    "BEGIN",
    "CONTINUE",
    "END",
    "FLUSH",
    "LOADER",
    "Call",
    "load_checkpoint",
    "pause",
    "send_order",
    "set_version",
]

LOADER = "weightwire.engines.sglang.load"


@dataclass(frozen=True)
class Call:
    """A POST request."""

    path: str
    body: dict[str, Any] = field(default_factory=dict)


BEGIN = Call("/begin_weight_update", {"selector": "target"})
END = Call("/end_weight_update")
CONTINUE = Call("/continue_generation", {"torch_empty_cache": False})  # emptying it prolongs the pause
FLUSH = Call("/flush_cache")


def pause(mode: Literal["in_place", "retract", "abort"]) -> Call:
    """in_place: running requests keep their KV cache. retract: they wait, and compute it again. abort: they end."""
    return Call("/pause_generation", {"mode": mode})


def send_order(payload: str, ranks: int, has_session: bool) -> Call:
    """Never flushes: up to 0.5.21, a flush that fails ends the server."""
    target: dict[str, Any] = {"selector": "target"} if has_session else {"disable_draft_model": True}
    body = {
        "serialized_named_tensors": [payload] * ranks,
        "load_format": LOADER,
        "flush_cache": False,
        "abort_all_requests": False,
        **target,
    }
    return Call("/update_weights_from_tensor", body)


def load_checkpoint(path: Path) -> Call:
    """The format is given, because a server may have been started with dummy weights."""
    body = {"model_path": str(path), "load_format": "auto", "flush_cache": False, "abort_all_requests": False}
    return Call("/update_weights_from_disk", body)


def set_version(version: str) -> Call:
    return Call("/update_weight_version", {"new_version": version, "abort_all_requests": False})
