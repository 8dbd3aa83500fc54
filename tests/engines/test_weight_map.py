"""Where weights lie in a running model, learned from its loader without loading anything."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import pytest
import torch

from support.fused_model import SCHEMA, SHAPES, Fused, arrays, contents, loaded, tensors_of
from weightwire.engines.box import Box
from weightwire.engines.weight_map import Unpatchable, UnpatchableKind, learn
from weightwire.errors import EngineError
from weightwire.weights.dtypes import DTYPES

Weights = Iterable[tuple[str, torch.Tensor]]


@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (0, 2), (1, 2), (3, 4)])
def test_the_map_matches_the_loader(rank: int, ranks: int) -> None:
    model, bits = Fused(rank, ranks), arrays()
    mapped = learn(model, model.load_weights, SCHEMA)
    assert not mapped.unpatchable
    for name, tensor in tensors_of(bits).items():
        for copy in mapped.copies[name]:
            copy.target_view.copy_(copy.source_in(tensor.reshape(-1)))
    assert contents(model) == loaded(bits, rank, ranks)


@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (1, 2), (3, 4)])
def test_single_positions_are_mapped(rank: int, ranks: int) -> None:
    model, bits = Fused(rank, ranks), arrays()
    mapped = learn(model, model.load_weights, SCHEMA)
    for name, shape in SHAPES.items():
        at = np.flatnonzero(np.random.default_rng(1).random(np.prod(shape)) < 0.3)
        for copy in mapped.copies[name]:
            found = copy.box.select(at)
            flat = copy.target.as_strided((copy.target.untyped_storage().nbytes() // 2,), (1,), 0)
            values = tensors_of(bits)[name].reshape(-1)[at][found.chosen]
            flat[torch.from_numpy(found.positions.astype(np.int64)) + copy.box.target_start] = values
    held, whole = contents(model), loaded(bits, rank, ranks)
    everything = learn(model, model.load_weights, SCHEMA)
    assert everything.copies.keys() == SHAPES.keys()
    for name in held:  # either the old value, or the one from the loader
        now, then = (np.frombuffer(one[name], np.uint16) for one in (held, whole))
        assert ((now == then) | (now == 0)).all()
        assert (now == then).sum() > 0.1 * len(now)


def test_learning_the_map_writes_nothing() -> None:
    model, bits = Fused(), arrays()
    model.load_weights(tensors_of(bits).items())
    learn(model, model.load_weights, SCHEMA)
    assert contents(model) == loaded(bits)


def test_a_transposed_copy_is_mapped() -> None:
    model = torch.nn.Linear(6, 4, bias=False)

    def load(weights: Weights) -> None:
        for _, value in weights:
            model.weight.data.copy_(value.t())

    [copy] = learn(model, load, {"w": (DTYPES["F32"], (6, 4))}).copies["w"]
    found = copy.box.select(np.arange(24))
    assert found.positions.tolist() == [4 * 0 + 6 * column + row for row in range(6) for column in range(4)]


def test_tied_parameters_share_one_place() -> None:
    model = Fused()
    model.head = model.embed
    mapped = learn(model, model.load_weights, SCHEMA)
    assert mapped.unused == {"head.weight"}
    assert mapped.copies.keys() == SHAPES.keys() - {"head.weight"}


def test_notes_that_several_tensors_write_to_one_place_are_left_out() -> None:
    """vLLM loads the shapes of q, k and v into one parameter of a packed layer. None of them is a weight."""
    model = torch.nn.Module()
    model.shape = torch.nn.Parameter(torch.zeros(2, dtype=torch.int64), requires_grad=False)
    model.one = torch.nn.Parameter(torch.zeros(3, dtype=torch.int64), requires_grad=False)

    def load(weights: Weights) -> None:
        for name, value in weights:
            (model.one if name == "one" else model.shape).data.copy_(value)

    note, one = (DTYPES["I64"], (2,)), (DTYPES["I64"], (3,))
    mapped = learn(model, load, {"q.shape": note, "k.shape": note, "one": one})
    assert mapped.copies.keys() == {"one"}
    assert not mapped.unused


def cast(model: torch.nn.Module, value: torch.Tensor) -> None:
    model.weight.data.copy_(value)


def compute(model: torch.nn.Module, value: torch.Tensor) -> None:
    model.weight.data.copy_(value.to(torch.float32) + 1)


def add(model: torch.nn.Module, value: torch.Tensor) -> None:
    model.weight.data.add_(value)


def repeat(model: torch.nn.Module, value: torch.Tensor) -> None:
    model.weight.data.copy_(value[:1])


@pytest.mark.parametrize(
    ("write", "why"),
    [
        (cast, "the loader casts it to float32"),
        (compute, "the loader computes it"),
        (add, "the loader writes it with aten.add_.Tensor"),
    ],
)
def test_weights_that_the_loader_casts_or_computes_cannot_be_patched(
    write: Callable[[torch.nn.Module, torch.Tensor], None], why: str
) -> None:
    model = torch.nn.Linear(4, 4, bias=False)
    before = model.weight.detach().clone()

    def load(weights: Weights) -> None:
        for _, value in weights:
            write(model, value)

    mapped = learn(model, load, {"w": (DTYPES["F16"], (4, 4))})
    assert {name: str(one) for name, one in mapped.unpatchable.items()} == {"w": why}
    assert (mapped.unpatchable["w"].kind is UnpatchableKind.CAST) == ("casts" in why)
    assert "w" not in mapped.copies
    assert torch.equal(model.weight, before)


def test_weights_that_the_loader_repeats_cannot_be_patched() -> None:
    model = torch.nn.Linear(4, 4, bias=False)

    def load(weights: Weights) -> None:
        for _, value in weights:
            repeat(model, value)

    assert learn(model, load, {"w": (DTYPES["F32"], (4, 4))}).unpatchable == {
        "w": Unpatchable(UnpatchableKind.REPEATED, "the loader repeats it")
    }


def put_together(model: torch.nn.Module, values: list[torch.Tensor]) -> None:
    model.weight.data.copy_(torch.cat(values))


def put_out(model: torch.nn.Module, values: list[torch.Tensor]) -> None:
    torch.cat(values, out=model.weight.data)


def put_each(model: torch.nn.Module, values: list[torch.Tensor]) -> None:
    torch._foreach_copy_([model.weight.data[:2], model.weight.data[2:]], values)


def put_data(model: torch.nn.Module, values: list[torch.Tensor]) -> None:
    model.weight.data = torch.cat(values)


def put_numbers(model: torch.nn.Module, values: list[torch.Tensor]) -> None:
    model.weight.data.fill_(values[0][0, 0].item())


def put_nothing(model: torch.nn.Module, values: list[torch.Tensor]) -> None:
    pass


def put_half(model: torch.nn.Module, values: list[torch.Tensor]) -> None:
    model.weight.data[:2].copy_(values[0])


def put_twice(model: torch.nn.Module, values: list[torch.Tensor]) -> None:
    put_half(model, values)
    model.weight.data[1:3].copy_(values[1])
    model.weight.data[3:].copy_(values[1][1:])


@pytest.mark.parametrize(
    ("put", "outcome"),
    [
        (put_together, {"a", "b"}),
        (put_out, "writes to its weights with"),
        (put_each, "writes to its weights with"),
        (put_data, "replaces it instead of filling it"),
        (put_numbers, {"a"}),
        (put_nothing, "parameter 'weight': no tensor of the run fills all of it"),
        (put_half, "parameter 'weight': no tensor of the run fills all of it"),
        (put_twice, "parameter 'weight': the model's loader writes parts of it twice"),
    ],
)
def test_a_loader_that_cannot_be_traced_is_refused_and_changes_nothing(
    put: Callable[[torch.nn.Module, list[torch.Tensor]], None], outcome: str | set[str]
) -> None:
    model = torch.nn.Linear(4, 4, bias=False)
    before, place = model.weight.detach().clone(), model.weight.data_ptr()

    def load(weights: Weights) -> None:
        put(model, [value for _, value in weights])

    schema = {"a": (DTYPES["F32"], (2, 4)), "b": (DTYPES["F32"], (2, 4))}
    if isinstance(outcome, set):
        assert learn(model, load, schema).unpatchable.keys() == outcome
    else:
        with pytest.raises(EngineError, match=outcome):
            learn(model, load, schema)
    assert torch.equal(model.weight, before)
    assert model.weight.data_ptr() == place


def test_a_loader_that_replaces_parameters_is_refused_and_undone() -> None:
    model = torch.nn.Linear(4, 4, bias=False)
    weight = model.weight

    def load(weights: Weights) -> None:
        for _, value in weights:
            model.weight = torch.nn.Parameter(value)

    with pytest.raises(EngineError, match="replaces it instead of filling it"):
        learn(model, load, {"w": (DTYPES["F32"], (4, 4))})
    assert model.weight is weight


def test_a_checkpoint_of_another_model_is_refused_by_name() -> None:
    model = Fused()
    with pytest.raises(EngineError, match=r"at tensor 'other'.*KeyError") as caught:
        learn(model, model.load_weights, {**SCHEMA, "other": (DTYPES["BF16"], (1,))})
    assert caught.value.hint
    with pytest.raises(EngineError, match=r"layer\.norm\.weight"):
        learn(model, model.load_weights, {**SCHEMA, "layer.norm.weight": (DTYPES["BF16"], (3, 5))})


def test_boxes_join_contiguous_dimensions() -> None:
    whole, target = torch.empty(8, 6), torch.empty(20, 6)
    assert Box.of(whole[2:5], target[7:10]) == Box((18,), 12, (1,), 42, (1,))
    assert Box.of(whole[:, 2:4], target[:8, :2]) == Box((8, 2), 2, (6, 1), 0, (6, 1))
    assert Box.of(whole[0, 0], target[3, 1]).is_run
    assert Box.of(whole[:0], target[:0]).count == 0
    assert not Box.of(whole[:1].expand(8, 6), target[:8]).is_nested
