"""One real step from `publish()` to a served version, traced: every call from one module of weightwire into another.

Run as a program, because it must see all threads from their start. Prints JSON: pairs of [module, function] in the
order of their first call, and the calls between modules as [caller's module, called module].
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

import weightwire
from weightwire.engines import Keeper, TorchEngine

ROOT = f"{Path(weightwire.__file__).parent}/"


class Tracer:
    """Notes calls while it is `on`."""

    def __init__(self) -> None:
        self.on = False
        self.functions: dict[tuple[str, str], None] = {}
        self.crossings: dict[tuple[str, str], None] = {}

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if not self.on or event != "call" or not frame.f_code.co_filename.startswith(ROOT):
            return
        module = _module(frame.f_code)
        self.functions[module, frame.f_code.co_qualname] = None
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(ROOT):
            caller = caller.f_back
        if caller is not None and _module(caller.f_code) != module:
            self.crossings[_module(caller.f_code), module] = None


def _module(code: CodeType) -> str:
    return code.co_filename.removeprefix(ROOT)


def step(tracer: Tracer, directory: Path) -> None:
    """Version 1 is served before the trace begins; version 2 is the step that is traced."""
    trained, served = (torch.nn.Linear(300, 300, bias=False).to(torch.bfloat16) for _ in range(2))
    with (
        weightwire.Publisher(directory / "run") as publisher,
        weightwire.Follower(directory / "run", into=directory / "replica") as follower,
    ):
        first = publisher.publish(trained).wait()
        with Keeper(follower, [TorchEngine(served)]) as keeper:
            _wait_until_served(keeper, first)
            with torch.no_grad():
                trained.weight[3, 5] += 1
            tracer.on = True
            _wait_until_served(keeper, publisher.publish(trained, step=1).wait())
            tracer.on = False
    assert torch.equal(trained.weight, served.weight)


def _wait_until_served(keeper: Keeper, version: int) -> None:
    until = time.monotonic() + 60
    while keeper.served != version:
        assert time.monotonic() < until, f"version {version} is not served: {keeper.trouble}"
        time.sleep(0.01)


if __name__ == "__main__":
    tracer = Tracer()
    threading.setprofile(tracer)
    sys.setprofile(tracer)
    with tempfile.TemporaryDirectory() as directory:
        step(tracer, Path(directory))
    sys.setprofile(None)
    print(json.dumps({"functions": list(tracer.functions), "crossings": list(tracer.crossings)}))
