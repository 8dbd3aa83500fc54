"""A torch engine that serves the adapter of a PEFT model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from support.adapters import peft_model, train_step
from support.vllm_server import tiny_model
from weightwire import Follower, Publisher, digest
from weightwire.engines import Keeper
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


def test_a_merged_adapter_is_refused(base: Path, tmp_path: Path) -> None:
    model = peft_model(base)
    checkpoint, target = saved(peft_model(base), tmp_path / "adapter")
    engine = TorchEngine(model)
    engine.reload(checkpoint, target)
    model.merge_adapter()
    with pytest.raises(EngineError, match="the adapter is merged"):
        engine.reload(checkpoint, target)
    model.unmerge_adapter()
    engine.reload(checkpoint, target)


def test_an_adapter_with_another_scale_is_refused(base: Path, tmp_path: Path) -> None:
    checkpoint, target = saved(peft_model(base), tmp_path / "adapter")
    config = json.loads((checkpoint / "adapter_config.json").read_bytes())
    (checkpoint / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": 99}))
    with pytest.raises(EngineError, match="lora_alpha of the adapter is 8, but 99 in the run"):
        TorchEngine(peft_model(base)).reload(checkpoint, target)


def test_an_adapter_of_another_rank_is_refused(base: Path, tmp_path: Path) -> None:
    model = peft_model(base)
    before = logits(model)
    checkpoint, target = saved(peft_model(base, rank=2), tmp_path / "adapter")
    config = json.loads((checkpoint / "adapter_config.json").read_bytes())
    (checkpoint / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": 8}))
    with pytest.raises(EngineError, match=r"has shape \[4, \d+\], but \[2, \d+\] in the run"):
        TorchEngine(model).reload(checkpoint, target)
    assert torch.equal(logits(model), before)


def test_a_whole_model_is_refused(base: Path) -> None:
    target = ServedVersion("a" * 32, 1, digest(Checkpoint(base)).hex)
    with pytest.raises(EngineError, match="the run is not an adapter"):
        TorchEngine(peft_model(base)).reload(base, target)
