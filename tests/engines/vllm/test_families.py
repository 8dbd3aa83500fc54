"""Families of models whose weights vLLM packs, pads or copies after loading: patched, they equal a fresh model."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from support.vllm_families import FAMILIES, GENERATING
from support.warm_vllm import WarmVllm

pytestmark = pytest.mark.slow
PROGRAM = Path(__file__).parents[2] / "support/offline_vllm.py"


def run_offline(root: Path, *options: str) -> dict[str, Any]:
    """vLLM leaves threads and process groups behind, so it runs in a process of its own."""
    output = root / f"output{len(options)}"
    WarmVllm([PROGRAM, root, *options], output, root, {**os.environ, "OMP_NUM_THREADS": "1"}).wait(900)
    said = output.read_text(errors="replace")
    lines = [line for line in said.splitlines() if line.startswith("{")]
    assert lines, said[-4000:]
    found: dict[str, Any] = json.loads(lines[-1])
    return found


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("families")


@pytest.fixture(scope="module")
def families(root: Path) -> dict[str, Any]:
    pytest.importorskip("vllm")
    return run_offline(root)


@pytest.mark.parametrize("family", GENERATING)
def test_a_patched_model_gives_the_tokens_and_logprobs_of_a_fresh_one(family: str, families: dict[str, Any]) -> None:
    """vLLM does not know the directory of the first version, as if it had been started from the Hub."""
    found = families[family]
    assert found["adopted"]
    assert found["unpatchable"] == ""
    assert found["patched"] == found["fresh"]
    assert found["before"] != found["fresh"]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_in_a_patched_model_equals_a_fresh_one(family: str, families: dict[str, Any]) -> None:
    found = families[family]
    assert found["adopted"]
    assert found["unpatchable"] == ""
    assert found["differing"] == [[]]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_that_lacks_weights_is_refused_and_the_model_goes_on(family: str, families: dict[str, Any]) -> None:
    """The outputs above are from after the refusal."""
    lacking = families[family]["lacking"]
    place = "experts" if family in ("qwen3_moe", "mixtral") else "input_layernorm"
    assert "no tensor of the run fills all of it" in lacking
    assert place in lacking
    assert "hint: " in lacking


@pytest.mark.parametrize("family", FAMILIES)
def test_a_server_that_moves_experts_is_refused(family: str, families: dict[str, Any]) -> None:
    assert "vLLM moves experts between ranks while it serves (EPLB)\nhint: " in families[family]["with_eplb"]


def test_experts_on_two_workers_are_patched(root: Path, families: dict[str, Any]) -> None:
    found = run_offline(root, "--split")
    assert found["adopted"]
    assert found["unpatchable"] == ""
    assert found["differing"] == [[], []]
    assert all(any("w13_weight" in name for name in worker) for worker in found["from_first"])
