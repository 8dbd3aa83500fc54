"""A network link with a limited rate in each direction, between clients and a server on this machine.

    python benchmarks/link.py PORT BYTES_PER_SECOND     # prints the port to connect to; exits when stdin closes

All connections share the link, as all traffic of a machine shares its network card. The link adds no latency and no
loss, and gives no credit for idle time. It forwards bytes and does not parse HTTP.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time

PIECE = 128 << 10
# Seconds: a sleep that ends late is made up for, up to this much. A link that was idle for longer starts over.
LATE = 0.005


class Pace:
    """One direction. Senders wait until the link has carried their bytes."""

    def __init__(self, bytes_per_second: float) -> None:
        self._rate = bytes_per_second
        self._free_at = 0.0
        self._lock = threading.Lock()

    def carry(self, count: int) -> None:
        with self._lock:
            now = time.monotonic()
            if self._free_at < now - LATE:
                self._free_at = now
            self._free_at += count / self._rate
            seconds = self._free_at - now
        if seconds > 0:
            time.sleep(seconds)


def main() -> None:
    port, rate = int(sys.argv[1]), float(sys.argv[2])
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)
    print(listener.getsockname()[1], flush=True)
    threading.Thread(target=accept, args=(listener, port, Pace(rate), Pace(rate)), daemon=True).start()
    sys.stdin.read()


def accept(listener: socket.socket, port: int, up: Pace, down: Pace) -> None:
    while True:
        client = listener.accept()[0]
        server = socket.create_connection(("127.0.0.1", port))
        for one in (client, server):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=forward, args=(client, server, up), daemon=True).start()
        threading.Thread(target=forward, args=(server, client, down), daemon=True).start()


def forward(source: socket.socket, target: socket.socket, pace: Pace) -> None:
    buffer = memoryview(bytearray(PIECE))
    with contextlib.suppress(OSError):
        while count := source.recv_into(buffer):
            pace.carry(count)
            target.sendall(buffer[:count])
    for one in (source, target):
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)


if __name__ == "__main__":
    main()
