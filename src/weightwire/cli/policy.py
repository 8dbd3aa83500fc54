"""`weightwire policy`: prints the permissions of a role as an IAM policy for S3."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import typer

from weightwire.bucket import BucketPlace, place_of
from weightwire.chain import REPLICA_NAMES, AccessRole, Permission, Verb, access_of, is_replica_name

__all__ = ["policy"]

_SPECIAL = re.compile(r"[*?$]")
# Statement -> its verbs and its actions.
_STATEMENTS: Mapping[str, tuple[Verb, tuple[str, ...]]] = {
    "Read": (Verb.GET, ("s3:GetObject",)),
    "Create": (Verb.CREATE, ("s3:PutObject",)),
    "Replace": (Verb.PUT, ("s3:PutObject",)),
    "Upload": (Verb.UPLOAD, ("s3:PutObject", "s3:AbortMultipartUpload")),
    "Delete": (Verb.DELETE, ("s3:DeleteObject",)),
}
_ONLY_IF_ABSENT = {"Null": {"s3:if-none-match": "false"}}


def policy(
    role: Annotated[AccessRole, typer.Argument(metavar="ROLE", help="publisher, follower, gc or reader.")],
    url: Annotated[str, typer.Argument(metavar="URL", help="The run: s3://BUCKET/PREFIX.")],
    name: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="For a follower: name of a replica whose heartbeat it may write; repeatable. `NAME*` is every name "
            "with this beginning.",
        ),
    ] = None,
    portable: Annotated[
        bool,
        typer.Option(
            "--portable",
            help="For other stores than Amazon S3: leave out the condition that objects are created, not replaced.",
        ),
    ] = False,
) -> None:
    """Print the IAM policy that a role needs for the run at URL.

    Roles: publisher (trainers, publish), follower (follow, serve), gc, and reader (status, log, page, verify, restore,
    gc --dry-run). A follower without --name follows, but writes no heartbeat. Nothing is requested from the bucket.
    """
    place, names = _checked_url(url), [_checked_name(one) for one in name or ()]
    if names and role is not AccessRole.FOLLOWER:
        raise typer.BadParameter("only a follower has a name", param_hint="--name")
    statements = list(_statements(access_of(role, names), place, portable))
    print(json.dumps({"Version": "2012-10-17", "Statement": statements}, indent=2))


def _checked_url(url: str) -> BucketPlace:
    place = place_of(url)
    if place.kind != "s3":
        raise typer.BadParameter(
            "IAM policies are for s3:// URLs; docs/buckets.md has the permissions of each role", param_hint="URL"
        )
    return place


def _checked_name(name: str) -> str:
    if not is_replica_name(name.removesuffix("*")):
        raise typer.BadParameter(f"{name!r} is not the name of a replica: {REPLICA_NAMES}", param_hint="--name")
    return name


def _statements(access: Sequence[Permission], place: BucketPlace, portable: bool) -> Iterator[dict[str, Any]]:
    bucket = f"arn:aws:s3:::{place.bucket}"
    prefix = _escaped(f"{place.prefix}/" if place.prefix else "")
    for name, (verb, actions) in _STATEMENTS.items():
        paths = [one.path + "*" * one.is_folder for one in access if verb in one.verbs]
        if not paths:
            continue
        resources = [f"{bucket}/{prefix}{path}" for path in paths]
        found = {"Sid": name, "Effect": "Allow", "Action": list(actions), "Resource": resources}
        yield {**found, "Condition": _ONLY_IF_ABSENT} if verb is Verb.CREATE and not portable else found
    folders = [f"{prefix}{one.path}*" for one in access if Verb.LIST in one.verbs]
    condition = {"StringLike": {"s3:prefix": folders}}
    yield {"Sid": "List", "Effect": "Allow", "Action": ["s3:ListBucket"], "Resource": [bucket], "Condition": condition}


def _escaped(text: str) -> str:
    """IAM reads `*` and `?` as wildcards, and `$` as the beginning of a variable."""
    return _SPECIAL.sub(lambda found: f"${{{found[0]}}}", text)
