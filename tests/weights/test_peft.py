"""PEFT models: merged without changing the model."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch

from support.failing_bucket import Troubled, in_memory
from support.run_contents import version_in
from weightwire import Publisher, digest
from weightwire.errors import CheckpointError
from weightwire.weights.peft import has_adapters, merged
from weightwire.weights.torch_source import Casting, read_live


class Model(torch.nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(10, 8)
        self.up = torch.nn.Linear(8, 16)
        self.down = torch.nn.Linear(16, 8, bias=False)
        self.head = torch.nn.Linear(8, 10)


def model(**options: Any) -> Any:
    """A model with adapters that change its output."""
    torch.manual_seed(0)
    made = peft.get_peft_model(Model(), peft.LoraConfig(**{"target_modules": ["up", "down"], "r": 2} | options))
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.requires_grad:
                parameter += torch.randn_like(parameter)
    return made


def expected(made: Any) -> dict[str, Any]:
    """The weights after PEFT has merged in place."""
    return {name: value.detach() for name, value in made.merge_and_unload().state_dict().items()}


def snapshot(made: Any) -> dict[str, Any]:
    return {name: value.clone() for name, value in made.state_dict().items()}


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_dora": True},
        {"modules_to_save": ["head"]},
        {"target_modules": ["embed", "up"]},
        {"target_modules": ["up"], "trainable_token_indices": {"embed": [1, 3]}},
    ],
    ids=["lora", "dora", "a whole module too", "an embedding", "some tokens"],
)
def test_adapters_are_merged_and_the_model_is_unchanged(options: dict[str, Any]) -> None:
    made = model(**options)
    before = snapshot(made)

    weights = dict(merged(made))

    assert same(snapshot(made), before)
    assert not any(getattr(module, "merged_adapters", ()) for module in made.modules())
    assert same(weights, expected(made))


def test_an_adapter_may_be_inside_a_model() -> None:
    """As transformers' add_adapter() does it."""
    made = Model()
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["up"], init_lora_weights=False), made)
    assert has_adapters(made)
    weights = dict(merged(made))
    assert set(weights) == set(Model().state_dict())
    assert not torch.equal(weights["up.weight"], made.up.base_layer.weight)


def test_an_adapter_that_is_turned_off_is_left_out() -> None:
    made = model()
    with made.disable_adapter():
        weights = dict(merged(made))
    assert same(weights, dict(made.unload().state_dict()))


def test_a_prompt_adapter_cannot_be_merged() -> None:
    made = Model()
    made.peft_config = {"default": peft.PromptTuningConfig(num_virtual_tokens=3)}
    with pytest.raises(CheckpointError, match=r"PROMPT_TUNING.* cannot be merged"):
        list(merged(made))


def test_models_without_adapters_have_none() -> None:
    assert not has_adapters(Model())
    assert list(read_live(Model(), Casting(), merge=True)[0]) == list(Model().state_dict())


def test_a_publisher_merges_adapters_and_refuses_the_tensors_of_a_peft_model() -> None:
    bucket: Troubled = in_memory()
    made = model()
    with Publisher(bucket, dtype=None) as publisher:
        for source in (made.state_dict(), made.named_parameters()):
            with pytest.raises(CheckpointError, match="belongs to a PEFT adapter") as caught:
                publisher.publish(source)
            assert "merge=True" in str(caught.value.hint)
        publisher.publish(torch.compile(made), merge=True)
    assert version_in(bucket) == digest(expected(made))
