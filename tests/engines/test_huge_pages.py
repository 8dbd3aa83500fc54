"""Weights keep their bits and their places when they move to huge pages."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from weightwire.engines import huge_pages
from weightwire.engines.huge_pages import move_to_huge_pages

HUGE = 2 << 20


def kilobytes_in_huge_pages(address: int) -> int:
    """Of the mapping at this address."""
    is_inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if "-" in first and not first.endswith(":"):
            begin, end = (int(one, 16) for one in first.split("-"))
            is_inside = begin <= address < end
        elif is_inside and first == "AnonHugePages:":
            return int(rest[0])
    return 0


@pytest.mark.skipif(sys.platform != "linux" or not huge_pages._is_offered(), reason="needs huge pages")
def test_large_tensors_are_moved_and_unchanged() -> None:
    large = torch.arange(8 * HUGE // 4, dtype=torch.int32)
    tensors = [large, large.view(-1)[5:], torch.ones(3)]  # a view of the same memory, and a tensor that is too small
    before, place = large.clone(), large.data_ptr()
    moved = move_to_huge_pages(tensors)
    if not moved:
        pytest.skip("this kernel cannot move pages at once, or has none that are free")
    assert moved in (7 * HUGE, 8 * HUGE)
    assert kilobytes_in_huge_pages(place + HUGE) >= moved >> 10
    assert large.data_ptr() == place
    assert torch.equal(large, before)


def test_nothing_happens_where_the_system_does_not_offer_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(huge_pages, "_SETTING", tmp_path / "missing")
    assert move_to_huge_pages([torch.ones(4 * HUGE)]) == 0
    (tmp_path / "missing").write_text("always madvise [never]\n")
    assert move_to_huge_pages([torch.ones(4 * HUGE)]) == 0


def test_tensors_elsewhere_are_left_alone() -> None:
    assert move_to_huge_pages([torch.empty(4 * HUGE, device="meta")]) == 0
