"""Opens the bucket of a URL: the kinds of buckets, and the URL of each.

Each kind is a module of this package. Its libraries are imported only when such a bucket is opened.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn
from urllib.parse import unquote

from weightwire.bucket.bucket import Bucket
from weightwire.bucket.directory import DirectoryBucket
from weightwire.bucket.paths import check_path
from weightwire.errors import BucketError

__all__ = ["BUCKET_URLS", "BucketPlace", "open_bucket", "place_of"]

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(/+)")
_HOST = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_PORT = re.compile(r"[^@:]*:[0-9]*")
_ENDPOINT = "use s3://BUCKET/PREFIX, and set AWS_ENDPOINT_URL for an S3 endpoint"
_SECRETS = "set credentials and endpoints in the environment: AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL and so on"


@dataclass(frozen=True)
class BucketPlace:
    """The parts of a URL: its scheme, the bucket and the prefix. A directory has the scheme `file` and a path."""

    kind: str
    bucket: str
    prefix: str = ""


def open_bucket(url: str | os.PathLike[str] | Bucket) -> Bucket:
    """Opens the bucket at a URL or path. Returns a bucket as it is. Makes no request yet."""
    if not isinstance(url, str | os.PathLike):
        return url
    text = os.fspath(url)
    if _SCHEME.match(text) is None:
        return _open_directory(text)
    place = place_of(text)
    if place.kind == "file":
        return _open_file_url(place.bucket)
    return _KINDS[place.kind].open(place.kind, place.bucket, place.prefix)


def place_of(text: str) -> BucketPlace:
    """Splits a URL or path. Needs no credentials."""
    scheme = _SCHEME.match(text)
    if scheme is None:
        return BucketPlace("file", text)
    kind, slashes, rest = scheme[1].lower(), scheme[2], text[scheme.end() :]
    if len(slashes) < 2:
        _refuse(f"{kind}:/ has one slash where a URL has two", "pathlib.Path merges slashes: pass a str")
    rest = slashes[2:] + rest
    if kind == "file":
        return BucketPlace(kind, rest)
    if kind not in _KINDS:
        _refuse(f"{kind}:// is not a supported kind of bucket", _ENDPOINT if kind in ("http", "https") else _KNOWN)
    host, prefix = _split(kind, rest)
    return BucketPlace(kind, host, prefix)


def _open_directory(path: str) -> Bucket:
    if not path or "\0" in path:
        _refuse(f"{path!r} is not a bucket", _KNOWN)
    try:
        return DirectoryBucket(Path(path).expanduser())
    except RuntimeError as problem:
        raise BucketError(f"{path}: unknown user", hint="write the full path of the home directory") from problem


def _open_file_url(rest: str) -> Bucket:
    rest = rest.removeprefix("localhost")
    if not rest.startswith("/") or "?" in rest or "#" in rest:
        _refuse("a file:// URL must name an absolute path", "write file:///path, or the path alone")
    path = unquote(rest)
    if "\0" in path:
        _refuse("a file:// URL cannot contain a NUL", "write file:///path, or the path alone")
    return DirectoryBucket(Path(path))


def _open_store(kind: str, host: str, prefix: str) -> Bucket:
    from weightwire.bucket.object_store import open_object_store

    return open_object_store(kind, host, prefix)


def _open_hub(kind: str, host: str, prefix: str) -> Bucket:
    owner, _, rest = prefix.partition("/")
    name, _, prefix = rest.partition("/")
    if host != "buckets" or not owner or not name:
        _refuse("an hf:// URL must name a bucket", f"write {_KINDS[kind].url}")
    from weightwire.bucket.huggingface import open_huggingface

    return open_huggingface(f"{owner}/{name}", prefix)


def _split(kind: str, rest: str) -> tuple[str, str]:
    """Bucket and prefix. Rejects possible secrets, and does not repeat them in the error: errors end up in logs."""
    host, _, prefix = rest.partition("/")
    url = f"{'an' if kind in ('s3', 'az', 'hf') else 'a'} {kind}:// URL"
    if _PORT.fullmatch(host) and not set(rest) & set("@?#"):
        _refuse(f"{url} cannot contain a port", _ENDPOINT)
    if set(host) & set("@:") or set(rest) & set("?#"):
        _refuse(f"{url} cannot contain a user, a password, '?' or '#'", _SECRETS)
    prefix = prefix.strip("/")
    if not _HOST.fullmatch(host):
        _refuse(f"{kind}://{host} does not name a bucket", _KNOWN)
    return host, check_path(prefix) if prefix else ""


def _refuse(what: str, hint: str) -> NoReturn:
    raise BucketError(what, hint=hint)


@dataclass(frozen=True)
class _BucketKind:
    """`open` takes the scheme, the host and the prefix of a URL. Kinds without a `url` are for tests."""

    open: Callable[[str, str, str], Bucket]
    url: str = ""


_KINDS = {
    "s3": _BucketKind(_open_store, "s3://BUCKET/PREFIX"),
    "gs": _BucketKind(_open_store, "gs://BUCKET/PREFIX"),
    "az": _BucketKind(_open_store, "az://CONTAINER/PREFIX"),
    "hf": _BucketKind(_open_hub, "hf://buckets/OWNER/NAME/PREFIX"),
    "memory": _BucketKind(_open_store),
}

_URLS = {scheme: kind.url for scheme, kind in _KINDS.items() if kind.url}
_KNOWN = f"use {', '.join(_URLS.values())} or a directory"

BUCKET_URLS = f"{_URLS['s3']}, {', '.join(f'{scheme}://' for scheme in _URLS if scheme != 's3')}, or a directory"
"""The supported URLs, for help texts."""
