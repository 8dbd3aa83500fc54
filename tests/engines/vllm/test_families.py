"""Families of models whose weights vLLM packs, pads or copies after loading: patched, they equal a fresh model."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from support.vllm_families import EXPERTS, FAMILIES, QUANTIZED
from support.warm_vllm import WarmVllm

pytestmark = pytest.mark.slow
PROGRAMS = Path(__file__).parents[2] / "support"
PATCHED = [scheme for scheme in QUANTIZED if scheme != "int8"]


def run_offline(root: Path, *options: str, program: str = "offline_vllm.py") -> dict[str, Any]:
    """vLLM leaves threads and process groups behind, so it runs in a process of its own."""
    output = root / f"{program}{len(options)}.output"
    WarmVllm([PROGRAMS / program, root, *options], output, root, {**os.environ, "OMP_NUM_THREADS": "1"}).wait(900)
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


@pytest.mark.parametrize("family", FAMILIES)
def test_a_patched_model_gives_the_tokens_and_logprobs_of_a_fresh_one(family: str, families: dict[str, Any]) -> None:
    """vLLM does not know the directory of the first version, as if it had been started from the Hub.

    Qwen3 is served with a draft model, which is patched, too. DeepSeek's checkpoint has a draft layer, which is served
    in `deepseek_mtp` only.
    """
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
    place = "experts" if family in EXPERTS else "input_layernorm"
    if family == "deepseek_mtp":
        place = (
            "MTP layers that vLLM predicts with: parameter 'model.layers.2.mtp_block.self_attn.fused_qkv_a_proj.weight'"
        )
    assert "no tensor of the run fills all of it" in lacking
    assert place in lacking
    assert "hint: " in lacking


@pytest.mark.parametrize("family", FAMILIES)
def test_a_server_that_moves_experts_is_refused(family: str, families: dict[str, Any]) -> None:
    assert "vLLM moves experts between ranks while it serves (EPLB)\nhint: " in families[family]["with_eplb"]


# --- drafts ------------------------------------------------------------------------------------------------------


SHARED = ["model.layers.2.shared_head.head.weight", "model.embed_tokens.weight", "lm_head.weight"]


@pytest.mark.parametrize(("family", "shared"), [("deepseek_mtp", SHARED), ("qwen3", [])])
def test_a_patched_draft_holds_the_weights_of_a_fresh_one(
    family: str, shared: list[str], families: dict[str, Any]
) -> None:
    before, patched, fresh = (families[family][f"draft_{one}"] for one in ("before", "patched", "fresh"))
    assert patched["weights"] == fresh["weights"]
    assert not patched["weights"].items() & before["weights"].items()
    assert patched["shared"] == fresh["shared"] == shared


@pytest.mark.parametrize("family", ["deepseek_mtp", "qwen3"])
def test_a_patched_draft_predicts_the_tokens_of_a_fresh_one(family: str, families: dict[str, Any]) -> None:
    """Fewer predictions than tokens mean that some were accepted: after a wrong one, the next step predicts again."""
    found = families[family]
    predicted = found["draft_patched"]["predicted"]
    assert predicted == found["draft_fresh"]["predicted"]
    assert predicted != found["draft_before"]["predicted"]
    assert len(predicted) < sum(len(tokens) for tokens, _ in found["patched"])


def test_a_separate_draft_changes_only_with_its_own_run(families: dict[str, Any]) -> None:
    found = families["qwen3"]
    assert found["draft_untouched"] == found["draft_before"]["weights"]
    assert found["draft_adopted"]
    assert found["draft_version"] == 5


@pytest.mark.parametrize("family", FAMILIES)
def test_every_draft_can_be_updated(family: str, families: dict[str, Any]) -> None:
    assert families[family]["logged"] == []


def test_experts_on_two_workers_are_patched(root: Path, families: dict[str, Any]) -> None:
    """They give the tokens and logprobs of two fresh workers."""
    found = run_offline(root, "--split")
    assert found["adopted"]
    assert found["unpatchable"] == ""
    assert found["patched"] == found["fresh"]
    assert found["before"] != found["fresh"]
    assert found["differing"] == [[], []]
    assert all(any("w13_weight" in name for name in worker) for worker in found["from_first"])


# --- quantized ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    pytest.importorskip("vllm")
    return run_offline(tmp_path_factory.mktemp("quantized"), program="loaded_vllm.py")


@pytest.mark.parametrize("scheme", PATCHED)
def test_every_tensor_in_a_patched_quantized_model_equals_a_fresh_one(scheme: str, quantized: dict[str, Any]) -> None:
    found = quantized[scheme]
    assert found["adopted"]
    assert found["unpatchable"] == ""
    assert found["differing"] == [[]]
    assert any("qkv_proj" in name for name in found["from_first"][0])


@pytest.mark.parametrize(("scheme", "is_computed"), [("int4", True), ("gptq", True), ("awq", True), ("fp8", False)])
def test_layers_that_vllm_repacks_are_computed_by_its_own_code(
    scheme: str, is_computed: bool, quantized: dict[str, Any]
) -> None:
    layers = ["model.layers.0", "model.layers.1"]
    assert quantized[scheme]["recomputed"] == (layers if is_computed else [])


@pytest.mark.parametrize("scheme", PATCHED)
def test_a_run_that_is_quantized_in_another_way_is_refused(scheme: str, quantized: dict[str, Any]) -> None:
    """The weights above are from after the refusal."""
    other = "awq" if scheme == "gptq" else "gptq"
    assert f"the run is quantized ({other}), but vLLM serves weights that are quantized (" in quantized[scheme]["other"]
    assert "hint: start vLLM from a checkpoint of the run" in quantized[scheme]["other"]


def test_a_kernel_that_hides_a_copy_of_the_weights_is_refused(quantized: dict[str, Any]) -> None:
    refused = quantized["int8"]["refused"]
    assert "the model is served quantized (compressed-tensors int-quantized): model.layers.0.self_attn" in refused
    assert "keeps weights where they cannot be reached" in refused
    assert "hint: " in refused
