"""The bit stream, Golomb codes and varints."""

from __future__ import annotations

import numpy as np
import pytest

from weightwire.codec.bit_stream import BitReader, BitWriter, read_uvarint, unzigzag, uvarint, zigzag


@pytest.mark.parametrize(
    ("value", "raw"),
    [
        (0, "00"),
        (1, "01"),
        (127, "7f"),
        (128, "8001"),
        (300, "ac02"),
        (2**32, "8080808010"),
        (2**64 - 1, "ffffffffffffffffff01"),
    ],
)
def test_varints_round_trip(value: int, raw: str) -> None:
    assert uvarint(value).hex() == raw
    assert read_uvarint(b"?" + bytes.fromhex(raw) + b"?", 1) == (value, 1 + len(raw) // 2)


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        ("", "ends inside a number"),
        ("80", "ends inside a number"),
        ("ffffffffffffffffff", "ends inside a number"),
        ("8000", "shortest form"),
        ("ff00", "shortest form"),
        ("ffffffffffffffffff02", "exceeds 64 bits"),
        ("80808080808080808080", "exceeds 64 bits"),
    ],
)
def test_malformed_varints_are_rejected(raw: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        read_uvarint(bytes.fromhex(raw), 0)


def test_zigzag_maps_signed_to_unsigned_and_back() -> None:
    assert [zigzag(value) for value in (0, -1, 1, -2, 2)] == [0, 1, 2, 3, 4]
    for value in (*range(-300, 300), -(2**63), 2**63 - 1):
        assert unzigzag(zigzag(value)) == value


def test_numbers_fill_bytes_from_the_lowest_bit() -> None:
    bits = BitWriter()
    bits.number(0b101, 3)
    bits.number(0b0, 1)
    bits.number(0b11111, 5)
    assert bits.to_bytes() == bytes([0b1111_0_101, 0b1])


def test_an_empty_stream_takes_no_bytes() -> None:
    assert BitWriter().to_bytes() == b""
    BitReader(b"").finish()


@pytest.mark.parametrize(
    ("value", "order", "written"),
    [
        (0, 0, "0"),
        (1, 0, "10 0"),
        (2, 0, "10 1"),
        (3, 0, "110 00"),
        (0, 2, "0 00"),
        (3, 2, "0 11"),
        (4, 2, "10 000"),
        (5, 2, "10 100"),  # the low bits of 5 + 4, lowest first
    ],
)
def test_golomb_codes_have_the_documented_bits(value: int, order: int, written: str) -> None:
    bits = BitWriter()
    bits.golomb(value, order)
    expected = written.replace(" ", "")
    read = BitReader(bits.to_bytes())
    assert "".join(str(read.number(1)) for _ in expected) == expected


@pytest.mark.parametrize("order", [0, 1, 2, 8])
def test_golomb_codes_round_trip(order: int) -> None:
    values = [*range(600), 2**20, 2**32 - 2**order]
    bits = BitWriter()
    for value in values:
        bits.golomb(value, order)
    read = BitReader(bits.to_bytes())
    assert [read.golomb(order) for _ in values] == values
    read.finish()


def test_an_endless_golomb_code_is_rejected() -> None:
    with pytest.raises(ValueError, match="out of range"):
        BitReader(b"\xff" * 20).golomb(0)
    with pytest.raises(ValueError, match="too short"):
        BitReader(b"\xff").golomb(0)


def test_many_numbers_give_the_same_bits_as_one_by_one() -> None:
    values = np.array([5, 0, 2**64 - 1, 1, 2**33], np.uint64)
    widths = np.array([3, 0, 64, 1, 34])
    many, single = BitWriter(), BitWriter()
    many.numbers(values, widths)
    for value, width in zip(values.tolist(), widths.tolist(), strict=True):
        single.number(value, width)
    assert many.to_bytes() == single.to_bytes()
    assert (BitReader(many.to_bytes()).numbers(widths) == values).all()


def test_reading_past_the_end_is_rejected() -> None:
    read = BitReader(b"\x00")
    read.number(8)
    with pytest.raises(ValueError, match="too short"):
        read.number(1)
    with pytest.raises(ValueError, match="too short"):
        BitReader(b"\x00").numbers(np.array([4, 5]))


@pytest.mark.parametrize(("data", "padded"), [(b"\x01", False), (b"\x01\x00\x00", True)])
def test_remaining_zero_bits_are_accepted(data: bytes, padded: bool) -> None:
    read = BitReader(data)
    read.number(1)
    read.finish(padded=padded)


@pytest.mark.parametrize(("data", "padded"), [(b"\x03", False), (b"\x01\x00", False), (b"\x01\x80", True)])
def test_other_remaining_bits_are_rejected(data: bytes, padded: bool) -> None:
    read = BitReader(data)
    read.number(1)
    with pytest.raises(ValueError, match="too long"):
        read.finish(padded=padded)
