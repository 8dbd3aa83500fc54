"""Checkpoints that can be served, and the errors of those that cannot."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from support.adapters import peft_model
from weightwire.errors import CheckpointError
from weightwire.server.model_loader import load_model
from weightwire.weights import adapter_config


@pytest.fixture
def model(tiny: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny, tmp_path / "model"))


def test_a_model_is_loaded_in_bfloat16(tiny: Path) -> None:
    model = load_model(tiny)
    assert {parameter.dtype for parameter in model.module.parameters()} == {torch.bfloat16}
    assert not any(parameter.requires_grad for parameter in model.module.parameters())
    assert (model.positions, model.vocabulary, list(model.ends)) == (512, 320, [2])
    assert model.characters == 512 * len("<|endoftext|>")
    assert model.decode(model.encode("häßlich <|im_end|>")) == "häßlich "
    assert "model.norm.weight" in model.names


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_model_is_loaded_in_the_dtype_of_the_run(tiny: Path, dtype: str) -> None:
    model = load_model(tiny, dtype=dtype)
    assert {parameter.dtype for parameter in model.module.parameters()} == {getattr(torch, dtype)}


def test_truncation_of_the_tokenizer_is_turned_off(model: Path) -> None:
    """Before threads use it, because changing it is not thread-safe."""
    settings = json.loads((model / "tokenizer.json").read_text())
    settings["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    (model / "tokenizer.json").write_text(json.dumps(settings))
    loaded = load_model(model)
    assert loaded.tokenizer.backend_tokenizer.truncation is None
    assert len(loaded.encode("hello")) == 5


def _empty(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()


def _without_weights(path: Path) -> None:
    (path / "model.safetensors").unlink()


def _without_tokenizer(path: Path) -> None:
    (path / "tokenizer.json").unlink()


def _without_any_tokenizer_file(path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).unlink()


def _of_an_unknown_kind(path: Path) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"model_type": "perpetuum-mobile"}))


def _with_a_tensor_less(path: Path) -> None:
    tensors = safetensors.torch.load_file(path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    safetensors.torch.save_file(tensors, path / "model.safetensors", {"format": "pt"})


def _of_another_shape(path: Path) -> None:
    tensors = safetensors.torch.load_file(path / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(64, dtype=torch.bfloat16)
    safetensors.torch.save_file(tensors, path / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_empty, r"not a model: config.json is missing"),
        (_without_weights, "model"),
        (_without_tokenizer, "cannot be loaded"),
        (_without_any_tokenizer_file, "has no tokenizer"),
        (_of_an_unknown_kind, "cannot be loaded .*perpetuum-mobile"),
        (_with_a_tensor_less, "tensor 'model.layers.1.mlp.up_proj.weight' is missing"),
        (_of_another_shape, r"tensor 'model.norm.weight' has shape \[64\], but the config says \[128\]"),
    ],
)
def test_a_model_that_cannot_be_loaded_is_one_clear_error(
    model: Path, spoil: Callable[[Path], None], message: str
) -> None:
    spoil(model)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_model(model)
    assert "\n" not in caught.value.message
    assert caught.value.hint


def test_an_adapter_of_the_run_changes_nothing_until_it_is_loaded(tiny: Path) -> None:
    prompt = torch.tensor([[5, 9, 40, 7]])
    config = adapter_config(peft_model(tiny))
    plain, adapted = load_model(tiny), load_model(tiny, adapter=config)
    assert any("lora_A" in name for name, _ in adapted.updated.named_parameters())
    assert {one.dtype for one in adapted.updated.parameters()} == {torch.bfloat16}
    assert torch.equal(plain.module(prompt).logits, adapted.module(prompt).logits)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"target_modules": ["no_such_layer"]}, "not found"),
        ({"layer_replication": [[0, 1], [0, 1]]}, "it has layer_replication"),
        ({"alora_invocation_tokens": [5]}, "it has alora_invocation_tokens"),
        ({"init_lora_weights": "pissa_niter_4"}, "its init_lora_weights is 'pissa_niter_4'"),
        ({"r": 10**9}, "its rank is over 4096"),
        ({"rank_pattern": {"q_proj": 10**9}}, "its rank is over 4096"),
        ({"r": "many"}, ""),
        ({"rank_pattern": [1]}, ""),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(tiny: Path, settings: dict[str, Any], why: str) -> None:
    config = json.loads(adapter_config(peft_model(tiny)) or b"")
    with pytest.raises(CheckpointError, match=f"the adapter of the run does not fit this model .*{why}"):
        load_model(tiny, adapter=json.dumps({**config, **settings}).encode())


def test_a_base_model_keeps_its_own_dtype(tiny: Path) -> None:
    """PEFT trains adapters in float32 for base models in bfloat16, and vLLM serves them so, too."""
    model = load_model(tiny, dtype="float32", adapter=adapter_config(peft_model(tiny)))
    dtypes: dict[bool, set[torch.dtype]] = {True: set(), False: set()}
    for name, parameter in model.updated.named_parameters():
        dtypes["lora_" in name].add(parameter.dtype)
    assert dtypes == {True: {torch.float32}, False: {torch.bfloat16}}


def test_initial_weights_of_an_adapter_are_not_random(tiny: Path) -> None:
    prompt = torch.tensor([[5, 9, 40, 7]])
    config = json.loads(adapter_config(peft_model(tiny)) or b"") | {"init_lora_weights": False}
    adapted = load_model(tiny, adapter=json.dumps(config).encode())
    assert torch.equal(load_model(tiny).module(prompt).logits, adapted.module(prompt).logits)
