"""Real S3 servers for tests: SeaweedFS, which honours conditional writes, and rclone, which does not.

They listen on 127.0.0.1, keep everything in a directory of the test, and end with the process that started them.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

__all__ = [
    "NOWHERE",
    "Lossy",
    "Rclone",
    "SeaweedFS",
    "Server",
    "answers",
    "environment",
    "free_ports",
    "running",
    "use",
]

BIN = Path(sys.executable).parent
NOWHERE = "http://127.0.0.1:1"
"""An endpoint without a server."""


def free_ports(count: int) -> list[int]:
    """Ports that no client is given before their server starts, and that no other test process chooses."""
    first, end, processes = 10_000, _first_client_port(), 16
    if end < first + 100 * processes:
        first, end = end + 1, 65_536
    first += int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % processes
    ports = random.SystemRandom().sample(range(first, end, processes), k=(end - first) // processes)
    with contextlib.ExitStack() as stack:
        free = (port for port in ports if _bind(stack.enter_context(socket.socket()), port))
        return [port for _, port in zip(range(count), free, strict=False)]


def _first_client_port() -> int:
    """Linux gives clients the ports from here on."""
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:
        return 32_768


def _bind(one: socket.socket, port: int) -> bool:
    try:
        one.bind(("127.0.0.1", port))
    except OSError:
        return False
    return True


def environment(endpoint: str, access: str, secret: str) -> dict[str, str]:
    """All variables that select a store, to override those of the machine."""
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ENDPOINT_URL_S3": endpoint,
        "AWS_ACCESS_KEY_ID": access,
        "AWS_SECRET_ACCESS_KEY": secret,
        "AWS_SESSION_TOKEN": "",
        "AWS_REGION": "us-east-1",
        "AWS_PROFILE": "",
    }


class Server:
    """A process that can be killed and restarted on the same data and ports."""

    def __init__(self, root: Path, command: Sequence[str | Path], is_ready: Callable[[], bool]) -> None:
        self.root = root
        self._command = command
        self._is_ready = is_ready
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with (self.root / "log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command, cwd=self.root, stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=_die_with_us
            )
        deadline = time.monotonic() + 120
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                pytest.fail(f"{self._command[0]} did not start:\n{(self.root / 'log').read_text()[-2000:]}")
            time.sleep(0.05)

    def kill(self) -> None:
        """Kills the server: a clean stop of SeaweedFS takes 16 seconds."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    stop = kill

    def pause(self) -> None:
        """Keeps connections open, but stops answering."""
        if self._process is not None:
            self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)

    def restart(self) -> None:
        self.kill()
        self.start()


class SeaweedFS(Server):
    """SeaweedFS in one process, with a bucket and three keys: full access, read and list, read only."""

    bucket = "weights"

    def __init__(self, root: Path) -> None:
        names = ["master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port", "filer.port.grpc"]
        ports = dict(zip([*names, "s3.port", "s3.port.grpc"], free_ports(8), strict=True))
        self.endpoint = f"http://127.0.0.1:{ports['s3.port']}"
        self._filer = f"http://127.0.0.1:{ports['filer.port']}"
        self._ports = ports
        keys = {"admin": ["Admin", "Read", "Write", "List"], "reader": ["Read", "List"], "blind": ["Read"]}
        config = {"identities": [_identity(name, actions) for name, actions in keys.items()]}
        (root / "s3.json").write_text(json.dumps(config))
        (root / "data").mkdir()
        options = {
            **ports,
            "dir": "data",
            "ip": "127.0.0.1",
            "ip.bind": "127.0.0.1",
            "filer": "true",
            "s3": "true",
            "s3.config": "s3.json",
            # Otherwise the first write to a missing bucket creates it.
            "s3.autoCreateBucket": "false",
            "s3.port.iceberg": 0,
            "s3.port.lance": 0,
            "master.telemetry": "false",
            "master.volumeSizeLimitMB": 1024,
            "volume.max": 100,
            "master.electionTimeout": "1s",
        }
        command = ["server", *(f"-{name}={value}" for name, value in options.items())]
        super().__init__(root, [BIN / "weed", *command], self._make_bucket)

    @property
    def env(self) -> dict[str, str]:
        """The environment of a client with full access."""
        return self.env_of("admin")

    def env_of(self, name: str) -> dict[str, str]:
        return environment(self.endpoint, f"{name}-key", f"{name}-secret")

    def url(self, prefix: str) -> str:
        return f"s3://{self.bucket}/{prefix}"

    def kill(self) -> None:
        super().kill()
        for port in self._ports.values():
            for left in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                left.unlink(missing_ok=True)

    stop = kill

    def _make_bucket(self) -> bool:
        """A folder of the filer is a bucket. Once it can be made, a file written, and S3 answers, all parts are up."""
        return (
            answers("POST", f"{self._filer}/buckets/{self.bucket}/")
            and answers("PUT", f"{self._filer}/ready", b"ready")
            and answers("GET", f"{self.endpoint}/healthz")
        )


class Rclone(Server):
    """A directory that rclone serves as S3. It ignores the conditions of requests."""

    bucket = "weights"

    def __init__(self, root: Path) -> None:
        (root / "data" / self.bucket).mkdir(parents=True)
        address = f"127.0.0.1:{free_ports(1)[0]}"
        self.env = environment(f"http://{address}", "rclone-key", "rclone-secret")
        keys = "rclone-key,rclone-secret"
        options = ["--config", "none", "--vfs-cache-mode", "off", "--addr", address, "--auth-key", keys]
        command: list[str | Path] = [BIN / "rclone", "serve", "s3", *options, "data"]
        super().__init__(root, command, lambda: answers("GET", f"http://{address}"))

    def url(self, prefix: str) -> str:
        return f"s3://{self.bucket}/{prefix}"


class Lossy:
    """A proxy that loses replies. The first `drop` replies never arrive, although the server handled the requests.
    `cut` replies end after some bytes."""

    def __init__(self, endpoint: str) -> None:
        self._target = ("127.0.0.1", int(endpoint.rpartition(":")[2]))
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self.drop = 0
        self.cut = 0
        self.after = 100_000
        self._lock = threading.Lock()

    def __enter__(self) -> Lossy:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *problem: object) -> None:
        # A thread that waits in accept() would not notice that its socket is closed.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client = self._socket.accept()[0]
                server = socket.create_connection(self._target)
                threading.Thread(target=self._forward, args=(client, server), daemon=True).start()
                threading.Thread(target=self._answer, args=(server, client), daemon=True).start()

    def _forward(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(1 << 16):
                server.sendall(data)
        _hang_up(client, server)

    def _answer(self, server: socket.socket, client: socket.socket) -> None:
        sent = 0
        with contextlib.suppress(OSError):
            while data := server.recv(1 << 16):
                if self._loses("drop"):
                    break
                client.sendall(data)
                sent += len(data)
                if sent > self.after and self._loses("cut"):
                    break
        _hang_up(client, server)

    def _loses(self, how: str) -> bool:
        """Whether to lose one more reply. Several threads may ask at once."""
        with self._lock:
            left: int = getattr(self, how)
            setattr(self, how, max(0, left - 1))
        return left > 0


def _hang_up(*sockets: socket.socket) -> None:
    for one in sockets:
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
        one.close()


@contextlib.contextmanager
def running(server: Server) -> Iterator[None]:
    try:
        server.start()
        yield
    finally:
        server.kill()


def use(monkeypatch: pytest.MonkeyPatch, variables: Mapping[str, str]) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def _identity(name: str, actions: list[str]) -> dict[str, object]:
    credentials = [{"accessKey": f"{name}-key", "secretKey": f"{name}-secret"}]
    return {"name": name, "credentials": credentials, "actions": actions}


def answers(method: str, url: str, data: bytes | None = None) -> bool:
    """True if the server answers and is ready."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, method=method), timeout=5):
            return True
    except urllib.error.HTTPError as problem:
        return problem.code < 500
    except OSError:
        return False


def _die_with_us() -> None:
    """Linux kills the child when its parent is gone; elsewhere a killed pytest leaves it running."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
