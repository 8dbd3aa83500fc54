"""Stand on: clock, threads, files that survive a power cut, and a small HTTP server. Knows nothing of weights."""

from weightwire.system import durable_files
from weightwire.system.closeable import Closeable
from weightwire.system.deadline import Deadline
from weightwire.system.http_server import (
    HttpReply,
    HttpRequest,
    HttpServer,
    cannot_listen,
    format_address,
    is_local_request,
    is_loopback,
    parse_address,
    resolve,
)
from weightwire.system.lazy_exports import lazy_exports
from weightwire.system.loop_thread import LoopThread
from weightwire.system.runtime import Runtime
from weightwire.system.thread_pool import Progress, Stopped, in_order, to_the_end

__all__ = [
    "Closeable",
    "Deadline",
    "HttpReply",
    "HttpRequest",
    "HttpServer",
    "LoopThread",
    "Progress",
    "Runtime",
    "Stopped",
    "cannot_listen",
    "durable_files",
    "format_address",
    "in_order",
    "is_local_request",
    "is_loopback",
    "lazy_exports",
    "parse_address",
    "resolve",
    "to_the_end",
]
