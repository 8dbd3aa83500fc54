"""Stand on: clock, threads, files that survive a power cut, a small HTTP server, and who may use a server."""

from weightwire.system import durable_files
from weightwire.system.access import TOKEN_VARIABLE, Access, Guard, read_token
from weightwire.system.closeable import Closeable
from weightwire.system.deadline import Deadline
from weightwire.system.http_server import (
    HttpReply,
    HttpRequest,
    HttpServer,
    cannot_listen,
    format_address,
    parse_address,
    resolve,
)
from weightwire.system.loop_thread import LoopThread
from weightwire.system.regular_files import NotRegularFile, open_regular, read_regular
from weightwire.system.runtime import Runtime
from weightwire.system.thread_pool import Progress, Stopped, in_order, to_the_end

__all__ = [
    "TOKEN_VARIABLE",
    "Access",
    "Closeable",
    "Deadline",
    "Guard",
    "HttpReply",
    "HttpRequest",
    "HttpServer",
    "LoopThread",
    "NotRegularFile",
    "Progress",
    "Runtime",
    "Stopped",
    "cannot_listen",
    "durable_files",
    "format_address",
    "in_order",
    "open_regular",
    "parse_address",
    "read_regular",
    "read_token",
    "resolve",
    "to_the_end",
]
