"""A fake Hugging Face Hub with buckets only, for the real huggingface_hub and hf_xet.

hf_xet stores file contents in a local folder. Like the real Hub, it checks no conditions and answers a batch file by
file.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

__all__ = ["FakeHub"]

_PAGE = 3


class FakeHub:
    """`buckets` maps bucket and path to the entry in a listing. Tests may change it as other writers would."""

    token = "hf_secret"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.buckets: dict[str, dict[str, dict[str, Any]]] = {}
        self.private: dict[str, bool] = {}
        self.requests: list[str] = []
        self.status = 0
        """Answered to every request, if set."""
        self.after_batch: Callable[[], None] = lambda: None
        """Called between a write and its answer."""
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

    @contextmanager
    def running(self) -> Iterator[FakeHub]:
        thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()

    def answer(self, method: str, url: str, body: bytes) -> tuple[int, dict[str, str], Any]:
        """Status, headers and content of the answer."""
        parts = urlsplit(url)
        kind, _, rest = parts.path.removeprefix("/api").lstrip("/").partition("/")
        owner, name, *more = rest.split("/", 3)
        bucket, verb = f"{owner}/{name}", more[0] if more else ""
        if kind != "buckets" or self.status:
            return self.status or 404, {}, {"error": "no"}
        if method == "POST" and not verb:
            return self._create(bucket, json.loads(body or b"{}"))
        if bucket not in self.buckets:
            return 404, {"X-Error-Code": "RepoNotFound"}, {"error": "Repository not found"}
        argument = unquote(more[1]) if len(more) > 1 else ""
        if verb == "tree":
            return self._tree(bucket, argument, int(parse_qs(parts.query).get("cursor", ["0"])[0]))
        if verb == "resolve":
            return self._resolve(bucket, argument)
        if verb == "paths-info":
            found = self.buckets[bucket]
            return 200, {}, [found[path] for path in json.loads(body)["paths"] if path in found]
        if verb == "batch":
            return self._batch(bucket, [json.loads(line) for line in body.splitlines()])
        if verb in ("xet-read-token", "xet-write-token"):
            expires, store = int(time.time()) + 3600, f"local://{self.folder}"
            # In both places: older clients read the headers.
            headers = {"X-Xet-Access-Token": "xet", "X-Xet-Token-Expiration": str(expires), "X-Xet-Cas-Url": store}
            return 200, headers, {"accessToken": "xet", "exp": expires, "casUrl": store}
        return 404, {}, {"error": f"{method} {url}"}

    def _create(self, bucket: str, settings: dict[str, Any]) -> tuple[int, dict[str, str], Any]:
        if bucket in self.buckets:
            return 409, {}, {"error": "You already created this bucket", "url": f"{self.endpoint}/buckets/{bucket}"}
        self.buckets[bucket] = {}
        self.private[bucket] = settings.get("visibility") == "private" or settings.get("private") is True
        return 200, {}, {"url": f"{self.endpoint}/buckets/{bucket}"}

    def _tree(self, bucket: str, folder: str, cursor: int) -> tuple[int, dict[str, str], Any]:
        start = f"{folder}/" if folder else ""
        found = [entry for path, entry in sorted(self.buckets[bucket].items()) if path.startswith(start)]
        if not found and folder:
            return 404, {"X-Error-Code": "EntryNotFound"}, {"error": "no such folder"}
        following = f"{self.endpoint}/api/buckets/{bucket}/tree"
        following += f"/{folder.replace('/', '%2F')}" if folder else ""
        following += f"?recursive=True&cursor={cursor + _PAGE}"
        headers = {"Link": f'<{following}>; rel="next"'} if cursor + _PAGE < len(found) else {}
        return 200, headers, found[cursor : cursor + _PAGE]

    def _resolve(self, bucket: str, path: str) -> tuple[int, dict[str, str], Any]:
        entry = self.buckets[bucket].get(path)
        if entry is None:
            return 404, {"X-Error-Code": "EntryNotFound"}, {"error": "no such file"}
        route = f"{self.endpoint}/api/buckets/{bucket}/xet-read-token"
        size = str(entry["size"])
        return 200, {"X-Xet-Hash": entry["xetHash"], "X-Xet-Refresh-Route": route, "X-Linked-Size": size}, None

    def _batch(self, bucket: str, operations: list[dict[str, Any]]) -> tuple[int, dict[str, str], Any]:
        files, failed = self.buckets[bucket], []
        for operation in operations:
            path = operation["path"]
            if operation["type"] == "addFile":
                files[path] = self.entry(path, operation["xetHash"], operation["mtime"])
            elif files.pop(path, None) is None:
                failed.append({"path": path, "error": "no such file"})
        self.after_batch()
        return 200, {}, {"success": not failed, "processed": len(operations), "failed": failed}

    def entry(self, path: str, xet_hash: str, mtime: int = 0) -> dict[str, Any]:
        uploaded = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        changed = datetime.fromtimestamp(mtime / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        size = self._size_of(xet_hash)
        return {
            "type": "file",
            "path": path,
            "size": size,
            "xetHash": xet_hash,
            "mtime": changed,
            "uploadedAt": uploaded,
        }

    def _size_of(self, xet_hash: str) -> int:
        """The size of a file, from the content store: a batch does not contain it."""
        import hf_xet
        from huggingface_hub.utils._xet import get_xet_session

        if not xet_hash.strip("0"):
            return 0
        session = get_xet_session()  # type: ignore[no-untyped-call]
        group = session.new_download_stream_group(endpoint=f"local://{self.folder}")
        return sum(map(len, group.download_stream(hf_xet.XetFileInfo(xet_hash, None))))


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"
    # Headers and body in one packet: a second packet would wait for 40 ms.
    wbufsize = 1 << 16

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.hub.requests.append(f"{self.command} {self.path}")
        status, headers, content = 401, {"X-Error-Message": "Invalid credentials in Authorization header"}, None
        if self.headers.get("Authorization") == f"Bearer {self.hub.token}":
            status, headers, content = self.hub.answer(self.command, self.path, body)
        data = b"" if content is None else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data if self.command != "HEAD" else b"")

    do_GET = do_POST = do_HEAD = do_PUT = do_DELETE = _serve

    def log_message(self, format: str, *args: object) -> None:
        """Tests have enough output."""
