"""Runs Python scripts in processes that begin with torch and transformers imported, which takes most of their time.

They are forked from one server process per test process. Otherwise they behave like `python script.py`.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path

__all__ = ["FreshPython", "WarmPython", "warm_context"]

_IMPORTED = [
    "safetensors.torch",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.trainer",
]


@cache
def warm_context() -> ForkServerContext:
    """Makes processes in which torch and transformers are imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_IMPORTED)
    return context


class WarmPython:
    """A script with its arguments. Its output is written to a file."""

    def __init__(
        self, arguments: Sequence[str | Path], output: Path, directory: Path, env: Mapping[str, str] | None = None
    ) -> None:
        told = ([str(one) for one in arguments], str(output), str(directory), dict(os.environ if env is None else env))
        self._process: ForkServerProcess = warm_context().Process(target=_run, args=told)
        self._process.start()

    def wait(self, timeout: float) -> int:
        """The exit code. Kills it after `timeout` seconds."""
        self._process.join(timeout)
        self.kill()
        code = self._process.exitcode
        assert code is not None
        return code

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


class FreshPython:
    """The same in a new interpreter, for tests of how it starts or ends."""

    def __init__(
        self, arguments: Sequence[str | Path], output: Path, directory: Path, env: Mapping[str, str] | None = None
    ) -> None:
        with output.open("wb") as said:
            self._process = subprocess.Popen(
                [sys.executable, *arguments], cwd=directory, env=env, stdout=said, stderr=said
            )

    def wait(self, timeout: float) -> int:
        return self._process.wait(timeout)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def _run(arguments: list[str], output: str, directory: str, env: dict[str, str]) -> None:
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(directory)
    if "OMP_NUM_THREADS" in env:  # which torch has read already
        sys.modules["torch"].set_num_threads(int(env["OMP_NUM_THREADS"]))
    sys.argv = arguments
    sys.path.insert(0, os.path.dirname(os.path.abspath(arguments[0])))
    try:
        runpy.run_path(arguments[0], run_name="__main__")
    finally:
        sys.stdout.flush()
        atexit._run_exitfuncs()
