"""Requests to a server under test."""

from __future__ import annotations

import errno
import http.client
import socket

__all__ = ["ask", "raw_reply"]


def _place(address: str) -> tuple[str, int]:
    host, _, port = address.removeprefix("http://").rstrip("/").rpartition(":")
    return host.strip("[]"), int(port)


def ask(address: str, path: str, method: str = "GET", **headers: str) -> tuple[http.client.HTTPResponse, bytes]:
    """A reply and its body. Dashes in names of headers are written as underscores."""
    connection = http.client.HTTPConnection(*_place(address), timeout=60)
    try:
        connection.request(method, path, headers={name.replace("_", "-"): text for name, text in headers.items()})
        reply = connection.getresponse()
        return reply, reply.read()
    finally:
        connection.close()


def raw_reply(address: str, data: bytes) -> bytes:
    """All bytes of the reply. The server may close the connection early."""
    with socket.create_connection(_place(address), timeout=60) as connection:
        reply = b""
        try:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            while piece := connection.recv(4096):
                reply += piece
        except OSError as problem:
            if problem.errno not in (errno.ECONNRESET, errno.EPIPE, errno.ENOTCONN):
                raise
        return reply
