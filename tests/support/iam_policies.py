"""Evaluates IAM policies as Amazon S3 does, and a proxy that enforces them in front of another store.

Knows what the policies of `weightwire policy` use: `Allow`, wildcards, and the conditions StringLike and Null. An
unknown condition or request is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from faults.proxy import Proxy, Reply, Request

__all__ = ["AuthorizingProxy", "Need", "allows", "needs_of"]

Policy = Mapping[str, Any]

_ARN = "arn:aws:s3:::"
_KEY = re.compile(r"Credential=([^/]+)/")
_DENIED = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"


@dataclass(frozen=True)
class Need:
    """An action on a resource. `context` has the values of condition keys that the request carries."""

    action: str
    resource: str
    context: tuple[tuple[str, str], ...] = ()


def allows(policy: Policy, need: Need) -> bool:
    return any(_matches(statement, need) for statement in policy["Statement"])


def _matches(statement: Mapping[str, Any], need: Need) -> bool:
    assert statement["Effect"] == "Allow"
    return (
        need.action in statement["Action"]
        and any(_like(pattern, need.resource) for pattern in statement["Resource"])
        and all(_holds(how, what, dict(need.context)) for how, what in statement.get("Condition", {}).items())
    )


def _holds(operator: str, wanted: Mapping[str, Any], context: Mapping[str, str]) -> bool:
    if operator == "StringLike":  # false for a key that the request does not carry
        return all(key in context and any(_like(one, context[key]) for one in values) for key, values in wanted.items())
    assert operator == "Null", operator
    return all((key not in context) == (value == "true") for key, value in wanted.items())


def _like(pattern: str, text: str) -> bool:
    return _compiled(pattern).fullmatch(text) is not None


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    """`*` and `?` are wildcards, and `${*}`, `${?}` and `${$}` the characters themselves."""
    wildcards = {"*": ".*", "?": "."}
    pieces = re.findall(r"\$\{[*?$]\}|.", pattern, re.DOTALL)
    return re.compile("".join(wildcards.get(one) or re.escape(one[2] if len(one) > 1 else one) for one in pieces), re.S)


def needs_of(request: Request) -> list[Need]:
    """What a request needs. The actions are those of the S3 documentation."""
    where, query = _place(request)
    bucket, _, key = where.partition("/")
    headers = {name.lower(): value for name, value in request.headers}
    one = f"{_ARN}{where}"
    if not key:
        return list(_bucket_needs(request, bucket, query))
    if request.method in ("GET", "HEAD") and not query.keys() & {"acl", "tagging", "policy", "uploads", "uploadId"}:
        return [Need("s3:GetObject", one)]
    if request.method == "DELETE":
        return [Need("s3:AbortMultipartUpload" if "uploadId" in query else "s3:DeleteObject", one)]
    if request.method in ("PUT", "POST") and not query.keys() - {"uploads", "uploadId", "partNumber", "x-id"}:
        absent = (("s3:if-none-match", headers["if-none-match"]),) if "if-none-match" in headers else ()
        source = headers.get("x-amz-copy-source")
        read = [Need("s3:GetObject", f"{_ARN}{unquote(source).lstrip('/')}")] if source else []
        return [Need("s3:PutObject", one, absent), *read]
    return [Need(f"unknown: {request.method} ?{'&'.join(query)}", one)]


def _bucket_needs(request: Request, bucket: str, query: Mapping[str, Sequence[str]]) -> Iterator[Need]:
    if request.method == "GET" and "list-type" in query:
        prefix = tuple(("s3:prefix", one) for one in query.get("prefix", ()))
        yield Need("s3:ListBucket", f"{_ARN}{bucket}", prefix)
    elif request.method == "POST" and "delete" in query:
        for key in re.findall(r"<Key>([^<]*)</Key>", request.body.decode()):
            yield Need("s3:DeleteObject", f"{_ARN}{bucket}/{key}")
    else:
        yield Need(f"unknown: {request.method} ?{'&'.join(query)}", f"{_ARN}{bucket}")


def _place(request: Request) -> tuple[str, Mapping[str, Sequence[str]]]:
    parts = urlsplit(request.path)
    return unquote(parts.path).lstrip("/"), parse_qs(parts.query, keep_blank_values=True)


@dataclass
class AuthorizingProxy(Proxy):
    """Enforces a policy for each access key, as Amazon S3 does, then asks the store behind it.

    Answers 403 for a missing object if the key may not list the bucket. A condition on `s3:prefix` never holds here,
    because a request for an object carries no prefix.
    """

    policies: dict[str, Policy] = field(default_factory=dict)
    administrator: str = "admin-key"
    used: dict[str, set[Need]] = field(default_factory=dict)
    """What each key was allowed to do, and did."""
    denied: list[tuple[str, Need]] = field(default_factory=list)

    def pass_on(self, request: Request) -> Reply | None:
        headers = {name.lower(): value for name, value in request.headers}
        key = found[1] if (found := _KEY.search(headers.get("authorization", ""))) else ""
        if key == self.administrator:
            return super().pass_on(request)
        policy, needs = self.policies.get(key, {"Statement": []}), needs_of(request)
        for need in needs:
            if not allows(policy, need):
                self.denied.append((key, need))
                return _refusal()
        self.used.setdefault(key, set()).update(needs)
        reply = super().pass_on(request)
        if reply is not None and reply.status == 404 and request.method in ("GET", "HEAD"):
            bucket = f"{_ARN}{_place(request)[0].partition('/')[0]}"
            if not allows(policy, Need("s3:ListBucket", bucket)):
                return _refusal()
        return reply


def _refusal() -> Reply:
    return Reply(403, [("Content-Type", "application/xml")], _DENIED)
