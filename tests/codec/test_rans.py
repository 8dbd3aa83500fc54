"""The entropy coder: a round trip, at the cost of the table."""

from __future__ import annotations

import math

import numpy as np
import pytest

from support.samples import below
from weightwire.codec import rans
from weightwire.codec.frequency_tables import SCALE, Shares, quantise, shares

Plain = tuple[rans.Symbols, Shares]


def section(seed: int, count: int, symbols: int = 20) -> Plain:
    """Symbols with decreasing frequency, and a table for them."""
    values = np.minimum(below(seed, count, symbols), below(seed + 1, count, symbols)).astype(np.uint8)
    return values, shares(quantise(np.bincount(values, minlength=1)), 1) if count else (SCALE,)


def decoder_of(sections: list[Plain], lanes: int) -> rans.Decoder:
    states, words = rans.encode([rans.Section.of(*one) for one in sections], lanes)
    return rans.Decoder(states, np.array(words, np.uint16))


@pytest.mark.parametrize("lanes", [1, 4, 16])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5, 1000])
def test_sections_round_trip_in_order(lanes: int, count: int) -> None:
    sections = [section(1, count), section(2, 7, 250), section(3, count + 1, 2)]
    decoder = decoder_of(sections, lanes)
    for symbols, table in sections:
        assert decoder.section(len(symbols), table).tobytes() == symbols.tobytes()
    decoder.finish()


@pytest.mark.parametrize("lanes", [1, 4, 16])
def test_a_section_may_have_several_tables(lanes: int) -> None:
    one, other = section(1, 500), section(2, 500, 200)
    which = below(3, 1000, 2).astype(np.uint8)
    symbols = np.where(which, np.tile(other[0], 2), np.tile(one[0], 2)).astype(np.uint8)
    mixed = rans.Section(symbols, [one[1], other[1]], which)
    states, words = rans.encode([rans.Section.of(*one), mixed], lanes)
    decoder = rans.Decoder(states, np.array(words, np.uint16))
    assert decoder.section(500, one[1]).tobytes() == one[0].tobytes()
    assert decoder.mixed(mixed.tables, which).tobytes() == symbols.tobytes()
    decoder.finish()


def test_no_symbols_give_the_initial_state_and_no_words() -> None:
    assert rans.encode([], 4) == ([1 << 16] * 4, [])


def test_a_symbol_that_is_certain_costs_nothing() -> None:
    states, words = rans.encode([rans.Section.of(np.zeros(10_000, np.uint8), (SCALE,))], 4)
    assert (states, words) == ([1 << 16] * 4, [])


@pytest.mark.parametrize("lanes", [1, 4, 16])
def test_the_cost_matches_the_table(lanes: int) -> None:
    symbols, table = section(5, 20_000)
    _, words = rans.encode([rans.Section.of(symbols, table)], lanes)
    ideal = -sum(math.log2(table[s] / SCALE) for s in symbols.tolist())
    assert ideal - 16 * lanes <= 16 * len(words) <= 1.001 * ideal + 16 * lanes


def test_more_symbols_use_more_lanes() -> None:
    assert [rans.lanes_for(n) for n in (0, 4095, 4096, 32767, 32768)] == [1, 1, 4, 4, 16]


def test_missing_words_are_rejected() -> None:
    symbols, table = section(6, 500)
    states, words = rans.encode([rans.Section.of(symbols, table)], 1)
    decoder = rans.Decoder(states, np.array(words[:-1], np.uint16))
    with pytest.raises(ValueError, match="too short"):
        decoder.section(500, table)


def test_extra_words_are_rejected() -> None:
    symbols, table = section(6, 500)
    states, words = rans.encode([rans.Section.of(symbols, table)], 1)
    decoder = rans.Decoder(states, np.array([*words, 0], np.uint16))
    decoder.section(500, table)
    with pytest.raises(ValueError, match="does not end"):
        decoder.finish()


def test_decoding_one_symbol_less_is_rejected() -> None:
    symbols, table = section(6, 500)
    decoder = decoder_of([(symbols, table)], 4)
    decoder.section(499, table)
    with pytest.raises(ValueError, match="does not end"):
        decoder.finish()
