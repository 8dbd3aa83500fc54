"""`weightwire policy`: the policies that it prints, and the arguments that it refuses."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.commands import weightwire
from support.iam_policies import Need, allows
from support.stores import NOWHERE, environment, use

ROLES = ("publisher", "follower", "gc", "reader")


def policy(*args: str) -> dict[str, Any]:
    ran = weightwire("policy", *args)
    assert (ran.code, ran.err) == (0, ""), ran
    found: dict[str, Any] = json.loads(ran.out)
    return found


def resources(found: dict[str, Any], sid: str) -> list[str]:
    [statement] = [one for one in found["Statement"] if one["Sid"] == sid]
    return [place.removeprefix("arn:aws:s3:::") for place in statement["Resource"]]


def get(resource: str) -> Need:
    return Need("s3:GetObject", f"arn:aws:s3:::{resource}")


def listing(prefix: str) -> Need:
    return Need("s3:ListBucket", "arn:aws:s3:::bucket", (("s3:prefix", prefix),))


def test_policy_sends_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, environment(NOWHERE, "", ""))
    monkeypatch.setenv("AWS_PROFILE", "nothing")
    assert policy("reader", "s3://bucket/run")


def test_bucket_without_a_prefix_has_the_objects_at_its_top() -> None:
    found = policy("follower", "s3://bucket")
    assert "bucket/commits/*" in resources(found, "Read")
    assert allows(found, listing("shortcuts/"))
    assert not allows(found, listing(""))


def test_wildcards_in_a_prefix_stand_for_themselves() -> None:
    found = policy("reader", "s3://bucket/a*b$c")
    assert allows(found, get("bucket/a*b$c/run.json"))
    assert not allows(found, get("bucket/axb$c/run.json"))
    assert allows(found, listing("a*b$c/commits/"))
    assert not allows(found, listing("a-other-b$c/commits/"))


def test_condition_on_creates_is_left_out_of_portable_policies() -> None:
    commit = "arn:aws:s3:::bucket/run/commits/1.json"
    replacing, creating = Need("s3:PutObject", commit), Need("s3:PutObject", commit, (("s3:if-none-match", "*"),))
    found, portable = (policy("publisher", "s3://bucket/run", *more) for more in ((), ("--portable",)))
    assert (allows(found, replacing), allows(found, creating)) == (False, True)
    assert (allows(portable, replacing), allows(portable, creating)) == (True, True)


def test_follower_writes_the_heartbeats_of_its_names() -> None:
    found = policy("follower", "s3://bucket/run", "--name", "gpu-0", "--name", "cpu-*")
    assert resources(found, "Replace") == ["bucket/run/replicas/gpu-0.json", "bucket/run/replicas/cpu-*.json"]
    assert "Replace" not in {one["Sid"] for one in policy("follower", "s3://bucket/run")["Statement"]}


@pytest.mark.parametrize("role", ROLES)
def test_policy_fits_the_smallest_limit_of_iam(role: str) -> None:
    """An inline policy of a user has at most 2,048 characters without spaces."""
    found = policy(role, "s3://bucket-of-some-team/models/run")
    assert len(json.dumps(found, separators=(",", ":"))) < 2048


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("nobody", "s3://bucket/run"), "nobody"),
        (("gc", "gs://bucket/run"), "IAM policies are for s3:// URLs"),
        (("gc", "/data/run"), "IAM policies are for s3:// URLs"),
        (("gc", "s3://bucket/run", "--name", "gpu-0"), "only a follower has a name"),
        (("follower", "s3://bucket/run", "--name", "*"), "is not the name of a replica"),
        (("follower", "s3://bucket/run", "--name", "../run"), "is not the name of a replica"),
        (("follower", "s3://bucket/run", "--name", "a*b"), "is not the name of a replica"),
    ],
)
def test_wrong_argument_is_refused(args: tuple[str, ...], message: str) -> None:
    ran = weightwire("policy", *args)
    assert (ran.code, ran.out) == (2, "")
    assert message in ran.err
