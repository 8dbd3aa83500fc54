"""The adapter of a PEFT model: read with the names, shapes, bits and config that PEFT saves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file

from support.adapters import peft_model, train_step
from support.doc_pages import blocks
from support.vllm_server import tiny_model
from weightwire import Follower, Publisher
from weightwire.errors import CheckpointError
from weightwire.telemetry.events import Event
from weightwire.weights.adapter import adapter_config
from weightwire.weights.file_names import weights_file_name
from weightwire.weights.torch_source import Casting, read_live


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("base"))


@pytest.fixture
def trained(base: Path) -> Any:
    model = peft_model(base)
    train_step(model, 1)
    return model


def read(model: Any) -> dict[str, bytes]:
    weights, aliases = read_live(model, Casting(None))
    assert aliases == {}
    return {name: _bytes(tensor) for name, tensor in weights.items()}


def _bytes(tensor: Any) -> bytes:
    import numpy as np

    out = np.zeros(tensor.count, np.dtype(f"<u{tensor.dtype.unit}"))
    tensor.copy_to(0, tensor.count, out)
    return bytes(out.tobytes())


def saved(directory: Path) -> dict[str, bytes]:
    found = load_file(directory / "adapter_model.safetensors")
    return {name: bytes(tensor.contiguous().view(torch.uint8).numpy().tobytes()) for name, tensor in found.items()}


def configs(model: Any, directory: Path) -> tuple[Any, Any]:
    """Our config, and the one that PEFT has saved."""
    ours, theirs = (
        json.loads(adapter_config(model) or b""),
        json.loads((directory / "adapter_config.json").read_bytes()),
    )
    for one in (ours, theirs):
        one["target_modules"] = sorted(one["target_modules"])
    return ours, theirs


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["q_proj", "down_proj"]},
        {"target_modules": ["q_proj"], "use_dora": True},
        {"target_modules": ["q_proj"], "modules_to_save": ["norm"]},
        {"target_modules": ["q_proj", "embed_tokens"]},
    ],
    ids=["lora", "dora", "a whole module too", "an embedding"],
)
@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
def test_an_adapter_is_read_as_peft_saves_it(options: dict[str, Any], base: Path, tmp_path: Path) -> None:
    model = peft.get_peft_model(peft_model(base).unload(), peft.LoraConfig(r=2, **options))
    train_step(model, 1)
    model.save_pretrained(tmp_path)
    assert read(model) == saved(tmp_path)
    assert read(torch.compile(model)) == saved(tmp_path)
    ours, theirs = configs(model, tmp_path)
    assert ours == theirs


def test_an_adapter_inside_a_transformers_model_is_read_as_it_saves_it(base: Path, tmp_path: Path) -> None:
    model = peft_model(base).unload()
    model.add_adapter(peft.LoraConfig(r=2, target_modules=["v_proj"], init_lora_weights=False))
    model.save_pretrained(tmp_path)
    assert read(model) == saved(tmp_path)
    assert configs(model, tmp_path)[0]["r"] == 2


def test_the_active_adapter_counts_and_two_are_refused(trained: Any, base: Path, tmp_path: Path) -> None:
    trained.add_adapter("second", peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    first = read(trained)
    trained.set_adapter("second")
    trained.save_pretrained(tmp_path)
    assert read(trained) == saved(tmp_path / "second") != first
    assert json.loads(adapter_config(trained) or b"")["r"] == 2
    trained.base_model.set_adapter(["default", "second"])
    with pytest.raises(CheckpointError, match=r"2 active adapters \(default, second\)"):
        read(trained)


def test_a_config_always_has_the_same_bytes(trained: Any) -> None:
    config = trained.peft_config["default"]
    before = adapter_config(trained)
    config.target_modules = {*sorted(config.target_modules, reverse=True)}
    assert adapter_config(trained) == before
    assert not config.inference_mode  # the model is still trained


def test_models_without_adapters_and_other_weights_have_no_config() -> None:
    assert adapter_config(torch.nn.Linear(2, 2)) is None
    assert adapter_config({"a": torch.zeros(2)}) is None


def test_weights_of_adapters_have_their_own_file_name() -> None:
    assert weights_file_name(["base_model.model.a.lora_A.weight"]) == "adapter_model.safetensors"
    assert weights_file_name(["base_model.model.a.lora_A.weight", "b"]) == "model.safetensors"
    assert weights_file_name([]) == "model.safetensors"


def test_the_documented_example_publishes_an_adapter(base: Path, tmp_path: Path) -> None:
    [block] = blocks("docs/trainers.md", "Adapters", "python")
    exec(block.replace("s3://bucket/adapter", str(tmp_path / "bucket")), {"base": peft_model(base).unload()})
    with Follower(tmp_path / "bucket", into=tmp_path / "replica") as follower:
        follower.once()
        assert {path.name for path in follower.checkpoint().iterdir()} == {
            "adapter_config.json",
            "adapter_model.safetensors",
            "weightwire.json",
        }


def test_a_replica_of_a_published_adapter_can_be_loaded_by_peft(trained: Any, base: Path, tmp_path: Path) -> None:
    warnings: list[str] = []

    def note(event: Event) -> None:
        if event.stage == "warning":
            warnings.append(event.message)

    with (
        Publisher(tmp_path / "bucket", dtype=None) as publisher,
        Follower(tmp_path / "bucket", into=tmp_path / "replica") as follower,
    ):
        for step in range(2):
            train_step(trained, step)
            publisher.publish(trained).wait()
            follower.once()
            loaded = peft.PeftModel.from_pretrained(peft_model(base).unload(), follower.checkpoint())
            assert read(loaded) == read(trained)
    prompt = torch.arange(8)[None]
    assert torch.equal(loaded(prompt).logits, trained.eval()(prompt).logits)
    with Publisher(tmp_path / "bucket", dtype=None, on_event=note) as publisher:
        publisher.publish(trained).wait()
        assert warnings == []
    trained.peft_config["default"].lora_alpha = 1
    with Publisher(tmp_path / "bucket", dtype=None, on_event=note) as publisher:
        publisher.publish(trained).wait()
    assert ["the run keeps its adapter_config.json" in one for one in warnings] == [True]
