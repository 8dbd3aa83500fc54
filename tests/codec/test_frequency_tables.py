"""Frequency tables: 4096 slots, a share for every symbol, and a round trip of levels."""

from __future__ import annotations

import math

import numpy as np
import pytest

from support.cases import case
from support.samples import below
from weightwire.codec.bit_stream import BitReader, BitWriter
from weightwire.codec.frequency_tables import (
    SCALE,
    gap_table,
    j_of,
    lg,
    quantise,
    read_levels,
    shares,
    split,
    write_levels,
)


def round_trip(levels: tuple[int, ...], most: int = 256) -> tuple[int, ...]:
    bits = BitWriter()
    write_levels(bits, levels)
    read = BitReader(bits.to_bytes())
    found = read_levels(read, most)
    read.finish()
    return found


def test_logarithms_are_rounded_down() -> None:
    for value in [*range(1, 2000), 2**22, 2**22 - 1, 2**31 + 1, 2**40 + 12345]:
        exact = math.log2(value) * 2**24
        assert exact - 64 < lg(value) <= exact + 1e-6 * exact
    assert [lg(2**k) for k in (0, 1, 31, 40)] == [k << 24 for k in (0, 1, 31, 40)]


def test_every_gap_table_covers_all_slots() -> None:
    for j in range(128):
        with case(j):
            raw, go_on, table = gap_table(j)
            assert sum(table) == SCALE
            assert min(table) > 0
            assert len(table) == go_on + 1
            assert raw == max(0, math.ceil((j - 12) / 4))


def test_the_gap_parameter_follows_the_rate() -> None:
    """0 if half are marked, then four more for every halving."""
    assert [j_of(1 << 22, (1 << 21) >> k) for k in range(6)] == [0, 5, 10, 14, 18, 22]
    assert j_of(1 << 22, 1) == 86
    parameters = [j_of(1 << 20, marked) for marked in range(1, 1 << 19, 1009)]
    assert parameters == sorted(parameters, reverse=True)


def test_the_gap_parameter_is_nearly_the_cheapest() -> None:
    for rate in (3, 10, 100, 5000):
        marked = (1 << 20) // rate
        cost = {j: expected_cost(j, marked / 2**20) for j in range(100)}
        assert cost[j_of(1 << 20, marked)] < 1.005 * min(cost.values())


def expected_cost(j: int, rate: float) -> float:
    """Bits for one gap of a geometric distribution, coded with table j."""
    raw, go_on, table = gap_table(j)
    go_on_chance = (1 - rate) ** (1 << raw)
    chances = [(1 - go_on_chance) * go_on_chance**i for i in range(go_on)]
    once = sum(p * -math.log2(table[i] / SCALE) for i, p in enumerate(chances))
    again = go_on_chance**go_on
    return raw + (once + again * -math.log2(table[go_on] / SCALE)) / (1 - again)


def test_levels_follow_counts_in_quarters_of_an_octave() -> None:
    assert quantise(np.array([16, 8, 4, 2, 1, 0, 16])) == (40, 36, 32, 28, 24, 0, 40)
    assert quantise(np.array([1 << 30, 1])) == (40, 1)
    assert quantise(np.array([0, 0, 5, 0])) == (0, 0, 40)


@pytest.mark.parametrize("least", [1, 2])
def test_every_symbol_gets_a_share(least: int) -> None:
    for seed in range(50):
        counts = below(seed, 1 + seed * 5, 1 << (seed % 20)) * (below(seed + 99, 1 + seed * 5, 3) > 0)
        counts[seed % len(counts)] = 1 + seed**3
        table = shares(quantise(counts), least)
        assert sum(table) == SCALE
        assert all(share >= least if count else share == 0 for share, count in zip(table, counts, strict=False))


def test_shares_add_up_for_the_most_symbols() -> None:
    assert shares((40,) * 256, 1) == (16,) * 256
    assert shares((40, *(1,) * 255), 1) == (SCALE - 255 * 3, *(3,) * 255)
    assert sum(shares((*(1,) * 110, 40), 2)) == SCALE


def test_a_single_symbol_has_all_slots() -> None:
    assert shares((40,), 1) == (SCALE,)
    assert shares((0, 0, 40), 2) == (0, 0, SCALE)


@pytest.mark.parametrize("plus", [0, 1, 77, 128, 255, 256])
def test_a_split_gives_both_signs_a_share(plus: int) -> None:
    table = split((4000, 0, 94, 2), plus)
    assert [table[2 * i] + table[2 * i + 1] for i in range(4)] == [4000, 0, 94, 2]
    if plus == 0:
        assert not any(table[::2])
    elif plus == 256:
        assert not any(table[1::2])
    else:
        assert all(share > 0 for i, share in enumerate(table) if i // 2 != 1)
        assert abs(table[0] - 4000 * plus / 256) <= 1


@pytest.mark.parametrize(
    "levels",
    [(40,), (0, 40), (40, 0, 0, 0, 1), (1, 40, 1), (0,) * 255 + (40,), (40, 39) * 128, tuple(range(1, 41))],
)
def test_levels_round_trip(levels: tuple[int, ...]) -> None:
    assert round_trip(levels) == levels


def test_too_many_levels_are_rejected() -> None:
    with pytest.raises(ValueError, match="too many symbols"):
        round_trip((40,) * 64, most=63)


@pytest.mark.parametrize(
    ("numbers", "reason"),
    [
        ([0, 1], "canonical form"),  # one level, 39: no symbol has the top level
        ([0, 2], "out of range"),  # one level, 41
        ([1, 0, 79, 0], "canonical form"),  # 40, 0: the last is absent
        ([2, 79, 0, 0, 80], "canonical form"),  # 0, none more, and then 0 again: that is one run
        ([1, 79, 3], "canonical form"),  # 0, and three more absent ones where there is room for one
        ([1, 0, 81], "out of range"),  # 40, -1
    ],
)
def test_malformed_levels_are_rejected(numbers: list[int], reason: str) -> None:
    bits = BitWriter()
    orders = {(1, 79, 3): [2, 2, 1], (1, 0, 79, 0): [2, 2, 2, 1], (2, 79, 0, 0, 80): [2, 2, 1, 2, 2]}.get(
        tuple(numbers), [2, 2, 2]
    )
    for number, order in zip(numbers, orders, strict=False):
        bits.golomb(number, order)
    with pytest.raises(ValueError, match=reason):
        read_levels(BitReader(bits.to_bytes() + b"\0"), 256)
