"""Sends any S3 request with a key (AWS Signature Version 4), also those that weightwire never sends."""

from __future__ import annotations

import hashlib
import hmac
import http.client
import time
from collections.abc import Mapping
from urllib.parse import quote, urlsplit

__all__ = ["send_signed"]


def send_signed(
    env: Mapping[str, str],
    method: str,
    path: str,
    *,
    query: Mapping[str, str] | None = None,
    body: bytes = b"",
    headers: Mapping[str, str] | None = None,
    service: str = "s3",
) -> int:
    """Returns the status. `path` is `BUCKET/KEY` or `BUCKET`; `env` selects the store and the key."""
    endpoint = urlsplit(env["AWS_ENDPOINT_URL"])
    stamp, hashed = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime()), hashlib.sha256(body).hexdigest()
    signed = {"host": endpoint.netloc, "x-amz-content-sha256": hashed, "x-amz-date": stamp, **(headers or {})}
    where = "/" + quote(path)
    pairs = "&".join(f"{quote(name, '')}={quote(value, '')}" for name, value in sorted((query or {}).items()))
    names = ";".join(sorted(signed))
    lines = "".join(f"{name}:{signed[name]}\n" for name in sorted(signed))
    canonical = f"{method}\n{where}\n{pairs}\n{lines}\n{names}\n{hashed}"
    scope = f"{stamp[:8]}/us-east-1/{service}/aws4_request"
    text = f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{hashlib.sha256(canonical.encode()).hexdigest()}"
    signature = _signature(env["AWS_SECRET_ACCESS_KEY"], scope, text)
    credential = f"{env['AWS_ACCESS_KEY_ID']}/{scope}"
    authorization = f"AWS4-HMAC-SHA256 Credential={credential}, SignedHeaders={names}, Signature={signature}"
    connection = http.client.HTTPConnection(endpoint.hostname or "", endpoint.port, timeout=30)
    try:
        address = f"{where}?{pairs}" if pairs else where
        connection.request(method, address, body, {**signed, "Authorization": authorization})
        answer = connection.getresponse()
        answer.read()
        return answer.status
    finally:
        connection.close()


def _signature(secret: str, scope: str, text: str) -> str:
    key = f"AWS4{secret}".encode()
    for part in scope.split("/"):
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()
