"""A model and the draft in its checkpoint are patched together, and what they share is written once."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.fused_model import Arrays, changed, contents, holding, save, tensors_of, weights_of
from support.packed_model import HIDDEN, Attention, Packed, everything, packed_arrays, process, started
from weightwire import diff
from weightwire.delta.file import Delta
from weightwire.engines.live_model import LiveModel
from weightwire.engines.relaid_model import RelaidModel
from weightwire.engines.vllm.model_with_draft import ModelWithDraft, with_draft
from weightwire.errors import EngineError
from weightwire.weights.dtypes import DTYPES

OWN = {"mtp.kv": (2 * HIDDEN, HIDDEN), "mtp.eh": (HIDDEN, 2 * HIDDEN), "mtp.norm": (HIDDEN,)}
SHARED = {"mtp.embed": (10, HIDDEN)}  # in the checkpoint, but the draft uses the model's


class Target(Packed):
    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Parameter(torch.zeros(10, HIDDEN).bfloat16(), False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, value in weights:
            if name == "head":
                self.head.data.copy_(value)
            elif not name.startswith("mtp."):
                super().load_weights([(name, value)])


class Draft(torch.nn.Module):  # type: ignore[misc]
    """Like vLLM's drafts, it makes places for all it uses, of which some are replaced by the model's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = (torch.nn.Parameter(torch.zeros(10, HIDDEN).bfloat16(), False) for _ in range(2))
        self.eh = torch.nn.Parameter(torch.zeros(HIDDEN, 2 * HIDDEN).bfloat16(), False)
        self.norm = torch.nn.Parameter(torch.zeros(HIDDEN).bfloat16(), False)
        self.attention = Attention()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        places = {"mtp.eh": self.eh, "mtp.norm": self.norm, "mtp.kv": self.attention.kv}
        places |= {"embed": self.embed, "mtp.embed": self.embed, "mtp.head": self.head}
        for name, value in weights:
            if name in places:
                places[name].data.copy_(value)


def work(model: torch.nn.Module) -> None:
    """After loading: copies the halves of a projection, and computes something from another one."""
    process(model)
    if isinstance(model, Draft):
        model.doubled = torch.nn.Parameter(model.eh.data.abs() * 2, requires_grad=False)


def bits_of_both(seed: int = 0) -> Arrays:
    random = np.random.default_rng(seed)
    shapes = {"head": (10, HIDDEN), **OWN, **SHARED}
    return packed_arrays(seed) | {name: random.integers(0, 1 << 16, one, np.uint16) for name, one in shapes.items()}


def served(bits: Arrays) -> tuple[Target, Draft]:
    """Both models as an engine has started them."""
    model, draft = Target(), Draft()
    for one in (model, draft):
        one.__dict__["weightwire_layout"] = started(bits, one, work)
    draft.embed, draft.head = model.embed, model.head
    return model, draft


def joined(model: Packed, draft: Draft) -> ModelWithDraft:
    both = with_draft(model, draft)
    assert isinstance(both, ModelWithDraft), both
    return both


def live_model(model: Packed, draft: Draft) -> LiveModel:
    both = joined(model, draft)
    return LiveModel(both.module, model.load_weights, relaid=both, is_draft=lambda name: name.startswith("mtp."))


def check(model: Packed, draft: Draft, bits: Arrays) -> None:
    """Both hold what freshly loaded ones would hold."""
    fresh_model, fresh_draft = Target(), Draft()
    for one in (fresh_model, fresh_draft):
        one.load_weights(tensors_of(bits).items())
        work(one)
    fresh_draft.embed, fresh_draft.head = fresh_model.embed, fresh_model.head
    assert everything(model) == everything(fresh_model)
    assert contents(draft) == contents(fresh_draft)


def patch_of(before: Arrays, after: Arrays) -> Delta:
    return diff(weights_of(before), weights_of(after), coo=True)


def test_patches_write_the_model_and_its_draft(tmp_path: Path) -> None:
    bits = bits_of_both()
    model, draft = served(bits)
    live = live_model(model, draft)
    assert live.adopt(save(bits, tmp_path / "first"), holding(bits, 1))
    for version in range(2, 6):
        after = changed(bits, version, chance=0.2)
        live.stage(patch_of(bits, after), holding(after, version)).swap()
        bits = after
        check(model, draft, bits)
    assert draft.embed is model.embed


def test_a_reload_fills_the_model_and_its_draft(tmp_path: Path) -> None:
    model, draft = served(bits_of_both())
    live, bits = live_model(model, draft), bits_of_both(7)
    assert not live.adopt(save(bits, tmp_path / "other"), holding(bits, 1))
    live.reload(tmp_path / "other", holding(bits, 1))
    check(model, draft, bits)


@pytest.mark.parametrize("place", ["eh", "doubled", "attention.keys_t"])
def test_what_a_draft_holds_is_part_of_the_proof(place: str, tmp_path: Path) -> None:
    bits = bits_of_both()
    model, draft = served(bits)
    live, first = live_model(model, draft), save(bits, tmp_path / "first")
    assert live.adopt(first, holding(bits, 1))
    draft.get_parameter(place).data.view(torch.int16)[3, 4] ^= 1
    assert not live.adopt(first, holding(bits, 1))


def test_a_draft_that_was_changed_from_outside_undoes_the_patch_of_the_model(tmp_path: Path) -> None:
    bits = bits_of_both()
    model, draft = served(bits)
    live = live_model(model, draft)
    assert live.adopt(save(bits, tmp_path / "first"), holding(bits, 1))
    after = changed(bits, 2, chance=0.5)
    staged = live.stage(patch_of(bits, after), holding(after, 2))
    draft.norm.data.view(torch.int16)[:] ^= 1
    with pytest.raises(EngineError, match=r"'mtp\.norm': does not have the expected digest"):
        staged.swap()
    draft.norm.data.view(torch.int16)[:] ^= 1
    check(model, draft, bits)
    assert live.holding == holding(bits, 1)
    assert not live.mixed


def test_undo_restores_the_model_and_its_draft(tmp_path: Path) -> None:
    bits = bits_of_both()
    model, draft = served(bits)
    live = live_model(model, draft)
    assert live.adopt(save(bits, tmp_path / "first"), holding(bits, 1))
    after = changed(bits, 2, chance=0.5)
    staged = live.stage(patch_of(bits, after), holding(after, 2))
    staged.swap()
    check(model, draft, after)
    staged.undo()
    check(model, draft, bits)


def schema_of(bits: Arrays) -> dict[str, Any]:
    return {name: (DTYPES["BF16"], one.shape) for name, one in bits.items()}


def test_shared_weights_have_one_place_and_need_none_in_the_draft() -> None:
    """No tensor of the run fills the draft's output layer, which is the model's."""
    found = joined(*served(bits_of_both())).learn(schema_of(bits_of_both()))
    assert len(found.copies["embed"]) == 1
    assert found.unused == SHARED.keys()
    assert found.copies.keys() >= OWN.keys()


def test_a_run_that_lacks_weights_of_the_draft_is_refused(tmp_path: Path) -> None:
    bits = bits_of_both()
    model, draft = served(bits)
    live = live_model(model, draft)
    assert live.adopt(save(bits, tmp_path / "first"), holding(bits, 1))
    less = {name: one for name, one in bits.items() if name != "mtp.norm"}
    with pytest.raises(EngineError, match=r"MTP layers that vLLM predicts with: parameter 'norm': no tensor") as caught:
        live.reload(save(less, tmp_path / "less"), holding(less, 2))
    assert caught.value.hint == "publish the run with its MTP layers, or serve it without --speculative-config"
    check(model, draft, bits)
    assert not live.mixed
    assert live.adopt(tmp_path / "first", holding(bits, 1))


def test_a_draft_with_weights_that_are_cast_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    schema = schema_of(bits_of_both())
    schema["mtp.norm"] = (DTYPES["F32"], (HIDDEN,))
    with caplog.at_level(logging.WARNING, "vllm.weightwire"):
        found = joined(*served(bits_of_both())).learn(schema)
    assert not found.copies.keys() & OWN.keys()
    assert "the draft is not updated: tensor 'mtp.norm' cannot be patched there (the loader casts it" in caplog.text


# --- drafts that cannot be patched -------------------------------------------------------------------------------


def test_a_draft_that_was_not_seen_is_left_alone() -> None:
    assert with_draft(Target(), None) == "vLLM loaded it in a way that cannot be observed"
    assert with_draft(Target(), Draft()) == "vLLM loaded the model in a way that cannot be observed"


def test_a_draft_in_a_layout_that_is_not_known_is_left_alone() -> None:
    model, draft = served(bits_of_both())
    draft.eh = torch.nn.Parameter(torch.zeros(3), requires_grad=False)
    assert with_draft(model, draft) == "eh: has another layout than after a probe"


def test_a_draft_with_packed_weights_is_left_alone() -> None:
    model, draft = served(bits_of_both())
    packed = draft.eh.detach().clone()
    draft.attention.cpu_linear = lambda x: x @ packed
    assert with_draft(model, draft) == "attention: the weights are packed for the CPU"


def test_a_draft_that_computes_what_it_shares_is_left_alone() -> None:
    model, draft = served(bits_of_both())
    model.embed = draft.doubled  # as if the model held a computed layer of the draft
    assert with_draft(model, draft) == "vLLM computes weights that it shares with the model"


def test_the_layout_of_a_draft_is_that_after_sharing() -> None:
    """The places that it had before would be written, but never read."""
    model, draft = served(bits_of_both())
    layout = draft.__dict__["weightwire_layout"]
    assert isinstance(layout, RelaidModel)
    with_draft(model, draft)
    kept = [place.kept for place in layout._places.values() if place.kept is not None]
    assert any(one is model.embed for one in kept)
