"""A server that looks like vLLM to a follower, as a process, so that a test can stop it with SIGSTOP or restart it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from support.stores import answers, free_ports

__all__ = ["FakeVllm"]


class FakeVllm:
    """Runs from construction until `kill`. `start` starts it again at the same port, with nothing loaded."""

    def __init__(self) -> None:
        [self.port] = free_ports(1)
        self.url = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        self.launch()
        self.wait_until_up()

    def launch(self) -> None:
        script = Path(__file__).with_name("fake_vllm_process.py")
        self._process = subprocess.Popen([sys.executable, "-I", script, str(self.port)])

    def wait_until_up(self) -> None:
        deadline = time.monotonic() + 120
        while not answers("GET", f"{self.url}/health"):
            assert time.monotonic() < deadline, "the fake server did not start"
            time.sleep(0.02)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """Stops the process. Its connections stay open."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def ask(self, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(urllib.request.Request(self.url + path, data), timeout=60) as reply:
            return json.loads(reply.read() or b"null")

    @property
    def version(self) -> str:
        return str(self.ask("/weight_info")["weight_version"])

    @property
    def directory(self) -> Path:
        """What it shares with its follower."""
        return Path(f"/dev/shm/weightwire-{os.getuid()}-{self.port}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.kill()
