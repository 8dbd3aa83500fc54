"""Small weights and a training step."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np

from support.failing_bucket import Act, Troubled
from support.run_contents import commits_in
from support.samples import base as bits_of
from support.samples import change
from weightwire import digest
from weightwire.publisher.publisher import Publisher
from weightwire.weights import DTYPES

Arrays = dict[str, Any]
F16 = DTYPES["F16"]


def initial() -> Arrays:
    return {
        "layer.weight": bits_of(F16, 6400).view(np.float16).reshape(100, 64),
        "norm": np.linspace(0, 1, 5, dtype=np.float32),
        "none": np.zeros((0, 3), np.float32),
        "scale": np.array(0.5, np.float32),
    }


def train(weights: Arrays, step: int = 0) -> None:
    """Changes some weights in place, as an optimizer does."""
    bits = weights["layer.weight"].reshape(-1).view(np.uint16)
    bits[:] = change(bits, F16, "few", seed=step + 100)
    weights["norm"][step % 5] += 1


def state(weights: Arrays) -> str:
    return digest(weights).hex


def kinds(bucket: Troubled) -> list[tuple[str, int]]:
    return [(commit.kind, commit.epoch) for commit in commits_in(bucket)]


def settle(publisher: Publisher) -> None:
    """Waits for background work that has begun, such as anchors."""
    publisher._background.call(publisher._context.background.wait())


class RequestGate:
    """Holds requests until it is opened."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self._open = threading.Event()

    async def __call__(self, act: Act) -> Any:
        self.reached.set()
        while not self._open.is_set():
            await asyncio.sleep(0.001)
        return await act()

    def open(self) -> None:
        self._open.set()
