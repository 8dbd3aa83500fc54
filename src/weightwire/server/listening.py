"""A socket, and uvicorn behind it in a thread of its own.

Knows addresses and how to stop in time; not what is served.
"""

from __future__ import annotations

import errno
import socket
import threading
from typing import Any

import uvicorn

from weightwire.closes import Closes
from weightwire.errors import WeightwireError

__all__ = ["Listening"]

_PATIENCE = 2  # seconds for answers that are on their way, once it is to stop
_IDLE = 60  # seconds that a connection may rest: clients that think for long use theirs again
_BACKLOG = 2048  # connections that may come at once


class Listening(Closes):
    """Open from the start until `close`. `url` is where it really listens: port 0 takes any that is free."""

    def __init__(self, app: Any, host: str, port: int) -> None:
        self._socket = _listen(host, port)
        place, port = self._socket.getsockname()[:2]
        self.url = f"http://[{place}]:{port}" if ":" in place else f"http://{place}:{port}"
        config = uvicorn.Config(
            app,
            access_log=False,
            log_config=None,
            log_level="critical",
            lifespan="off",
            ws="none",
            server_header=False,
            timeout_keep_alive=_IDLE,
            timeout_graceful_shutdown=_PATIENCE,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, args=([self._socket],), name="weightwire-http", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Takes no more requests; those that run are answered, or cut off in the end."""
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # Listening at once, and not only bound: two could be bound to the same port.
        return socket.create_server(place[:2], family=family, backlog=_BACKLOG)
    except (OSError, UnicodeError) as problem:  # the latter from a host name that can be none
        if isinstance(problem, OSError) and problem.errno == errno.EADDRINUSE:
            raise WeightwireError(
                f"{host}:{port}: another program listens there already", hint="choose another --port, or 0 for any"
            ) from problem
        reason = (problem.strerror if isinstance(problem, OSError) else None) or str(problem)
        raise WeightwireError(
            f"{host}:{port}: cannot be listened on ({reason})", hint="check --host and --port"
        ) from problem
