"""Starts programs in processes that have vLLM imported, which takes most of the time in which vLLM starts.

They are forked from one template process, which ends with the process that started it. Otherwise they behave like
`python -m module` or `python script.py`, except that vLLM forks its engines and workers instead of importing itself
in each of them.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib
import json
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

__all__ = ["WarmVllm", "end_with_parent"]

_IMPORTED = [
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.qwen3",
    "vllm.model_executor.model_loader.default_loader",
    "transformers.models.qwen3.modeling_qwen3",
    "weightwire.engines.vllm.plugin",
]


class WarmVllm:
    """A program: its command without the interpreter, with the output in a file. Leads a process group of its own."""

    def __init__(self, arguments: Sequence[str | Path], output: Path, directory: Path, env: Mapping[str, str]) -> None:
        told = [str(one) for one in arguments], str(output), str(directory), dict(env)
        asked, answers = _template()
        asked.write(json.dumps(told) + "\n")
        asked.flush()
        self.pid = int(answers.readline())

    def poll(self) -> int | None:
        """0 after its end, however it ended. None before."""
        return None if Path(f"/proc/{self.pid}").exists() else 0

    def wait(self, timeout: float = 60.0) -> None:
        end = time.monotonic() + timeout
        while self.poll() is None:
            assert time.monotonic() < end, f"process {self.pid} does not end"
            time.sleep(0.01)


@cache
def _template() -> tuple[Any, Any]:
    """Where to write what to start, and where to read its process id."""
    process = subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    return process.stdin, process.stdout


def _serve() -> None:
    for name in _IMPORTED:
        importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the children
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what is printed here is not an answer
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            _become(*json.loads(line))
        print(pid, file=answers, flush=True)


def _become(arguments: list[str], output: str, directory: str, env: dict[str, str]) -> None:
    """Runs a program in this process, and ends it."""
    os.setsid()
    end_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _redirect(output)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(directory)
    if "OMP_NUM_THREADS" in env:  # which torch has read already
        sys.modules["torch"].set_num_threads(int(env["OMP_NUM_THREADS"]))
    _fork_instead_of_spawn()
    code = 1
    try:
        _run(arguments)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        os._exit(code)


def end_with_parent() -> None:
    """With SIGTERM: a server must end its workers."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def _redirect(output: str) -> None:
    nothing, file = os.open(os.devnull, os.O_RDONLY), os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for target, source in ((0, nothing), (1, file), (2, file)):
        os.dup2(source, target)


def _fork_instead_of_spawn() -> None:
    get = multiprocessing.get_context
    multiprocessing.get_context = lambda method=None: get("fork" if method == "spawn" else method)  # type: ignore


def _run(arguments: list[str]) -> None:
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = arguments
        sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    _serve()
