"""A run must be quantized as the engine serves it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from weightwire.engines.vllm.quantization_scheme import PATCHABLE, check_same_scheme, scheme_of
from weightwire.errors import EngineError


@pytest.mark.parametrize(
    ("config", "scheme"),
    [
        (None, ""),
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8 in blocks"),
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "compressed-tensors pack-quantized"),
        ({"quant_method": "compressed-tensors", "format": "int-quantized"}, "compressed-tensors int-quantized"),
        ({}, "unknown"),
    ],
)
def test_schemes_are_named_by_their_config(config: Any, scheme: str) -> None:
    assert scheme_of(config) == scheme


def test_only_schemes_that_were_tested_are_patched() -> None:
    assert not {"fp8", "compressed-tensors int-quantized", "unknown", ""} & set(PATCHABLE)


def test_another_scheme_is_refused_with_both_names(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "awq"}}))
    check_same_scheme(tmp_path, "awq")
    with pytest.raises(EngineError, match=r"is quantized \(awq\), but vLLM serves weights that are not quantized"):
        check_same_scheme(tmp_path, "")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(EngineError, match=r"is not quantized, but vLLM serves weights that are quantized \(gptq\)"):
        check_same_scheme(tmp_path, "gptq")


@pytest.mark.parametrize("text", [None, "[]", "{", "\xff"])
def test_a_checkpoint_without_a_readable_config_is_left_to_other_checks(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text, "latin-1")
    check_same_scheme(tmp_path, "gptq")
