"""Object stores as buckets: S3 and what speaks it, Google Cloud Storage, Azure, and memory. All over obstore.

Knows how each is configured from the environment, how large objects travel in parts, and that a create is one request
with a condition. Knows nothing of what the bytes mean; what a refusal means is in `store_errors.py`.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import obstore
from obstore.exceptions import BaseError
from obstore.store import AzureStore, GCSStore, MemoryStore, S3Store

from weightwire.bucket.bucket import ObjectInfo
from weightwire.bucket.concurrency import each, flat, in_thread, pieces
from weightwire.bucket.paths import check_path, check_prefix
from weightwire.bucket.store_errors import explain, explain_settings
from weightwire.errors import BucketError, NotFound, PermissionDenied, Truncated, Unavailable

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import ClientConfig, ObjectStore, RetryConfig, S3Config

__all__ = ["ObjectStoreBucket", "open_object_store"]

_UploadPart = bytes | bytearray | memoryview

# Objects of more than two parts travel so many of them at a time; smaller ones in one request.
_PART = 8 << 20
_AT_ONCE = 8
_SINGLE = 2
_CHUNK = 256 << 10
# S3 takes at most 10,000 parts.
_MOST_PARTS = 9_000
_UNKNOWN_SIZE = 160 << 30

# Whoever uses a bucket tries again himself, and knows better for how long.
_RETRIES: RetryConfig = {
    "max_retries": 3,
    "retry_timeout": timedelta(seconds=10),
    "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=2), "base": 2},
}
# A record is a few kilobytes: without an answer by then it is lost. Data may take its time, as long as it moves;
# nothing is read back while a part is sent, so silence is judged by the slowest upload of one.
_FOR_RECORDS: ClientConfig = {"connect_timeout": timedelta(seconds=5), "timeout": timedelta(seconds=20)}
_FOR_DATA: ClientConfig = {
    "connect_timeout": timedelta(seconds=5),
    "read_timeout": timedelta(seconds=60),
    "timeout": timedelta(hours=1),
}

# Where S3 credentials come from that obstore finds by itself.
_CREDENTIALS = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_SKIP_SIGNATURE",
)

_memories: dict[str, MemoryStore] = {}


def open_object_store(kind: str, host: str, prefix: str) -> ObjectStoreBucket:
    """The bucket or container of this name, with credentials and endpoint from the environment."""
    url = f"{kind}://{host}/{prefix}".rstrip("/")
    if kind == "memory":
        store = _memories.setdefault(host, MemoryStore())
        return ObjectStoreBucket(url, prefix, kind, store, store)
    try:
        credentials = _from_profile(url) if kind == "s3" else None
        records, data = (_connect(kind, host, options, credentials) for options in (_FOR_RECORDS, _FOR_DATA))
    except (BaseError, ValueError) as problem:
        raise explain_settings(problem, kind, url) from None
    return ObjectStoreBucket(url, prefix, kind, records, data)


class ObjectStoreBucket:
    """A `Bucket` in an object store."""

    url: str
    strict = True
    poll_interval = 0.2

    def __init__(self, url: str, prefix: str, kind: str, records: ObjectStore, data: ObjectStore) -> None:
        self.url = url
        self._kind = kind
        self._prefix = f"{prefix}/" if prefix else ""
        self._records = records
        self._data = data

    async def create(self, path: str, data: bytes) -> None:
        key = self._key(path)
        with self._failing(path):
            await obstore.put_async(self._records, key, data, mode="create")

    async def put(self, path: str, data: Iterable[bytes | memoryview] | bytes, size: int | None = None) -> None:
        key, stop = self._key(path), threading.Event()
        part = max(_PART, -(-(size or _UNKNOWN_SIZE) // _MOST_PARTS))
        with self._failing(path):
            # In a thread, as the data may be computed while it is sent.
            await in_thread(lambda: self._upload(key, _parts(pieces(data, path, size, stop), part), part), stop)

    async def get(self, path: str) -> bytes:
        key = self._key(path)
        with self._failing(path):
            result = await obstore.get_async(self._records, key)
            return bytes(await result.bytes_async())

    async def read_into(self, path: str, buffer: memoryview, start: int = 0) -> None:
        view = flat(buffer)
        if not view:
            if await self.find(path) is None:
                raise NotFound(f"{self.url}/{path}: is not there", hint="check the URL, or wait for it")
            return

        async def read(offset: int) -> None:
            await self._read(path, view[offset : offset + _PART], start + offset)

        with self._failing(path):
            await each(range(0, len(view), _PART), _AT_ONCE, read)

    async def list(self, prefix: str) -> Sequence[ObjectInfo]:
        folder = (self._prefix + check_prefix(prefix)).rstrip("/")
        found: list[ObjectMeta] = []
        with self._failing(prefix):
            async for batch in obstore.list(self._records, folder or None, chunk_size=1000):
                found += batch
        # What stands for a folder, as consoles make it, is listed by the folder's own name.
        inside = (meta for meta in found if not folder or meta["path"].startswith(f"{folder}/"))
        return sorted(map(self._describe, inside), key=lambda entry: entry.path)

    async def find(self, path: str) -> ObjectInfo | None:
        key = self._key(path)
        try:
            with self._failing(path):
                return self._describe(await obstore.head_async(self._records, key))
        except NotFound:
            return None

    async def delete(self, path: str) -> None:
        key = self._key(path)
        with suppress(NotFound), self._failing(path):
            await obstore.delete_async(self._records, key)

    async def close(self) -> None:
        """Connections close when nobody has used them for a while."""

    def _key(self, path: str) -> str:
        return self._prefix + check_path(path)

    def _describe(self, meta: ObjectMeta) -> ObjectInfo:
        return ObjectInfo(meta["path"].removeprefix(self._prefix), meta["size"], meta["last_modified"].timestamp())

    @contextmanager
    def _failing(self, path: str) -> Iterator[None]:
        try:
            yield
        except (BaseError, FileNotFoundError, NotImplementedError) as problem:
            # Not `from problem`: a traceback would print its debug output.
            raise explain(problem, self._kind, f"{self.url}/{path}") from None
        except BaseException as problem:
            # A panic in Rust is no Exception: it would take the whole event loop down.
            if type(problem).__name__ != "PanicException":
                raise
            raise BucketError(
                f"{self.url}/{path}: obstore failed: {problem}", hint="this is a bug of obstore"
            ) from None

    async def _read(self, path: str, view: memoryview, start: int) -> None:
        end = start + len(view)
        result = await obstore.get_async(self._data, self._key(path), options={"range": (start, end)})
        if result.range != (start, end):
            raise Truncated(
                f"{self.url}/{path}: ends at byte {result.range[1]:,}, not at {end:,} or later",
                hint="it was cut off, or is not the object it should be",
            )
        filled = 0
        async for chunk in result.stream(min_chunk_size=_CHUNK):
            view[filled : filled + len(chunk)] = chunk
            filled += len(chunk)
        if filled != len(view):
            raise Unavailable(f"{self.url}/{path}: was cut off while it was read", hint="try again")

    def _upload(self, key: str, parts: Iterator[_UploadPart], size: int) -> None:
        first = list(islice(parts, _SINGLE + 1))
        if len(first) <= _SINGLE:
            obstore.put(self._data, key, iter(first), use_multipart=False)
        else:
            every = chain(first, parts)
            first = []
            obstore.put(self._data, key, every, use_multipart=True, chunk_size=size, max_concurrency=_AT_ONCE)


def _parts(views: Iterable[memoryview], size: int) -> Iterator[_UploadPart]:
    """The same bytes in parts of equal size, which some stores insist on. Copied, unless they are immutable: whoever
    made them may want his memory back when the next ones are asked for."""
    part = bytearray()
    for view in views:
        while view:
            if not part and len(view) >= size and isinstance(view.obj, bytes):
                yield view[:size]
                view = view[size:]
                continue
            taken = view[: size - len(part)]
            part += taken
            view = view[len(taken) :]
            if len(part) == size:
                yield part
                part = bytearray()
    if part:
        yield part


# From the environment


def _connect(kind: str, host: str, options: ClientConfig, credentials: Any) -> ObjectStore:
    if kind == "s3":
        return _connect_s3(host, options, credentials)
    if kind == "gs":
        return GCSStore(host, client_options=options, retry_config=_RETRIES)
    if not os.environ.get("AZURE_STORAGE_ACCOUNT_NAME") and not os.environ.get("AZURE_STORAGE_USE_EMULATOR"):
        raise BucketError(f"az://{host}: in which storage account?", hint="set AZURE_STORAGE_ACCOUNT_NAME")
    endpoint = _first("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT")
    return AzureStore(host, client_options=_allowing(endpoint, options), retry_config=_RETRIES)


def _connect_s3(host: str, options: ClientConfig, credentials: Any) -> S3Store:
    # Not every store that speaks S3 can delete in bulk, and we delete one by one.
    config: S3Config = {"conditional_put": "etag", "disable_bulk_delete": True}
    endpoint = _first("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    if endpoint or "AWS_ENDPOINT_URL_S3" in os.environ:
        # By this name, as the variable would go before any other setting, even if empty. obstore ends in a panic where
        # it is no address.
        config["aws_endpoint_url_s3"] = _check_endpoint(endpoint)
    options, bundle = _allowing(endpoint, options), os.environ.get("AWS_CA_BUNDLE")
    if bundle and Path(bundle).is_file():
        options = {**options, "root_certificate": Path(bundle).read_bytes()}
    return S3Store(host, config=config, client_options=options, retry_config=_RETRIES, credential_provider=credentials)


def _first(*variables: str) -> str:
    return next(filter(None, map(os.environ.get, variables)), "")


def _check_endpoint(endpoint: str) -> str:
    if not re.fullmatch(r"https?://[^\s/@]+(/[^\s@]*)?", endpoint):
        raise BucketError(
            "AWS_ENDPOINT_URL, or AWS_ENDPOINT_URL_S3, is not the address of a server",
            hint="set it to something like https://s3.example.com, without a user or password, or unset it",
        )
    return endpoint


def _allowing(endpoint: str, options: ClientConfig) -> ClientConfig:
    """Whoever names an endpoint without encryption wants it so."""
    return {**options, "allow_http": True} if endpoint.startswith("http://") else options


def _from_profile(url: str) -> Any:
    """The credentials that boto3 finds in ~/.aws, where the environment has none: obstore does not look there."""
    profile = os.environ.get("AWS_PROFILE")
    if _first(*_CREDENTIALS) or not (profile or Path("~/.aws").expanduser().is_dir()):
        return None
    try:
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError:
        if not profile:
            return None
        raise PermissionDenied(f"{url}: AWS_PROFILE is set, but needs boto3", hint="pip install boto3") from None
    try:
        return Boto3CredentialProvider()
    except Exception as problem:  # boto3's errors have nothing in common
        raise PermissionDenied(f"{url}: no credentials ({problem})", hint="check AWS_PROFILE and ~/.aws") from problem
