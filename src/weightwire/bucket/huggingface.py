"""Buckets of the Hugging Face Hub, through huggingface_hub.

The Hub's API has no conditional writes. A create checks, writes and checks again, which is safe for one writer only, so
`strict` is false. The same bucket through the Hub's S3 gateway (s3:// with AWS_ENDPOINT_URL) is strict. The API has no
transactions either, so every write is checked afterwards.
"""

from __future__ import annotations

import os
import re
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from weightwire.bucket.bucket import GET_LIMIT, ObjectInfo
from weightwire.bucket.concurrency import flat, in_thread, pieces
from weightwire.bucket.paths import check_path, check_prefix
from weightwire.errors import (
    AlreadyExists,
    BucketError,
    MissingDependency,
    NotFound,
    PermissionDenied,
    TooLarge,
    Truncated,
    Unavailable,
    WeightwireError,
)

if TYPE_CHECKING:
    from huggingface_hub import BucketFile, HfApi

__all__ = ["HuggingFaceBucket", "open_huggingface"]

_NAME = "object"
_ADDRESS = re.compile(r"\w+://\S+")
_TOKEN = "set HF_TOKEN or run `hf auth login`, with a token that can read and write this bucket"


def open_huggingface(name: str, prefix: str) -> HuggingFaceBucket:
    """Opens the bucket OWNER/NAME with the token that huggingface_hub finds. The first write creates it, private."""
    url = f"hf://buckets/{name}/{prefix}".rstrip("/")
    endpoint = os.environ.get("HF_ENDPOINT")
    if endpoint and set(endpoint) & set("@?#"):  # huggingface_hub logs it
        raise BucketError(
            "the variable HF_ENDPOINT has a user, a password or a query", hint="remove it, and set HF_TOKEN"
        )
    try:
        import hf_xet  # noqa: F401
        from huggingface_hub import HfApi
        from huggingface_hub.utils.tqdm import disable_progress_bars

        api = HfApi(endpoint=endpoint, library_name="weightwire")
        if not hasattr(api, "batch_bucket_files"):
            raise ImportError("this release of huggingface_hub does not support buckets")
    except ImportError as problem:
        raise MissingDependency(f"{url}: {problem}", hint=MissingDependency.hint_for("hf")) from None
    # They would fill a trainer's output.
    disable_progress_bars()
    return HuggingFaceBucket(url, name, prefix, api)


class HuggingFaceBucket:
    """A `Bucket` on the Hub, for a single writer."""

    url: str
    strict = False
    poll_interval = 2.0  # the Hub limits the request rate

    def __init__(self, url: str, name: str, prefix: str, api: HfApi) -> None:
        self.url = url
        self._name = name
        self._prefix = f"{prefix}/" if prefix else ""
        self._api = api
        self._is_there = False
        # The last file that was read in part: the next part of it needs no download.
        self._kept: tuple[str, tempfile.TemporaryDirectory[str]] | None = None
        self._keeping = threading.Lock()

    async def create(self, path: str, data: bytes) -> None:
        key = self._key(path)
        with self._failing(path):
            await in_thread(lambda: self._create(key, data))

    async def put(self, path: str, data: Iterable[bytes | memoryview] | bytes, size: int | None = None) -> None:
        key, stop = self._key(path), threading.Event()
        with self._failing(path):
            await in_thread(lambda: self._put(key, pieces(data, path, size, stop)), stop)

    async def get(self, path: str, limit: int = GET_LIMIT) -> bytes:
        key = self._key(path)
        with self._failing(path):
            return await in_thread(lambda: self._get(key, limit))

    async def read_into(self, path: str, buffer: memoryview, start: int = 0) -> None:
        key, view = self._key(path), flat(buffer)
        with self._failing(path):
            await in_thread(lambda: self._read(key, view, start))

    async def list(self, prefix: str) -> Sequence[ObjectInfo]:
        folder = self._prefix + check_prefix(prefix)
        try:
            with self._failing(prefix):
                return await in_thread(lambda: self._list(folder.rstrip("/")))
        except NotFound:
            return []

    async def find(self, path: str) -> ObjectInfo | None:
        key = self._key(path)
        try:
            with self._failing(path):
                found = await in_thread(lambda: self._look(key))
        except NotFound:
            return None
        return self._describe(found)

    async def delete(self, path: str) -> None:
        key = self._key(path)
        with suppress(NotFound), self._failing(path):
            await in_thread(lambda: self._delete(key))

    async def close(self) -> None:
        """Deletes the cached download."""
        await in_thread(self._drop)

    def _key(self, path: str) -> str:
        return self._prefix + check_path(path)

    def _describe(self, found: BucketFile) -> ObjectInfo:
        # mtime comes from the writer's clock.
        modified = found.uploaded_at or found.mtime
        return ObjectInfo(found.path.removeprefix(self._prefix), found.size, modified.timestamp() if modified else 0.0)

    @contextmanager
    def _failing(self, path: str) -> Iterator[None]:
        try:
            yield
        except WeightwireError:
            raise
        except Exception as problem:  # the errors of huggingface_hub, httpx and hf_xet have nothing in common
            raise _explain(problem, f"{self.url}/{path}") from None

    # In threads

    def _create(self, key: str, data: bytes) -> None:
        self._make()
        with suppress(NotFound):
            self._look(key)
            raise AlreadyExists.at(self._url_of(key))
        self._add(key, data, len(data))
        if self._get(key, len(data)) != data:
            raise AlreadyExists(
                f"{self._url_of(key)}: another writer wrote it at the same time",
                hint="run only one publisher on an hf:// bucket, or use its S3 gateway (s3://)",
            )

    def _put(self, key: str, views: Iterable[memoryview]) -> None:
        with tempfile.NamedTemporaryFile(prefix="weightwire-") as file:
            for view in views:
                file.write(view)
            file.flush()
            self._add(key, file.name, file.tell())

    def _add(self, key: str, source: bytes | str, size: int) -> None:
        self._make()
        self._api.batch_bucket_files(self._name, add=[(source, key)])
        try:
            found = self._look(key)
        except NotFound:
            raise Unavailable(f"{self._url_of(key)}: not found after the upload", hint="try again") from None
        if found.size != size:
            raise Unavailable(
                f"{self._url_of(key)}: {size:,} bytes were sent, {found.size:,} were stored", hint="try again"
            )

    def _make(self) -> None:
        if not self._is_there:
            # The default is public.
            self._api.create_bucket(self._name, private=True, exist_ok=True)
            self._is_there = True

    def _look(self, key: str) -> BucketFile:
        for found in self._api.get_bucket_paths_info(self._name, [key]):
            if found.path == key:
                return found
        raise NotFound.at(self._url_of(key))

    def _get(self, key: str, limit: int) -> bytes:
        found = self._look(key)
        if found.size > limit:
            raise TooLarge.at(self._url_of(key), limit)
        with tempfile.TemporaryDirectory(prefix="weightwire-") as folder:
            return self._download(found, folder).read_bytes()

    def _read(self, key: str, view: memoryview, start: int) -> None:
        found = self._look(key)
        end = start + len(view)
        if found.size < end:
            raise Truncated.at(self._url_of(key), found.size, end)
        if len(view) == found.size:
            with tempfile.TemporaryDirectory(prefix="weightwire-") as folder:
                _fill(self._download(found, folder), view, 0)
        elif view:
            with self._keeping:
                _fill(self._keep(found), view, start)

    def _keep(self, found: BucketFile) -> Path:
        """Downloads the whole file for the first part: the Hub's client has no range reads."""
        if self._kept is None or self._kept[0] != found.xet_hash:
            self._drop()
            folder = tempfile.TemporaryDirectory(prefix="weightwire-")
            self._download(found, folder.name)
            self._kept = found.xet_hash, folder
        return Path(self._kept[1].name, _NAME)

    def _drop(self) -> None:
        if self._kept is not None:
            self._kept[1].cleanup()
            self._kept = None

    def _download(self, found: BucketFile, folder: str) -> Path:
        target = Path(folder, _NAME)
        self._api.download_bucket_files(self._name, [(found, target)], raise_on_missing_files=True)
        if target.stat().st_size != found.size:
            raise Unavailable(f"{self._url_of(found.path)}: the download is incomplete", hint="try again")
        return target

    def _list(self, folder: str) -> Sequence[ObjectInfo]:
        tree = self._api.list_bucket_tree(self._name, folder or None, recursive=True)
        start = f"{folder}/" if folder else ""
        files = (found for found in tree if found.type == "file" and found.path.startswith(start))
        return sorted(map(self._describe, files), key=lambda entry: entry.path)

    def _delete(self, key: str) -> None:
        self._look(key)
        try:
            self._api.batch_bucket_files(self._name, delete=[key])
        except Exception:
            # If another process deleted it first, this raises NotFound.
            self._look(key)
            raise

    def _url_of(self, key: str) -> str:
        return f"{self.url}/{key.removeprefix(self._prefix)}"


def _fill(path: Path, view: memoryview, start: int) -> None:
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while view:
            count = file.readinto(view)
            if not count:
                raise Unavailable(f"{path}: the file became shorter while it was read", hint="try again")
            view = view[count:]


def _explain(problem: Exception, where: str) -> BucketError:
    """Classifies by the status, if there was a reply. Keeps only the first line: others may hold signed addresses."""
    names = {kind.__name__ for kind in type(problem).__mro__}
    status = getattr(getattr(problem, "response", None), "status_code", 0)
    if names & {"BucketNotFoundError", "RepositoryNotFoundError"}:
        # Not NoBucket: the first write creates it.
        return NotFound(f"{where}: the bucket does not exist or is private", hint=f"check its name, and {_TOKEN}")
    if names & {"EntryNotFoundError"} or status == 404:
        return NotFound.at(where)
    if names & {"LocalTokenNotFoundError", "XetAuthenticationError"} or status in (401, 403):
        return PermissionDenied(f"{where}: {_reason(problem, status)}", hint=_TOKEN)
    if "OfflineModeIsEnabled" in names:
        return Unavailable(f"{where}: huggingface_hub is offline", hint="unset HF_HUB_OFFLINE")
    if status == 429:
        return Unavailable(
            f"{where}: too many requests", hint="poll less often: the Hub limits requests per five minutes"
        )
    if 400 <= status < 500 or names & {"HFValidationError"}:
        return BucketError(f"{where}: {_reason(problem, status)}", hint="the Hub rejected the request: check the URL")
    return Unavailable(
        f"{where}: {_reason(problem, status)}", hint="check the network and HF_ENDPOINT, or try again later"
    )


def _reason(problem: Exception, status: int) -> str:
    if status >= 400:
        return f"the Hub answered {status}"
    lines = [line for line in str(problem).splitlines() if line.strip()]
    return _ADDRESS.sub("an address", lines[0])[:200] if lines else type(problem).__name__
