"""Targets for what trust rests on: signed records, key files, and what a replica remembers of its run."""

from __future__ import annotations

import atexit
import random
import shutil
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fuzz.json_mutations import mutate_json
from fuzz.mutations import damage
from fuzz.record_targets import commits, fields_of
from fuzz.target import Target, demand, verdict_of
from support.records import RUN_ID, sha
from weightwire.chain.keys import PrivateKey, read_private_key, read_public_keys
from weightwire.chain.records import Commit, seal, unseal
from weightwire.chain.signature import Signature
from weightwire.replica.seen_run import SeenRun

MEMORY = Path("/dev/shm")


@cache
def private_key() -> PrivateKey:
    return PrivateKey(Ed25519PrivateKey.from_private_bytes(bytes(range(32))))


@cache
def scratch() -> Path:
    path = Path(tempfile.mkdtemp(prefix="weightwire-fuzz-", dir=MEMORY if MEMORY.is_dir() else None))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


# --- signed commits ----------------------------------------------------------------------------------------------


@cache
def signed_commits() -> frozenset[bytes]:
    return frozenset(seal(commit, private_key()).data for commit in commits())


def check_signed(data: bytes) -> str:
    """No bytes but those that were signed pass as signed by the key."""

    def decode() -> None:
        sealed = unseal(data, Commit, "record")
        if sealed.is_authentic and sealed.signature.key == private_key().public.hex:  # type: ignore[union-attr]
            demand(data in signed_commits(), "a forged signature")

    return verdict_of(decode)


def mutate_signed(data: bytes, rng: random.Random) -> bytes:
    """Changes the record, its signature, or takes the signature of another record."""
    record, newline, signature = data.partition(b"\n")
    way = rng.randrange(4)
    if way == 0:
        record = mutate_json(record, rng, fields_of(Commit))
    elif way == 1:
        signature = mutate_json(signature, rng, fields_of(Signature))
    elif way == 2:
        signature = rng.choice(sorted(signed_commits())).partition(b"\n")[2]
    else:
        return damage(data, rng, data)
    return record + newline + signature


# --- key files ---------------------------------------------------------------------------------------------------


def check_keys(data: bytes) -> str:
    """A file is either of public keys or a private one, never both."""
    file = scratch() / "key"
    file.write_bytes(data)
    public = verdict_of(lambda: read_public_keys([str(file)]))
    private = verdict_of(lambda: read_private_key(file))
    demand(public != private or public == "BadKey", "a private key that passes as a public one")
    return f"{public}, {private}"


def key_seeds() -> Iterator[bytes]:
    file = scratch() / "seed"
    for path in (file, file.with_name("seed.pub")):
        path.unlink(missing_ok=True)
    private_key().write(file)
    public = file.with_name("seed.pub").read_bytes()
    yield public
    yield b"# of the trainer\n\n" + public + b"0" * 64 + b" # old\n"
    yield file.read_bytes()


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    return damage(data, rng, data)


# --- what a replica remembers ------------------------------------------------------------------------------------


def check_seen(data: bytes) -> str:
    def decode() -> None:
        (scratch() / "seen.json").write_bytes(data)
        seen = SeenRun.read(scratch())
        demand(seen is not None, "a file that is there")
        demand(msgspec.json.decode(msgspec.json.encode(seen), type=SeenRun) == seen, "a memory does not round-trip")

    return verdict_of(decode)


def seen_seeds() -> Iterator[bytes]:
    first = SeenRun(run=RUN_ID, version=3, commit=sha("c"))
    yield msgspec.json.encode(first)
    yield msgspec.json.encode(msgspec.structs.replace(first, change=(2, sha("f")), held=3, pinned=(sha("k"),)))


def mutate_seen(data: bytes, rng: random.Random) -> bytes:
    return mutate_json(data, rng, fields_of(SeenRun))


TARGETS = [
    Target("signed-commit", check_signed, mutate_signed, lambda: sorted(signed_commits()), fields_of(Signature)),
    Target("keys", check_keys, mutate_bytes, key_seeds, ("ed25519:", "-----BEGIN PRIVATE KEY-----", "#")),
    Target("seen", check_seen, mutate_seen, seen_seeds, fields_of(SeenRun)),
]
