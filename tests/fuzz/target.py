"""A fuzz target: one decoder, the rule that it must keep, and inputs to start from."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType

from weightwire import WeightwireError
from weightwire.codec import _kernel, block_codec, numpy_kernel

ACCEPTED = "accepted"


class Failure(Exception):
    """An outcome that must never happen."""


@dataclass(frozen=True)
class Target:
    """`check` returns "accepted" or the reason to reject an input. Any exception is a finding.

    `mutate` changes a valid input where random bytes would only break it. `seeds` are valid inputs, and `words` the
    texts that its decoder compares with. No input is larger than `largest`.
    """

    name: str
    check: Callable[[bytes], str]
    mutate: Callable[[bytes, random.Random], bytes]
    seeds: Callable[[], Iterable[bytes]]
    words: tuple[str, ...] = ()
    largest: int = 4096


def demand(holds: bool, what: str) -> None:
    if not holds:
        raise Failure(what)


def verdict_of(decode: Callable[[], object]) -> str:
    """The class of a WeightwireError, or "accepted". Other exceptions pass."""
    try:
        decode()
    except WeightwireError as problem:
        demand(bool(problem.message), "an error without a message")
        str(problem).encode()  # it can be printed
        return type(problem).__name__
    return ACCEPTED


@contextmanager
def using(kernel: ModuleType) -> Iterator[None]:
    """Uses one implementation of the codec."""
    before = block_codec.KERNEL
    block_codec.KERNEL = kernel
    try:
        yield
    finally:
        block_codec.KERNEL = before


def with_both(check: Callable[[], str]) -> str:
    """The verdict with the C kernel. It must be the same with NumPy."""
    verdicts = []
    for kernel in (_kernel, numpy_kernel):
        with using(kernel):
            verdicts.append(check())
    demand(verdicts[0] == verdicts[1], f"the kernel says {verdicts[0]}, NumPy {verdicts[1]}")
    return verdicts[0]
