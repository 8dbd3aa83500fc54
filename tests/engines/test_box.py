"""Boxes are found from positions: slices, transpositions and blocked layouts."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch

from weightwire.engines.box import Box, boxes_of

Positions = npt.NDArray[np.int64]


def mapped(boxes: list[Box], count: int) -> Positions:
    """Where the boxes put each position, or -1."""
    found = np.full(count, -1, np.int64)
    for box in boxes:
        selection = box.select(np.arange(count))
        assert (found[selection.chosen] == -1).all()
        found[selection.chosen] = selection.positions + box.target_start
    return found


def blocked(rows: int, columns: int, block: int, pair: int = 1) -> Positions:
    """Where packing in blocks of rows, and pairs of columns, puts each unit."""
    ids = torch.arange(rows * columns).view(rows // block, block, columns // pair, pair)
    order = ids.permute(0, 2, 1, 3).reshape(-1)
    return np.argsort(order.numpy())


@pytest.mark.parametrize(
    ("targets", "count"),
    [
        (np.arange(24), 1),
        (np.arange(24).reshape(4, 6).T.reshape(-1).argsort(), 1),
        (blocked(64, 10, 32), 1),
        (blocked(64, 16, 16, pair=2), 1),
        (np.concatenate([blocked(64, 10, 32)[:480], [900]]), 3),
    ],
)
def test_boxes_give_back_their_positions(targets: Positions, count: int) -> None:
    boxes = list(boxes_of(np.arange(len(targets)), targets))
    assert len(boxes) == count
    assert all(box.is_nested for box in boxes)
    assert (mapped(boxes, len(targets)) == targets).all()


def test_boxes_of_a_slice_keep_their_source_positions() -> None:
    """As on a tensor parallel rank: every second half of a row."""
    sources = np.arange(48).reshape(6, 8)[:, 4:].reshape(-1)
    targets = blocked(6, 4, 3)
    boxes = list(boxes_of(sources, targets))
    found = mapped(boxes, 48)
    assert (found[sources] == targets).all()
    assert (np.delete(found, sources) == -1).all()


def test_any_permutation_has_boxes() -> None:
    targets = np.random.default_rng(0).permutation(500)
    assert (mapped(list(boxes_of(np.arange(500), targets)), 500) == targets).all()


def test_a_box_selects_only_near_its_own_positions() -> None:
    box = Box((3, 2), 20, (10, 2), 5, (2, 1))
    assert box.reach == 23
    found = box.select(np.array([0, 20, 21, 22, 30, 42, 43, 99]))
    assert np.arange(8)[found.chosen].tolist() == [1, 3, 4, 5]
    assert found.positions.tolist() == [0, 1, 2, 5]
