"""A model that is rearranged after loading is patched in place, in all copies of its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.fused_model import Arrays, changed, contents, holding, save, tensors_of, weights_of
from support.packed_model import (
    Packed,
    everything,
    is_part,
    loader_of,
    packed_arrays,
    process,
    processed,
    schema,
    started,
)
from weightwire import diff
from weightwire.delta.file import Delta
from weightwire.engines.live_model import LiveModel
from weightwire.engines.relaid_model import RelaidModel, skeleton_of
from weightwire.errors import EngineError
from weightwire.weights.dtypes import DTYPES

RANKS = [(0, 1), (0, 2), (1, 2)]


def patch_of(before: Arrays, after: Arrays) -> Delta:
    return diff(weights_of(before), weights_of(after), coo=True)


def live_model(model: Packed, bits: Arrays) -> LiveModel:
    return LiveModel(model, model.load_weights, relaid=started(bits, model))


@pytest.mark.parametrize(("rank", "ranks"), RANKS)
def test_patches_give_the_same_bits_as_a_load(rank: int, ranks: int, tmp_path: Path) -> None:
    model, bits = Packed(rank=rank, ranks=ranks), packed_arrays()
    live = live_model(model, bits)
    assert live.adopt(save(bits, tmp_path / "first"), holding(bits, 1))
    for version in range(2, 7):
        after = changed(bits, version, chance=0.2)
        live.stage(patch_of(bits, after), holding(after, version)).swap()
        bits = after
        assert everything(model) == processed(bits, rank=rank, ranks=ranks)
    assert live.holding == holding(bits, 6)


@pytest.mark.parametrize(("rank", "ranks"), RANKS)
def test_a_reload_gives_the_same_bits_as_a_load(rank: int, ranks: int, tmp_path: Path) -> None:
    model, bits = Packed(rank=rank, ranks=ranks), packed_arrays(7)
    live = live_model(model, packed_arrays())
    assert not live.adopt(save(bits, tmp_path / "other"), holding(bits, 1))
    live.reload(tmp_path / "other", holding(bits, 1))
    assert everything(model) == processed(bits, rank=rank, ranks=ranks)


def test_undo_restores_copies_too(tmp_path: Path) -> None:
    model, bits = Packed(), packed_arrays()
    live = live_model(model, bits)
    live.reload(save(bits, tmp_path / "first"), holding(bits, 1))
    after = changed(bits, 2, chance=0.5)
    staged = live.stage(patch_of(bits, after), holding(after, 2))
    staged.swap()
    assert everything(model) != processed(bits)
    staged.undo()
    assert everything(model) == processed(bits)


def test_copies_are_part_of_the_proof(tmp_path: Path) -> None:
    model, bits = Packed(), packed_arrays()
    live, first = live_model(model, bits), save(bits, tmp_path / "first")
    assert live.adopt(first, holding(bits, 1))
    model.layers[1].attention.keys_t.data.view(torch.int16)[3, 4] ^= 1
    assert not live.adopt(first, holding(bits, 1))


def test_weights_that_were_replaced_are_found_again(tmp_path: Path) -> None:
    model, bits = Packed(), packed_arrays()
    live = live_model(model, bits)
    assert live.adopt(save(bits, tmp_path / "first"), holding(bits, 1))
    norm = model.layers[1].norm
    model.layers[1].norm = torch.nn.Parameter(norm.data.clone(), requires_grad=False)
    after = changed(bits, 2, chance=0.5)
    with pytest.raises(EngineError, match="parameters were moved or replaced"):
        live.stage(patch_of(bits, after), holding(after, 2))
    live.reload(save(after, tmp_path / "second"), holding(after, 2))
    assert everything(model) == processed(after)


def test_weights_that_were_replaced_by_others_are_refused() -> None:
    model = Packed()
    relaid = started(packed_arrays(), model)
    model.layers[1].norm = torch.nn.Parameter(torch.zeros(3), requires_grad=False)
    for _ in range(2):
        with pytest.raises(
            EngineError, match=r"1\.norm: has another layout than after a probe, since it was"
        ) as caught:
            relaid.learn(schema())
        assert caught.value.hint == "restart the engine"


def test_layers_that_were_wrapped_are_not_replaced(tmp_path: Path) -> None:
    """As vLLM does for adapters."""
    model, bits = Packed(), packed_arrays()
    live, attention = live_model(model, bits), model.layers[0].attention
    model.layers[0].attention = torch.nn.Module()
    model.layers[0].attention.base_layer = attention
    other = packed_arrays(7)
    live.reload(save(other, tmp_path / "other"), holding(other, 1))
    model.layers[0].attention = attention
    assert everything(model) == processed(other)


def test_learning_changes_nothing_and_needs_no_checkpoint(tmp_path: Path) -> None:
    model, bits = Packed(), packed_arrays()
    relaid = started(bits, model)
    relaid.learn(schema())
    assert everything(model) == processed(bits)
    assert relaid.moved == [f"layers.{layer}.experts.{name}" for layer in (0, 1) for name in ("up", "down")]
    assert not relaid.is_as_loaded


def test_a_model_that_stays_as_loaded_is_recognized() -> None:
    model = Packed()
    assert started(packed_arrays(), model, lambda layer: None).is_as_loaded


def test_layers_of_the_same_form_are_probed_once() -> None:
    calls = {2: 0, 9: 0}
    for layers in calls:

        def counted(module: torch.nn.Module, layers: int = layers) -> None:
            calls[layers] += 1
            process(module)

        started(packed_arrays(layers=layers), Packed(layers=layers), counted)
    assert calls[2] == calls[9]


def test_the_number_of_writes_does_not_grow_with_the_experts(tmp_path: Path) -> None:
    writes = []
    for experts in (2, 32):
        model, bits = Packed(experts), packed_arrays(experts=experts)
        live = live_model(model, bits)
        live.reload(save(bits, tmp_path / str(experts)), holding(bits, 1))
        after = changed(bits, 2, chance=0.5)
        staged = live.stage(patch_of(bits, after), holding(after, 2))
        writes.append(len(staged._writes))
        staged.swap()
        assert everything(model) == processed(after, experts=experts)
    assert writes[0] == writes[1]


# --- computed layers -------------------------------------------------------------------------------------------


def squared(module: torch.nn.Module) -> None:
    """Computes something from weights that are kept, and from some that are not."""
    for one in module.modules():
        if hasattr(one, "kv"):
            one.squared = torch.nn.Parameter(one.kv.data.abs() * 2, requires_grad=False)
        elif hasattr(one, "packer") and not one.packer.is_done:
            one.packer.is_done = True
            one.down = torch.nn.Parameter(one.down.data.flip(0).abs(), requires_grad=False)


def squared_contents(bits: Arrays) -> dict[str, bytes]:
    model = Packed()
    model.load_weights(tensors_of(bits).items())
    squared(model)
    return contents(model)


def test_computed_layers_are_computed_again_by_the_engines_own_code(tmp_path: Path) -> None:
    model, bits = Packed(), packed_arrays()
    live = LiveModel(model, model.load_weights, relaid=started(bits, model, squared))
    assert live.adopt(save(bits, tmp_path / "first"), holding(bits, 1))
    for version in range(2, 5):
        after = changed(bits, version, chance=0.2)
        staged = live.stage(patch_of(bits, after), holding(after, version))
        staged.swap()
        assert contents(model) == squared_contents(after)
        staged.undo()
        assert contents(model) == squared_contents(bits)
        live.stage(patch_of(bits, after), holding(after, version)).swap()
        bits = after
    other = packed_arrays(9)
    live.reload(save(other, tmp_path / "other"), holding(other, 9))
    assert contents(model) == squared_contents(other)


def test_only_touched_layers_are_computed_again(tmp_path: Path) -> None:
    model, bits = Packed(layers=4), packed_arrays(layers=4)
    calls = []

    def counted(module: torch.nn.Module) -> None:
        calls.append(module)
        squared(module)

    live = LiveModel(model, model.load_weights, relaid=started(bits, model, counted))
    live.adopt(save(bits, tmp_path / "first"), holding(bits, 1))
    after = {**bits, "2.kv": bits["2.kv"] ^ np.uint16(1)}
    staged = live.stage(patch_of(bits, after), holding(after, 2))
    calls.clear()
    staged.swap()
    assert len(calls) == 1


def test_a_failing_computation_restores_the_old_weights(tmp_path: Path) -> None:
    model, bits = Packed(), packed_arrays()
    fails: list[bool] = []

    def failing(module: torch.nn.Module) -> None:
        squared(module)
        if fails and fails.pop():
            raise RuntimeError("the engine's code fails")

    live = LiveModel(model, model.load_weights, relaid=started(bits, model, failing))
    live.adopt(save(bits, tmp_path / "first"), holding(bits, 1))
    after = changed(bits, 2)
    staged = live.stage(patch_of(bits, after), holding(after, 2))
    fails += [True, False]  # the second layer fails
    with pytest.raises(RuntimeError, match="the engine's code fails"):
        staged.swap()
    assert contents(model) == squared_contents(bits)
    assert live.adopt(tmp_path / "first", holding(bits, 1))


def test_computed_weights_are_part_of_the_proof(tmp_path: Path) -> None:
    model, bits = Packed(), packed_arrays()
    live, first = LiveModel(model, model.load_weights, relaid=started(bits, model, squared)), save(bits, tmp_path / "a")
    assert live.adopt(first, holding(bits, 1))
    model.layers[1].attention.squared.data.view(torch.int16)[0, 0] ^= 1
    assert not live.adopt(first, holding(bits, 1))


# --- layouts that cannot be patched ------------------------------------------------------------------------------


def lossy(module: torch.nn.Module) -> None:
    for one in module.modules():
        if hasattr(one, "packer"):
            one.down = torch.nn.Parameter(one.down.data[:, :, 1:].contiguous(), requires_grad=False)


def hidden(module: torch.nn.Module) -> None:
    """Keeps a copy that cannot be seen, besides something that is computed."""
    squared(module)
    for one in module.modules():
        if hasattr(one, "packer"):
            one.up = torch.nn.Parameter(torch.zeros(3), requires_grad=False)


@pytest.mark.parametrize(
    ("work", "problem"),
    [
        (lossy, "layers.0.experts.down: 24 of 144 weights are nowhere after loading"),
        (hidden, "layers.0.experts.up: its weights are nowhere after loading"),
    ],
)
def test_weights_that_a_probe_cannot_find_are_reported_by_name(work: Any, problem: str) -> None:
    relaid = started(packed_arrays(), Packed(), work)
    assert relaid.problem == problem
    assert not relaid.is_as_loaded


def test_a_running_model_that_differs_from_a_probe_is_reported() -> None:
    model = Packed()
    skeleton = skeleton_of(model, is_part)
    relaid = RelaidModel(skeleton, process, is_part, loader_of)
    relaid.find_places(model)
    assert relaid.problem == "layers.0.attention.kv: is not where a probe has found it"
    process(model)
    model.layers[1].attention.as_view = model.layers[1].attention.as_view.clone()
    relaid = RelaidModel(skeleton, process, is_part, loader_of)
    relaid.find_places(model)
    assert relaid.problem == "layers.1.attention.as_view: is a copy, but a view in a probe"


def test_experts_that_the_run_lacks_are_named() -> None:
    relaid = started(packed_arrays(), Packed())
    less = {name: one for name, one in schema().items() if "experts.2." not in name}
    with pytest.raises(EngineError, match=r"'layers\.0\.experts\.up': no tensor of the run fills all of it"):
        relaid.learn(less)


def drop_note(module: torch.nn.Module) -> None:
    process(module)
    for one in module.modules():
        if hasattr(one, "note"):
            del one.note


def read_note(module: torch.nn.Module) -> None:
    for one in module.modules():
        if hasattr(one, "note"):
            one.note_as_number = float(one.note)
    drop_note(module)


def started_with_notes(work: Any) -> RelaidModel:
    """Layers have a scalar that the run may fill, in layer 1."""
    model = Packed()
    for layer in model.layers:
        layer.note = torch.nn.Parameter(torch.zeros(1, dtype=torch.bfloat16), requires_grad=False)
    relaid = started(packed_arrays(), model, work)

    def loader(form: Packed) -> Any:
        def load(weights: Any) -> None:
            for name, value in weights:
                if name == "note":
                    form.layers[1].note.data.copy_(value)
                else:
                    form.load_weights([(name, value)])

        return load

    relaid._loader_of = loader
    return relaid


WITH_NOTE = schema() | {"note": (DTYPES["BF16"], (1,))}


def test_a_scalar_without_effect_may_be_in_a_run_or_not() -> None:
    relaid = started_with_notes(drop_note)
    assert not relaid.problem
    assert relaid.learn(schema()).copies.keys() == schema().keys()
    assert relaid.learn(WITH_NOTE).copies["note"] == ()


def test_a_scalar_that_becomes_a_number_is_refused_if_the_run_fills_it() -> None:
    relaid = started_with_notes(read_note)
    assert not relaid.problem
    assert relaid.learn(schema()).copies.keys() == schema().keys()
    with pytest.raises(EngineError, match=r"'note': the engine reads parameter 'layers\.1\.note' as a number"):
        relaid.learn(WITH_NOTE)


def test_a_loader_that_fails_half_way_changes_nothing(tmp_path: Path) -> None:
    model, bits = Packed(), packed_arrays()
    relaid = started(bits, model)
    other = {**bits, "0.unknown": np.zeros(3, np.uint16)}
    live = LiveModel(model, model.load_weights, relaid=relaid)
    with pytest.raises(EngineError, match=r"at tensor '0\.unknown'.*KeyError"):
        live.reload(save(other, tmp_path / "other"), holding(other, 1))
    assert everything(model) == processed(bits)
    assert not live.mixed


def test_weights_that_are_cast_and_then_rearranged_are_refused() -> None:
    relaid = started(packed_arrays(), Packed())
    wide = schema()
    wide["1.experts.0.up"] = (DTYPES["F32"], wide["1.experts.0.up"][1])
    with pytest.raises(EngineError, match=r"'layers\.1\.experts\.up': computed or cast by the loader") as caught:
        relaid.learn(wide)
    assert caught.value.hint


def test_a_loader_that_writes_to_the_running_model_is_refused() -> None:
    model, bits = Packed(), packed_arrays()
    relaid = started(bits, model)
    relaid._loader_of = lambda form: model.load_weights
    with pytest.raises(EngineError, match="that the engine has rearranged"):
        relaid.learn(schema())
    assert everything(model) == processed(bits)
