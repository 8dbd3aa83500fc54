"""Errors of keys and signatures: files that are not keys, versions that no trusted key signed."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from project.provocations.case import OTHER, WEIGHTS, Case, Provocation, follow, publish
from support.failing_bucket import Quick
from weightwire import Follower, Publisher, open_bucket
from weightwire.chain import (
    ALIVE,
    RUN,
    ChainReader,
    Commit,
    PrivateKey,
    Signer,
    SignOfLife,
    Trust,
    commit_path,
    read_private_key,
    read_public_keys,
    read_run,
    read_trusted_keys,
    seal,
    unseal,
)
from weightwire.chain.records import Sealed
from weightwire.upkeep import change_keys

KEY, STRANGER = PrivateKey.generate(), PrivateKey.generate()
TRUST = str(KEY.public)


def key_file(content: str) -> Provocation:
    return lambda case: read_private_key(case.file("key", content))


def public_file(content: str) -> Provocation:
    return lambda case: read_public_keys([str(case.file("key.pub", content))])


def overwritten(case: Case) -> None:
    KEY.write(case.file("key", ""))


def without_permission(case: Case) -> None:
    KEY.write(case.here / "missing" / "key")


def rsa(case: Case) -> None:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    pem = X25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    read_private_key(case.file("key", pem))


def encrypted(case: Case) -> None:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, PrivateFormat

    key = Ed25519PrivateKey.generate()
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret"))
    read_private_key(case.file("key", pem))


def signed_run(work: Callable[[Case, Path], object]) -> Provocation:
    """Changes a signed run, then follows it."""

    def provoke(case: Case) -> None:
        run = publish(case, WEIGHTS, OTHER, key=KEY)
        work(case, run)
        follow(case, trust=TRUST)

    return provoke


def newest(run: Path) -> tuple[Path, Sealed[Commit]]:
    path = run / commit_path(2)
    return path, unseal(path.read_bytes(), Commit, "")


def signed_by(key: PrivateKey | None) -> Provocation:
    def work(case: Case, run: Path) -> None:
        path, commit = newest(run)
        path.write_bytes(seal(commit.record, key).data)

    return signed_run(work)


def wrong_signature(case: Case, run: Path) -> None:
    path, commit = newest(run)
    path.write_bytes(commit.data.replace(b'"step":null', b'"step":1234'))


def foreign_keys(case: Case, run: Path) -> None:
    path, commit = newest(run)
    path.write_bytes(commit.data.replace(b'"keys_from":null', b'"keys_from":1'))


def with_alive(key: PrivateKey | None, age: float, version: int = 2, commit: str | None = None) -> Provocation:
    def provoke(case: Case) -> None:
        run = publish(case, WEIGHTS, OTHER, key=KEY)
        last = newest(run)[1]
        alive = SignOfLife(
            run=last.record.run,
            epoch=1,
            version=version,
            commit=commit or last.sha256,
            # Far away, so that the text does not depend on the second.
            time=time.time() - age if age < 1e6 else 0.0,
        )
        (run / ALIVE).write_bytes(seal(alive, key).data)
        follow(case, trust=TRUST, max_age=60)

    return provoke


def no_sign_of_life(case: Case) -> None:
    run = publish(case, WEIGHTS, key=KEY)
    (run / ALIVE).unlink(missing_ok=True)
    follow(case, trust=TRUST, max_age=60)


def unsigned_run(case: Case) -> None:
    publish(case)
    follow(case, trust=TRUST)


def publish_with(first: PrivateKey | None, second: PrivateKey | None) -> Provocation:
    def provoke(case: Case) -> None:
        Publisher(publish(case, key=first), key=second)

    return provoke


def ignored_keys(case: Case) -> None:
    """The version is signed by a key that a fence before it, which the reader has seen, replaced."""
    bucket = open_bucket(run := publish(case, WEIGHTS, OTHER, key=KEY))
    authority = ChainReader(bucket, asyncio.run(read_run(bucket)), Trust(frozenset({KEY.public.hex}))).authority
    assert authority is not None
    asyncio.run(authority.check_keys_since(newest(run)[1].record, (1, "ab" * 32)))


def replaced_publisher(case: Case) -> None:
    run = publish(case, WEIGHTS, key=KEY)
    first = unseal((run / commit_path(1)).read_bytes(), Commit, "")
    publish(case, OTHER, key=KEY)
    alive = SignOfLife(run=first.record.run, epoch=1, version=1, commit=first.sha256, time=time.time())
    (run / ALIVE).write_bytes(seal(alive, KEY).data)
    follow(case, trust=TRUST, max_age=60)


def held_without_trust(case: Case) -> None:
    """The replica holds a stranger's version 2, in the middle of a signed chain."""
    run = publish(case, WEIGHTS, OTHER, key=KEY)
    path, commit = newest(run)
    genuine = path.read_bytes()
    publish(case, WEIGHTS, key=KEY)
    last = [(one, (run / one).read_bytes()) for one in (commit_path(3), commit_path(4))]
    for one, _ in last:
        (run / one).unlink()
    forged = msgspec.structs.replace(commit.record, step=77)
    path.write_bytes(seal(forged).data)
    follow(case)
    assert path.read_bytes() != genuine
    for one, data in last:
        (run / one).write_bytes(data)
    follow(case, trust=TRUST)


def planted_run(case: Case) -> None:
    run = publish(case, key=KEY)
    shutil.rmtree(run / "commits")
    (run / ALIVE).unlink()
    stored = msgspec.json.decode((run / RUN).read_bytes())
    (run / RUN).write_bytes(msgspec.json.encode(stored | {"keys": [KEY.public.hex, STRANGER.public.hex]}))
    publish(case, OTHER, key=KEY)


def changed_keys(add: frozenset[str], revoke: frozenset[str], first: PrivateKey | None = KEY) -> Provocation:
    def provoke(case: Case) -> None:
        bucket = open_bucket(publish(case, key=first))
        asyncio.run(change_keys(bucket, Quick(), Signer(KEY), add, revoke, lambda message: None))

    return provoke


def revoked_key(case: Case) -> None:
    changed_keys(frozenset({STRANGER.public.hex}), frozenset({KEY.public.hex}))(case)
    publish(case, OTHER, key=KEY)


def another_run(case: Case) -> None:
    publish(case, key=KEY)
    follow(case, trust=TRUST)
    case.run.rename(case.here / "old")
    publish(case, key=KEY)
    follow(case, trust=TRUST)


def hidden_version(case: Case) -> None:
    run = publish(case, WEIGHTS, OTHER, key=KEY)
    follow(case, trust=TRUST)
    for path in (case.here / "replica").glob("work"):
        path.unlink()
    (run / commit_path(2)).unlink()
    follow(case, trust=TRUST)


def forked_history(case: Case) -> None:
    run = publish(case, WEIGHTS, OTHER, key=KEY)
    follow(case, trust=TRUST)
    for path in (case.here / "replica").glob("work"):
        path.unlink()
    for one in (commit_path(2), ALIVE):  # the sign of life would tell the publisher
        (run / one).unlink()
    publish(case, WEIGHTS | {"w": OTHER["w"] * 3}, key=KEY)
    follow(case, trust=TRUST)


def other_run_json(case: Case, run: Path) -> None:
    path = run / RUN
    path.write_bytes(path.read_bytes().replace(b'"mode":"strict"', b'"mode":"single-writer"'))


def hidden_in_the_middle(case: Case) -> None:
    run = publish(case, WEIGHTS, key=KEY)
    follow(case, trust=TRUST)
    publish(case, OTHER, key=KEY)
    last = unseal((run / commit_path(3)).read_bytes(), Commit, "")
    alive = SignOfLife(run=last.record.run, epoch=2, version=3, commit=last.sha256, time=time.time())
    (run / ALIVE).write_bytes(seal(alive, KEY).data)
    (run / commit_path(2)).unlink()
    follow(case, trust=TRUST, max_age=60)


def damaged_memory(case: Case) -> None:
    publish(case, key=KEY)
    case.file("replica/seen.json", "{")
    case.file("replica/lock", "weightwire replica 1\n")
    follow(case, trust=TRUST)


def without_cryptography(case: Case) -> None:
    case.patch.setitem(__import__("sys").modules, "cryptography.hazmat.primitives.asymmetric", None)
    PrivateKey.generate()


PROVOCATIONS: list[Provocation] = [
    lambda case: read_private_key(case.here / "missing"),
    key_file("hello"),
    rsa,
    encrypted,
    public_file("hello"),
    public_file("-----BEGIN PRIVATE KEY-----"),
    overwritten,
    without_permission,
    signed_by(None),
    signed_by(STRANGER),
    signed_run(wrong_signature),
    signed_run(foreign_keys),
    lambda case: (publish(case, key=STRANGER), follow(case, trust=TRUST)),
    unsigned_run,
    publish_with(KEY, None),
    publish_with(None, KEY),
    publish_with(KEY, STRANGER),
    revoked_key,
    ignored_keys,
    replaced_publisher,
    held_without_trust,
    planted_run,
    public_file("# none yet"),
    lambda case: read_trusted_keys([""]),
    lambda case: Follower(publish(case, key=KEY), into=case.here / "replica", trust=TRUST, max_age=-1),
    changed_keys(frozenset(), frozenset({KEY.public.hex})),
    changed_keys(frozenset(), frozenset({STRANGER.public.hex})),
    changed_keys(frozenset({STRANGER.public.hex}), frozenset(), first=None),
    another_run,
    hidden_version,
    forked_history,
    damaged_memory,
    signed_run(other_run_json),
    hidden_in_the_middle,
    no_sign_of_life,
    with_alive(None, 0),
    with_alive(KEY, 1e9),
    with_alive(KEY, 0, commit="ab" * 32),
    lambda case: Follower(publish(case, key=KEY), into=case.here / "replica", max_age=60),
    without_cryptography,
]
