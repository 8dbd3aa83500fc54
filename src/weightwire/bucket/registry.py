"""From a URL to its bucket: the kinds of buckets that there are, and the URLs that name them.

Each kind is a module of this package. The libraries that it needs are imported when a bucket of that kind is opened.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NoReturn
from urllib.parse import unquote

from weightwire.bucket.bucket import Bucket
from weightwire.bucket.directory import DirectoryBucket
from weightwire.bucket.paths import check_path
from weightwire.errors import BucketError

__all__ = ["open_bucket"]

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(/+)")
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_KNOWN = (
    "use s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, az://CONTAINER/PREFIX, hf://buckets/OWNER/NAME/PREFIX or a directory"
)
_SECRETS = "credentials and settings come from the environment: AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL and so on"


def open_bucket(url: str | os.PathLike[str] | Bucket) -> Bucket:
    """The bucket at a URL, or in a directory; a bucket is itself. Nothing is asked of it yet."""
    if not isinstance(url, str | os.PathLike):
        return url
    text = os.fspath(url)
    scheme = _SCHEME.match(text)
    if scheme is None:
        return _open_directory(text)
    kind, slashes, rest = scheme[1].lower(), scheme[2], text[scheme.end() :]
    if len(slashes) < 2:
        _refuse(f"{kind}:/ is no URL", "a URL has two slashes there; pathlib.Path merges them, so pass a str")
    rest = slashes[2:] + rest
    if kind == "file":
        return _open_file_url(rest)
    host, prefix = _split(kind, rest)
    if kind == "hf":
        return _open_hub(host, prefix)
    if kind in ("s3", "gs", "az", "memory"):
        from weightwire.bucket.object_store import open_object_store

        return open_object_store(kind, host, prefix)
    _refuse(f"{kind}:// is no bucket that weightwire knows", _KNOWN)


def _open_directory(path: str) -> Bucket:
    if not path or "\0" in path:
        _refuse(f"{path!r} is no bucket", _KNOWN)
    try:
        return DirectoryBucket(Path(path).expanduser())
    except RuntimeError as problem:
        raise BucketError(f"{path}: there is no such user", hint="write out the home directory") from problem


def _open_file_url(rest: str) -> Bucket:
    rest = rest.removeprefix("localhost")
    if not rest.startswith("/") or "?" in rest or "#" in rest:
        _refuse("a file:// URL must name an absolute path", "write file:///path, or the path alone")
    path = unquote(rest)
    if "\0" in path:
        _refuse("a file:// URL with a NUL in its path", "write file:///path, or the path alone")
    return DirectoryBucket(Path(path))


def _open_hub(host: str, prefix: str) -> Bucket:
    owner, _, rest = prefix.partition("/")
    name, _, prefix = rest.partition("/")
    if host != "buckets" or not owner or not name:
        _refuse("an hf:// URL must name a bucket", "write hf://buckets/OWNER/NAME/PREFIX")
    from weightwire.bucket.huggingface import open_huggingface

    return open_huggingface(f"{owner}/{name}", prefix)


def _split(kind: str, rest: str) -> tuple[str, str]:
    """Bucket and prefix. What could be a secret is refused, and not repeated in the error: it ends up in logs."""
    host, _, prefix = rest.partition("/")
    if set(host) & set("@:") or set(rest) & set("?#"):
        _refuse(f"a {kind}:// URL is a bucket and a prefix, without users, passwords, '?' and '#'", _SECRETS)
    prefix = prefix.strip("/")
    if not _HOST.fullmatch(host):
        _refuse(f"{kind}://{host} names no bucket", _KNOWN)
    return host, check_path(prefix) if prefix else ""


def _refuse(what: str, hint: str) -> NoReturn:
    raise BucketError(what, hint=hint)
