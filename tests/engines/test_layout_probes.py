"""Where weights went is read off from numbers in their bits."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from weightwire.engines.layout_probes import ProcessedLayout, Relayout, probe


class Plain(torch.nn.Module):  # type: ignore[misc]
    def __init__(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)


def replace(layer: torch.nn.Module, weight: torch.Tensor) -> None:
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)


def probed(layer: torch.nn.Module, process: Callable[[torch.nn.Module], object]) -> ProcessedLayout:
    return probe(layer, process, lambda value: False)


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float32, torch.float64])
def test_more_weights_than_numbers_fit_into_a_unit(dtype: torch.dtype) -> None:
    rows, columns = 300, 250  # 75,000 weights: more than 16 bits, and more than two digits of 8 bits
    found = probed(Plain(rows, columns, dtype=dtype), lambda layer: replace(layer, layer.weight.data.t().contiguous()))
    [relayout] = found.relayouts[".weight"]
    at = np.arange(rows * columns).reshape(columns, rows).T.reshape(-1)
    assert (relayout.table == at).all()
    assert found.moved == {".weight"}
    assert not found.problem


def test_slices_that_are_laid_out_alike_share_a_table() -> None:
    found = probed(Plain(50, 6, 4), lambda layer: replace(layer, layer.weight.data.transpose(1, 2).contiguous()))
    [relayout] = found.relayouts[".weight"]
    assert (relayout.slices, relayout.target_stride, len(relayout.table)) == (50, 24, 24)


def test_slices_in_another_order_have_one_table() -> None:
    found = probed(Plain(5, 6, 4), lambda layer: replace(layer, layer.weight.data.flip(0)))
    [relayout] = found.relayouts[".weight"]
    assert (relayout.slices, len(relayout.table)) == (1, 120)
    assert relayout.table[0] == 96


def test_a_weight_with_several_places_has_several_tables() -> None:
    found = probed(Plain(4, 4), lambda layer: replace(layer, torch.cat([layer.weight.data, layer.weight.data])))
    places = {tuple(one.table[:2]) for one in found.relayouts[".weight"]}
    assert places == {(0, 1), (16, 17)}


def test_padding_of_any_value_is_not_a_weight() -> None:
    pad = torch.nn.functional.pad
    found = probed(Plain(4, 4), lambda layer: replace(layer, pad(layer.weight.data, (0, 2), value=1.5)))
    [relayout] = found.relayouts[".weight"]
    assert (relayout.table == [6 * row + column for row in range(4) for column in range(4)]).all()
    assert relayout.fits(torch.empty(24, dtype=torch.bfloat16))
    assert not relayout.fits(torch.empty(16, dtype=torch.bfloat16))


def test_memory_that_was_never_initialized_is_ignored() -> None:
    numbers = iter(range(1000))

    def process(layer: torch.nn.Module) -> None:
        layer.scratch = torch.full((3,), float(next(numbers)))

    assert probed(Plain(4, 4), process) == ProcessedLayout({}, frozenset())


def test_constants_are_no_weights() -> None:
    def process(layer: torch.nn.Module) -> None:
        layer.scale = torch.ones(3)

    assert probed(Plain(4, 4), process) == ProcessedLayout({}, frozenset())


def test_a_value_that_is_computed_is_told_from_a_copy() -> None:
    found = probed(Plain(4, 4), lambda layer: replace(layer, layer.weight.data.view(torch.int16) + 1))
    assert found.recomputed == (".weight",)
    assert not found.problem
    assert not found.relayouts


def test_a_relayout_compares_sizes() -> None:
    assert Relayout("a", 4, np.arange(4)).fits(torch.empty(4))


class Handle:
    """An object that a probe cannot look into."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight.clone()


def test_an_object_that_may_hide_a_copy_is_a_problem() -> None:
    def hide(layer: torch.nn.Module) -> None:
        layer.handle = Handle(layer.weight)

    assert probed(Plain(4, 3), hide).problem == "handle: keeps weights where they cannot be reached (Handle)"
    assert probed(Plain(4, 3), lambda layer: setattr(layer, "bound", Handle)).problem == ""
    known = Plain(4, 3)
    known.handle = Handle(torch.zeros(1))  # was there before any weight was processed
    assert probed(known, lambda layer: None).problem == ""


def test_a_number_that_is_computed_from_weights_is_a_problem() -> None:
    def read(layer: torch.nn.Module) -> None:
        layer.largest = float(layer.weight.view(torch.int16).max())

    assert probed(Plain(4, 3), read).problem == "largest: is a number that is computed from weights"


def test_a_number_that_changes_by_itself_is_no_problem() -> None:
    calls: list[int] = []

    def count(layer: torch.nn.Module) -> None:
        calls.append(1)
        layer.number = len(calls)

    assert probed(Plain(4, 3), count).problem == ""
