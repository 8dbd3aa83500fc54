"""The keys of a signed run in a simulation: honest ones, which replace each other, and a thief's."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from faults.simulated_store import Objects
from weightwire.chain.keys import PrivateKey
from weightwire.chain.records import Commit, Sealed
from weightwire.chain.writer import Signer
from weightwire.follower.trust_settings import TrustSettings

Json = dict[str, Any]


@dataclass
class SimKeys:
    """`honest` are the keys of the trainers, the first one first. They may be revoked, but never stolen in force."""

    random: random.Random
    has_ages: bool  # some followers demand a recent sign of life

    def __post_init__(self) -> None:
        self.honest = [self._make() for _ in range(3)]
        self.thief = self._make()

    def _make(self) -> PrivateKey:
        return PrivateKey(Ed25519PrivateKey.from_private_bytes(self.random.randbytes(32)))

    @property
    def first(self) -> frozenset[str]:
        return frozenset({self.honest[0].public.hex})

    def in_force(self, objects: Objects) -> list[PrivateKey]:
        """The keys that may sign the next commit."""
        names = keys_in_force(objects)
        return [key for key in self.honest if key.public.hex in names] if names else self.honest[:1]

    def at(self, chain: Sequence[Sealed[Commit]]) -> list[PrivateKey]:
        """The keys in force after the last of these commits, which begin with version 0."""
        names = next((one.record.keys for one in reversed(chain) if one.record.keys), tuple(self.first))
        return [key for key in self.honest if key.public.hex in names]

    def revoked(self, objects: Objects) -> list[PrivateKey]:
        last = self.honest.index(self.in_force(objects)[-1])
        return [key for key in self.honest[:last] if key not in self.in_force(objects)]

    def signer(self, objects: Objects) -> Signer:
        return Signer(self.random.choice(self.in_force(objects)), self.first)

    def trust(self) -> TrustSettings:
        """What a follower trusts: the first key, all keys, the keys of its first use, or anyone."""
        age = self.random.choice([None, 40.0, 120.0]) if self.has_ages else None
        every = frozenset(key.public.hex for key in self.honest)
        return self.random.choice(
            [TrustSettings(self.first, False, age), TrustSettings(pins=True, max_age=age)] * 2
            + [TrustSettings(every, False, age), TrustSettings()]
        )


def keys_in_force(objects: Objects, version: int | None = None) -> list[str]:
    """The public keys that may sign after a version, by default after the newest; empty if the run is not signed."""
    found: list[str] = parse(objects["run.json"][0])["keys"] if "run.json" in objects else []
    for path in sorted(path for path in objects if path.startswith("commits/")):
        if version is None or int(path[8:28]) <= version:
            found = parse(objects[path][0])["keys"] or found
    return found


@lru_cache(4096)
def parse(data: bytes) -> Json:
    """A record as JSON, without its signature. Do not change it."""
    return json.loads(data.partition(b"\n")[0])  # type: ignore[no-any-return]


def signer_of(kind: str, data: bytes) -> str:
    """The key whose signature a record has, or an empty string. Written apart from the tested code."""
    record, _, line = data.partition(b"\n")
    if not line:
        return ""
    signature = json.loads(line)
    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(signature["key"])).verify(
            bytes.fromhex(signature["signature"]), b"weightwire/1 " + kind.encode() + b"\n" + record
        )
    except InvalidSignature:
        return ""
    return str(signature["key"])
