"""Draft models, and the draft's weights in a checkpoint."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from support.fused_model import Arrays, Fused, arrays, holding, save
from weightwire.engines.live_model import LiveModel
from weightwire.engines.vllm.drafts import draft_model, draft_names, is_in_checkpoint
from weightwire.errors import EngineError
from weightwire.weights.checkpoint import Checkpoint

DEEPSEEK = SimpleNamespace(num_hidden_layers=3, num_nextn_predict_layers=1)


@pytest.mark.parametrize(
    ("name", "is_draft"),
    [
        ("model.layers.3.eh_proj.weight", True),
        ("model.layers.2.mlp.up_proj.weight", False),
        ("model.layers.4.mlp.up_proj.weight", False),
        ("mtp.layers.0.mlp.up_proj.weight", True),
        ("model.mtp_layers.0.input_proj.weight", True),
        ("lm_head.weight", False),
    ],
)
def test_the_weights_of_a_draft_are_known_by_name(name: str, is_draft: bool) -> None:
    assert draft_names(DEEPSEEK)(name) is is_draft


def test_a_model_without_draft_layers_has_no_draft() -> None:
    assert not draft_names(SimpleNamespace(num_hidden_layers=3))("model.layers.3.eh_proj.weight")
    assert not draft_names(SimpleNamespace())("model.layers.3.eh_proj.weight")


def test_the_draft_model_of_a_server_is_named() -> None:
    draft = SimpleNamespace(model="small")
    assert draft_model(SimpleNamespace(speculative_config=SimpleNamespace(draft_model_config=draft))) == "small"
    assert draft_model(SimpleNamespace(speculative_config=None)) == ""


@pytest.mark.parametrize(
    ("method", "draft", "model_weights", "is_inside"),
    [
        ("mtp", "big", "", True),
        ("mtp", "s3://models/big", "s3://models/big", True),
        ("mtp", "small", "", False),
        ("draft_model", "big", "", False),
    ],
)
def test_layers_of_the_served_checkpoint_are_not_a_separate_draft(
    method: str, draft: str, model_weights: str, is_inside: bool
) -> None:
    speculation = SimpleNamespace(method=method, draft_model_config=SimpleNamespace(model=draft))
    target = SimpleNamespace(model="big", model_weights=model_weights)
    assert is_in_checkpoint(SimpleNamespace(speculative_config=speculation, model_config=target)) is is_inside
    assert not is_in_checkpoint(SimpleNamespace(speculative_config=None, model_config=target))


class SkippingDraft(Fused):
    def load_weights(self, weights: object) -> None:
        super().load_weights((name, one) for name, one in weights if "mtp." not in name)  # type: ignore[attr-defined]


def test_a_model_need_not_use_the_weights_of_a_draft(tmp_path: Path) -> None:
    bits: Arrays = arrays()
    bits["mtp.0.weight"] = bits["layer.q.weight"] + 1
    model, path = SkippingDraft(), save(bits, tmp_path)
    LiveModel(model, model.load_weights, is_draft=draft_names(DEEPSEEK)).reload(path, holding(bits, 1))
    with pytest.raises(EngineError, match=r"'mtp\.0\.weight': the model does not use it"):
        LiveModel(model, model.load_weights).reload(path, holding(bits, 1))
    assert "mtp.0.weight" in Checkpoint(path)
