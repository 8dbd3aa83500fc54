"""Every target keeps its rule for its corpus and for mutations of it. Needs neither Atheris nor clang."""

from __future__ import annotations

import random
import signal
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from fuzz.target import ACCEPTED, Failure, Target, verdict_of, with_both
from fuzz.targets import CORPUS, TARGETS, corpus_of
from weightwire.codec import numpy_kernel

MOST_CORPUS = 400_000  # bytes in the repository
MOST_MEMORY = 64 << 20  # bytes that one input may take
SECONDS = 20  # CPU time for one input; the slowest takes a fraction of one

# Mutations per target. These decode with three vector widths and with NumPy, or open files: the others are faster.
SLOW = {"block-ulp": 80, "block-dense": 80, "block-full": 80, "delta": 120, "journal": 120, "state": 150}
MUTATIONS = 300


@contextmanager
def limited() -> Iterator[None]:
    """Fails for an input that hangs."""

    def too_long(*_: object) -> None:
        raise Failure(f"took more than {SECONDS} seconds")

    before = signal.signal(signal.SIGPROF, too_long)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def inputs_of(target: Target) -> list[bytes]:
    return [path.read_bytes() for path in corpus_of(target.name)]


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_every_input_of_the_corpus_keeps_the_rule(target: Target) -> None:
    for path in corpus_of(target.name):
        data = path.read_bytes()
        tracemalloc.start()
        try:
            with limited():
                target.check(data)
            peak = tracemalloc.get_traced_memory()[1]
        except Exception as problem:
            raise AssertionError(f"again: python tests/fuzz/run.py {target.name} --again {path}") from problem
        finally:
            tracemalloc.stop()
        assert peak < MOST_MEMORY, path


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_mutations_of_the_corpus_keep_the_rule(target: Target) -> None:
    """Half of them are mutations of seeds: what fuzzing has found is mostly rejected at once."""
    inputs, seeds, rng = inputs_of(target), list(target.seeds()), random.Random(target.name)
    verdicts: Counter[str] = Counter()
    for _ in range(SLOW.get(target.name, MUTATIONS)):
        data = target.mutate(rng.choice(rng.choice((inputs, seeds))), rng)[: target.largest]
        try:
            with limited():
                verdicts[target.check(data)] += 1
        except Exception as problem:
            raise AssertionError(f"an input of {target.name} that breaks the rule: {data.hex()}") from problem
    assert len(verdicts) > 1, "mutations that all come to the same test nothing"


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_a_target_accepts_some_of_its_seeds(target: Target) -> None:
    """A target that rejects everything would keep any rule."""
    assert any(target.check(data).startswith(ACCEPTED) for data in list(target.seeds())[:5])


def test_every_target_has_a_small_corpus() -> None:
    assert {path.name for path in CORPUS.iterdir()} == set(TARGETS)
    files = [path for path in CORPUS.rglob("*") if path.is_file()]
    assert all(path.suffix == ".input" for path in files)
    assert sum(path.stat().st_size for path in files) <= MOST_CORPUS


def test_an_implementation_that_disagrees_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    data = next(iter(TARGETS["block-full"].seeds()))
    assert TARGETS["block-full"].check(data) == ACCEPTED
    monkeypatch.setattr(numpy_kernel, "decode_block", lambda *_: (None, bytearray(1)))
    with pytest.raises(Failure, match="NumPy says accepted, 1 bytes"):
        TARGETS["block-full"].check(data)


def test_two_verdicts_are_noticed() -> None:
    verdicts = iter(("accepted", "CorruptDelta"))
    with pytest.raises(Failure, match="the kernel says accepted, NumPy CorruptDelta"):
        with_both(lambda: next(verdicts))


def test_an_untyped_exception_is_a_finding() -> None:
    with pytest.raises(KeyError):
        verdict_of(lambda: TARGETS["missing"])


def test_an_input_that_hangs_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "SECONDS", 0.05)
    with pytest.raises(Failure, match="took more than"):
        hang()


def hang() -> None:
    with limited():
        while True:
            pass
