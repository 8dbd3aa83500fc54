"""Every role with its own key, with exactly the permissions that `weightwire policy` prints, on a real store.

Twice: SeaweedFS enforces the portable policies itself; a proxy in front of it enforces those for Amazon S3.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from faults.actors import bits_at, weights_at
from support.commands import Ran, Training, bits_of, weightwire
from support.iam_policies import AuthorizingProxy, Need
from support.role_keys import RoleKeys
from support.small_run import bits_of as bits_of_weights
from support.stores import running, use
from weightwire import Tensor
from weightwire.bucket.registry import open_bucket
from weightwire.chain.keys import PrivateKey
from weightwire.chain.permissions import AccessRole, Verb, access_of
from weightwire.errors import Fenced
from weightwire.follower.follower import Follower
from weightwire.publisher.publisher import Publisher
from weightwire.system.runtime import Runtime
from weightwire.upkeep.gc import sweep
from weightwire.upkeep.retention import Retention
from weightwire.weights import DTYPES

pytestmark = pytest.mark.slow

FILES = {"config.json": b'{"model_type": "tiny"}', "tokenizer/vocab.txt": b"a\nb\n"}
SEED = 11
AT_ONCE = ("--keep-anchors", "1", "--window", "0", "--grace", "0")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RoleKeys]:
    server = RoleKeys(tmp_path_factory.mktemp("role-keys"))
    with running(server):
        yield server


@pytest.fixture(scope="module")
def amazon(store: RoleKeys) -> Iterator[AuthorizingProxy]:
    with store.amazon() as proxy:
        yield proxy


class Forgetful(Retention):
    """Deletes the heartbeats of stopped replicas at once, not after a day."""

    forgotten = 0.0


@dataclass
class Keyring:
    """Runs commands, and opens the run, with the key of a role."""

    store: RoleKeys
    endpoint: str
    monkeypatch: pytest.MonkeyPatch

    @property
    def url(self) -> str:
        return self.store.run_url

    def use(self, key: str) -> str:
        use(self.monkeypatch, self.store.through(self.endpoint, key))
        return self.url

    def __call__(self, key: str, command: str, *args: str | Path) -> Ran:
        return weightwire(command, *args, self.use(key))

    def works(self, key: str, command: str, *args: str | Path) -> Ran:
        ran = self(key, command, *args)
        assert ran.code == 0, ran
        return ran

    def clear(self) -> None:
        self.use("admin")
        bucket = open_bucket(self.url)

        async def delete_all() -> None:
            for one in await bucket.list(""):
                await bucket.delete(one.path)

        asyncio.run(delete_all())


@pytest.fixture(params=["seaweedfs", "amazon"])
def keyring(
    request: pytest.FixtureRequest, store: RoleKeys, amazon: AuthorizingProxy, monkeypatch: pytest.MonkeyPatch
) -> Keyring:
    endpoint = {"seaweedfs": store.endpoint, "amazon": amazon.endpoint}[request.param]
    keyring = Keyring(store, endpoint, monkeypatch)
    keyring.clear()
    return keyring


def until(done: Callable[[], object], seconds: float = 120.0) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.02)


# --- each role works with its own key ---------------------------------------------------------------------------------


def test_a_run_works_with_a_key_for_each_role(keyring: Keyring, tmp_path: Path) -> None:
    live_a_run(keyring, tmp_path)


def live_a_run(keyring: Keyring, tmp_path: Path) -> None:
    """A run with deltas, anchors, a restart of the publisher, gc and late joiners."""
    url = keyring.use("gpu-0")
    with Follower(open_bucket(url), into=tmp_path / "gpu-0", name="gpu-0") as follower:
        follower.start()  # before there is a run
        until(lambda: "waiting for a run" in follower.trouble)
        with Publisher(open_bucket(keyring.use("publisher")), files=FILES, anchor_every=3) as publisher:
            for step in range(7):
                publisher.publish(weights_at(SEED, step), step=step).wait(120)
            publisher.wait(replicas=1, timeout=120)
        with Publisher(open_bucket(url), anchor_every=3) as publisher:  # restores the published weights
            for step in range(7, 12):
                version = publisher.publish(weights_at(SEED, step), step=step).wait(120)
        until(lambda: follower.version == version)
        assert bits_of_weights(follower.checkpoint()) == bits_at(SEED, 11)
        follow_late(keyring, tmp_path)
        assert "1 alive" in keyring.works("reader", "status").out
    # On a busy machine it may first report a slow store.
    assert any(line.startswith("deleted ") for line in keyring.works("gc", "gc", *AT_ONCE).err.splitlines())
    keyring.use("gc")
    swept = asyncio.run(sweep(open_bucket(url), Runtime(), Forgetful(1, 0, 0)))
    assert "replicas/gpu-0.json" in {one.path for one in swept.removed}
    read_everything(keyring, tmp_path)
    follow_late(keyring, tmp_path / "after-gc")


def live_a_signed_run(keyring: Keyring, tmp_path: Path) -> None:
    """The publisher restarts, and everyone compares the bucket with its sign of life."""
    key = PrivateKey.generate()
    for step in range(2):
        with Publisher(open_bucket(keyring.use("publisher")), key=key, anchor_every=1) as publisher:
            publisher.publish(weights_at(SEED, step), step=step).wait(120)
    trust = ("--trust", str(key.public))
    keyring.works("gpu-0", "follow", "--into", tmp_path, "--once", "--name", "gpu-0", *trust, "--max-age", "1h")
    assert bits_of(tmp_path / "current") == bits_at(SEED, 1)
    for command in ("status", "verify", "keys"):
        keyring.works("reader", command, *trust)


def follow_late(keyring: Keyring, directory: Path) -> None:
    for key in ("gpu-1", "silent", "blind"):
        ran = keyring.works(key, "follow", "--into", directory / key, "--once", "--name", "gpu-1")
        assert bits_of(directory / key / "current") == bits_at(SEED, 11)
        assert ("no write permission" in ran.err) == (key != "gpu-1")


def read_everything(keyring: Keyring, directory: Path) -> None:
    assert "version 13" in keyring.works("reader", "status").out
    assert len(keyring.works("reader", "log", "-n", "5").out.splitlines()) > 5
    assert "no problems found" in keyring.works("reader", "verify").err
    keyring.works("reader", "restore", "-o", directory / "restored")
    assert bits_of(directory / "restored") == bits_at(SEED, 11)
    keyring.works("reader", "page", "--export", directory / "page.html")
    assert "no list permission" not in (directory / "page.html").read_text()
    keyring.works("reader", "gc", "--dry-run", *AT_ONCE)


PREFIX = "arn:aws:s3:::weights/team/run/"
ACTIONS = {Verb.GET: "s3:GetObject", Verb.DELETE: "s3:DeleteObject", Verb.LIST: "s3:ListBucket"}
OWN_KEYS = {"publisher": "publisher", "follower": "gpu-0", "gc": "gc", "reader": "reader"}


def test_roles_use_every_permission_that_they_have_and_ask_for_no_others(
    store: RoleKeys, amazon: AuthorizingProxy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Otherwise the table grants too much or too little. Only the end of a failed upload in parts is not tried here."""
    keyring = Keyring(store, amazon.endpoint, monkeypatch)
    keyring.clear()
    amazon.used.clear()
    amazon.denied.clear()
    assert keyring("gc", "gc").code == 1  # without a run
    live_a_run(keyring, tmp_path)
    fence_off(keyring)
    lose_a_side_file(keyring)
    keyring.clear()
    live_a_signed_run(keyring, tmp_path / "signed")

    assert {role: unused(AccessRole(role), amazon.used[f"{key}-key"]) for role, key in OWN_KEYS.items()} == {
        role: [] for role in OWN_KEYS
    }
    asked = {(key, need.action, need.resource.split("/")[3]) for key, need in amazon.denied if key != "blind-key"}
    assert asked == {
        ("publisher-key", "s3:DeleteObject", "probe"),  # gc deletes what its probes leave
        ("silent-key", "s3:GetObject", "replicas"),  # it tries to write a heartbeat, in case the key is renewed
        ("silent-key", "s3:PutObject", "replicas"),
    }


def unused(role: AccessRole, used: set[Need]) -> list[str]:
    places = {(need.action, dict(need.context).get("s3:prefix", need.resource)) for need in used}
    found = []
    for access in access_of(role, ["gpu-0"]):
        for verb in access.verbs:
            action = ACTIONS.get(verb, "s3:PutObject")
            start = ("team/run/" if verb is Verb.LIST else PREFIX) + access.path
            if not any(one == action and place.startswith(start) for one, place in places):
                found.append(f"{verb} {access.path}")
    return found


def fence_off(keyring: Keyring) -> None:
    """A publisher that is replaced reads who replaced it."""
    url = keyring.use("publisher")
    with Publisher(open_bucket(url)) as first, Publisher(open_bucket(url)) as second:
        first.publish(weights_at(SEED, 12)).wait(120)
        second.publish(weights_at(SEED, 13)).wait(120)
        with pytest.raises(Fenced, match="another publisher"):
            first.publish(weights_at(SEED, 14)).wait(120)


def lose_a_side_file(keyring: Keyring) -> None:
    """`verify` lists the folder to tell a missing file from a forbidden one."""
    keyring.use("admin")
    bucket = open_bucket(keyring.url)
    lost = asyncio.run(bucket.list("files/"))[0].path
    asyncio.run(bucket.delete(lost))
    ran = keyring("reader", "verify")
    assert (ran.code, lost in ran.out) == (1, True)


def test_commands_on_a_run_that_does_not_exist_yet_say_so(keyring: Keyring) -> None:
    """S3 answers 403 for its run.json."""
    for key, command in (("reader", "status"), ("reader", "verify"), ("gc", "gc")):
        keyring(key, command).check_failed("nothing has been published there yet")


def test_verify_reports_missing_files_and_not_forbidden_ones(keyring: Keyring, tmp_path: Path) -> None:
    training = Training(tmp_path)
    for name in ("checkpoint-1", "checkpoint-2"):
        weightwire("publish", training.save(name), keyring.use("publisher"))
    keyring.use("admin")
    bucket = open_bucket(keyring.url)
    lost = [next(one.path for one in asyncio.run(bucket.list(folder))) for folder in ("deltas/", "files/")]
    for path in lost:
        asyncio.run(bucket.delete(path))
    ran = keyring("reader", "verify")
    assert ran.code == 1
    for path in lost:
        assert any(path in line and "missing" in line for line in ran.out.splitlines()), ran.out


def test_large_weights_are_uploaded_in_parts_with_the_publishers_key(keyring: Keyring) -> None:
    bits = np.random.default_rng(SEED).integers(0, 1 << 16, 13_000_000, np.uint16)
    weights = {"layer": Tensor(DTYPES["BF16"], (13_000, 1000), bits)}
    with Publisher(open_bucket(keyring.use("publisher"))) as publisher:
        assert publisher.publish(weights).wait(120) == 1
    assert "no problems found" in keyring.works("reader", "verify").err


# --- errors and doctor ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "command", "permission"),
    [
        ("reader", "publish", "s3:PutObject"),
        ("gpu-0", "publish", "s3:PutObject"),
        ("gc", "publish", "s3:PutObject"),
        ("reader", "gc", "s3:PutObject"),
        ("publisher", "gc", "s3:ListBucket"),
        ("gpu-0", "status", "s3:ListBucket"),
        ("publisher", "verify", "s3:ListBucket"),
    ],
)
def test_denied_command_names_the_permission_and_the_policy_command(
    keyring: Keyring, tmp_path: Path, key: str, command: str, permission: str
) -> None:
    training = Training(tmp_path)
    for name in ("checkpoint-1", "checkpoint-2"):
        weightwire("publish", training.save(name), keyring.use("publisher"), "--anchor-every", "1")
    args: list[str | Path] = [training.save("checkpoint-3")] if command == "publish" else []
    args += AT_ONCE if command == "gc" else ()
    keyring(key, command, *args).check_failed("WW-PERMISSION-DENIED", f"(needs {permission})", "weightwire policy")


@pytest.mark.parametrize(
    ("key", "roles", "summary"),
    [
        ("publisher", "publisher; not enough for follower (get data), gc (list ", "can publish, cannot follow"),
        ("gpu-0", "follower; not enough for publisher (list ", "can follow, cannot publish"),
        ("silent", "follower; not enough for publisher (list ", "can follow, cannot publish"),
        ("blind", "follower; not enough for publisher (list epochs/)", "can follow, cannot publish"),
        ("gc", "gc; not enough for publisher (create commits/), follower (get data)", "can neither follow nor publish"),
        ("reader", "follower, reader; not enough for publisher (put probe/), gc", "can follow, cannot publish"),
        ("admin", "publisher, follower, gc, reader\n", "can follow and publish"),
    ],
)
def test_doctor_says_for_which_roles_a_key_is_enough(
    keyring: Keyring, tmp_path: Path, key: str, roles: str, summary: str
) -> None:
    weightwire("publish", Training(tmp_path).save("checkpoint-1"), keyring.use("publisher"))
    ran = keyring(key, "doctor")

    assert ran.code == 0, ran.out
    assert f"this key is enough for {roles}" in ran.out, ran.out
    assert ran.out.splitlines()[-1].startswith(summary)
