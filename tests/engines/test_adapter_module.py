"""A torch engine that serves the adapter of a PEFT model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file

from support.adapters import adapted_layer, peft_model, train_step
from support.vllm_server import tiny_model
from weightwire import Follower, Publisher, diff, digest
from weightwire.engines import Keeper
from weightwire.engines.adapter_module import _SCALE_SETTINGS
from weightwire.engines.engine import ServedVersion
from weightwire.engines.torch import TorchEngine
from weightwire.errors import EngineError
from weightwire.telemetry.events import Event
from weightwire.weights import Checkpoint

PROMPT = torch.tensor([[5, 9, 40, 7]])


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("base"))


def nothing(event: Event) -> None:
    pass


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(PROMPT).logits


def fresh(base: Path, directory: Path) -> Any:
    """The base with the adapter of a directory, loaded by PEFT itself."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    return peft.PeftModel.from_pretrained(model, directory)


def saved(model: Any, directory: Path) -> tuple[Path, ServedVersion]:
    """An adapter in bfloat16, as a run holds it."""
    model.to(torch.bfloat16).save_pretrained(directory)
    return directory, ServedVersion("a" * 32, 1, digest(Checkpoint(directory)).hex)


def edit(checkpoint: Path, **settings: Any) -> None:
    path = checkpoint / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_bytes()), **settings}))


def bits_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    return dict(load_file(checkpoint / "adapter_model.safetensors"))


def test_each_version_computes_what_a_fresh_load_does(base: Path, tmp_path: Path) -> None:
    trained, served = peft_model(base), peft_model(base)
    before = {name: one.clone() for name, one in served.get_base_model().named_parameters() if "lora_" not in name}
    engine = TorchEngine(served)
    with (
        Publisher(tmp_path / "run", blocking=True, on_event=nothing) as publisher,
        Follower(tmp_path / "run", into=tmp_path / "replica", on_event=nothing) as follower,
        Keeper(follower, [engine], on_event=nothing) as keeper,
    ):
        for step in range(4):
            train_step(trained, step)
            published = publisher.publish(trained, step=step)
            publisher.wait(replicas=1, timeout=120)
            assert keeper.trouble == ""
            with engine.serving() as version:
                assert version == published.version
                assert torch.equal(logits(served), logits(fresh(base, follower.checkpoint())))
    for name, one in before.items():
        assert torch.equal(served.get_base_model().get_parameter(name), one), name


class TestLiveModel:
    """The PEFT model must generate with the tensors that the engine updates."""

    @pytest.fixture
    def model(self) -> Any:
        return adapted_layer()

    @pytest.fixture
    def engine(self, model: Any, tmp_path: Path) -> TorchEngine:
        engine = TorchEngine(model)
        engine.reload(*saved(adapted_layer(), tmp_path / "adapter"))
        return engine

    def refused(self, engine: TorchEngine, tmp_path: Path, message: str) -> None:
        """By every way to change weights."""
        held, path = engine.holding, tmp_path / "adapter"
        assert held is not None
        before, after = bits_of(path), bits_of(path)
        first = next(iter(after))
        after[first] = after[first].clone()
        after[first].view(-1)[0] += 1
        target = ServedVersion(held.run, 2, digest(after).hex)
        for change in (
            lambda: engine.reload(path, held),
            lambda: engine.adopt(path, held),
            lambda: engine.patch(diff(before, after, coo=True), target),
        ):
            with pytest.raises(EngineError, match=message):
                change()
        assert engine.version == 1

    def test_a_merged_adapter_is_refused(self, model: Any, engine: TorchEngine, tmp_path: Path) -> None:
        model.merge_adapter()
        self.refused(engine, tmp_path, "the adapter is merged")
        model.unmerge_adapter()
        engine.reload(tmp_path / "adapter", engine.holding)  # type: ignore[arg-type]

    def test_another_active_adapter_is_refused(self, model: Any, engine: TorchEngine, tmp_path: Path) -> None:
        model.add_adapter("other", peft.LoraConfig(r=2, lora_alpha=4, target_modules=["0"]))
        model.set_adapter("other")
        self.refused(engine, tmp_path, "not the active one")

    def test_disabled_adapters_are_refused(self, model: Any, engine: TorchEngine, tmp_path: Path) -> None:
        with model.disable_adapter():
            self.refused(engine, tmp_path, "not the active one")

    def test_replaced_parameters_are_refused(self, model: Any, engine: TorchEngine, tmp_path: Path) -> None:
        copies = {name: one.clone() for name, one in model.state_dict().items()}
        model.load_state_dict(copies, assign=True)
        self.refused(engine, tmp_path, "were moved or replaced")

    def test_two_active_adapters_are_refused(self, model: Any) -> None:
        model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["0"]))
        model.base_model.set_adapter(["default", "other"])
        with pytest.raises(EngineError, match=r"2 active adapters(?s:.*)activate one adapter with set_adapter"):
            TorchEngine(model)


@pytest.mark.parametrize("key", _SCALE_SETTINGS)
def test_an_adapter_with_another_setting_is_refused(key: str, tmp_path: Path) -> None:
    checkpoint, target = saved(adapted_layer(), tmp_path / "adapter")
    edit(checkpoint, **{key: 99})
    with pytest.raises(EngineError, match=f"{key} of the adapter is .*, but 99 in the run"):
        TorchEngine(adapted_layer()).reload(checkpoint, target)


@pytest.mark.parametrize("content", ["{", "[]", "[" * 100_000, b"\xff", '{"peft_type": "LOHA"}'])
def test_an_invalid_config_is_an_error(content: str | bytes, tmp_path: Path) -> None:
    checkpoint, target = saved(adapted_layer(), tmp_path / "adapter")
    (checkpoint / "adapter_config.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(EngineError, match=r"of the run: (is not valid|describes an adapter of type)"):
        TorchEngine(adapted_layer()).reload(checkpoint, target)


def test_an_adapter_of_another_rank_is_refused(base: Path, tmp_path: Path) -> None:
    model = peft_model(base)
    before = logits(model)
    checkpoint, target = saved(peft_model(base, rank=2), tmp_path / "adapter")
    edit(checkpoint, lora_alpha=8)
    with pytest.raises(EngineError, match=r"has shape \[4, \d+\], but \[2, \d+\] in the run"):
        TorchEngine(model).reload(checkpoint, target)
    assert torch.equal(logits(model), before)


def test_a_whole_model_is_refused(base: Path) -> None:
    target = ServedVersion("a" * 32, 1, digest(Checkpoint(base)).hex)
    with pytest.raises(EngineError, match="the run is not an adapter"):
        TorchEngine(peft_model(base)).reload(base, target)
