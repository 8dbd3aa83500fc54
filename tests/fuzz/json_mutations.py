"""Changes one value, key or item of JSON at a time. Random bytes seldom get past a JSON parser."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Sequence
from typing import Any

from fuzz.mutations import damage

NUMBERS = (0, 1, -1, 2, 63, 64, 255, 2**31, 2**32, 2**53 - 1, 2**53, 2**63 - 1, 2**63, 2**64, -(2**63), 10**30)
FLOATS = (0.5, -0.5, 1e-320, 1e308, -0.0, float("inf"), float("nan"))
TEXTS = ("", "0", "a", "é", "\ud800", "\0", "../x", "/", ".", "weightwire/1", "weightwire/2", "0" * 32, "f" * 64, "0x1")
VALUES: tuple[Any, ...] = (None, True, False, [], {}, [[]], [None], {"a": {}}, *NUMBERS, *FLOATS, *TEXTS)


def mutate_json(data: bytes, rng: random.Random, words: Sequence[str]) -> bytes:
    """One to three changes of the values of a document, or damage of its bytes if it is not JSON."""
    try:
        root = [json.loads(data)]
        for _ in range(rng.choice((1, 1, 2, 3))):
            change_value(root, rng, words)
        changed = json.dumps(root[0], separators=(",", ":"), ensure_ascii=rng.random() < 0.5)
    except (ValueError, RecursionError):
        return damage(data, rng, data)
    raw = changed.encode(errors="surrogatepass")
    return nest(raw, rng) if rng.random() < 0.02 else repeat_key(raw, rng) if rng.random() < 0.05 else raw


def nest(raw: bytes, rng: random.Random) -> bytes:
    """Thousands of brackets somewhere. A parser that recurses must not overflow its stack."""
    at, opening = rng.randrange(len(raw) + 1), rng.choice((b"[", b'{"a":'))
    return raw[:at] + opening * rng.choice((10, 1000, 3000)) + raw[at:]


def repeat_key(raw: bytes, rng: random.Random) -> bytes:
    """The first member of an object twice."""
    start, end = raw.find(b"{"), raw.find(b",")
    return raw[: end + 1] + raw[start + 1 :] if 0 <= start < end and raw[:1] == b"{" else raw


def change_value(root: list[Any], rng: random.Random, words: Sequence[str]) -> None:
    places = list(places_in(root))
    parent, key = rng.choice(places)
    rng.choice(CHANGES)(parent, key, rng, words)
    if rng.random() < 0.1:  # a value from elsewhere in the document
        other, where = rng.choice(places)
        if present(parent, key) and present(other, where):
            parent[key] = copy.deepcopy(other[where])


def present(parent: Any, key: Any) -> bool:
    return key in parent if isinstance(parent, dict) else key < len(parent)


def places_in(value: Any) -> list[tuple[Any, Any]]:
    """Every container with one of its keys or indices."""
    found: list[tuple[Any, Any]] = []
    waiting = [value]
    while waiting:
        one = waiting.pop()
        keys = list(one) if isinstance(one, dict) else range(len(one))
        for key in keys:
            found.append((one, key))
            if isinstance(one[key], dict | list):
                waiting.append(one[key])
    return found


def put_value(parent: Any, key: Any, rng: random.Random, words: Sequence[str]) -> None:
    parent[key] = copy.deepcopy(rng.choice([*VALUES, *words]))


def edit_value(parent: Any, key: Any, rng: random.Random, words: Sequence[str]) -> None:
    """A value of the same type, a little off."""
    value = parent[key]
    if isinstance(value, bool) or value is None:
        parent[key] = not value
    elif isinstance(value, int | float):
        parent[key] = rng.choice((value + 1, value - 1, -value, value * 2, float(value), str(value)))
    elif isinstance(value, str):
        at = rng.randrange(len(value) + 1)
        word = rng.choice((*TEXTS, *words, "_", " ", "A", "9"))
        parent[key] = rng.choice((value[:at], value[at:], value[:at] + word + value[at:], value[:at] + word, value * 2))
    elif isinstance(value, list):
        item = copy.deepcopy(rng.choice([*value, *VALUES]))
        parent[key] = rng.choice((value[1:], value[:-1], [*value, item], value * 2, value[::-1]))
    else:
        value[rng.choice([*value, *words, *TEXTS])] = copy.deepcopy(rng.choice([*value.values(), *VALUES]))


def drop_value(parent: Any, key: Any, rng: random.Random, words: Sequence[str]) -> None:
    if isinstance(parent, dict) or len(parent) > 1:
        del parent[key]


def rename_key(parent: Any, key: Any, rng: random.Random, words: Sequence[str]) -> None:
    if isinstance(parent, dict):
        parent[rng.choice([*words, *TEXTS])] = parent.pop(key)


def wrap_value(parent: Any, key: Any, rng: random.Random, words: Sequence[str]) -> None:
    parent[key] = rng.choice(([parent[key]], {"a": parent[key]}))


CHANGES: tuple[Callable[[Any, Any, random.Random, Sequence[str]], None], ...] = (
    put_value, put_value, edit_value, edit_value, edit_value, drop_value, rename_key, wrap_value,
)  # fmt: skip
