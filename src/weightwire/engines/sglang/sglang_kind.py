"""SGLang's entry in the registry of engines."""

from __future__ import annotations

from weightwire.engines.registry import EngineKind
from weightwire.engines.sglang.server_setup import SglangRolloutServer
from weightwire.engines.sglang.sglang_engine import SglangEngine

__all__ = ["SGLANG"]

SGLANG = EngineKind(SglangEngine, SglangRolloutServer)
