"""Signed records: the record is the first line of the object, and its signature the second. Pure.

The signature covers the exact bytes of the first line, without a canonical form. See docs/PROTOCOL.md.
"""

from __future__ import annotations

import re

import msgspec

from weightwire.chain.keys import PrivateKey, PublicKey

__all__ = ["Signature", "add_signature", "signature_of"]

_KEY = re.compile(r"[0-9a-f]{64}")
_SIGNATURE = re.compile(r"[0-9a-f]{128}")


class Signature(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The second line of a signed object. `key` is the public key."""

    key: str
    signature: str

    def __post_init__(self) -> None:
        if not _KEY.fullmatch(self.key) or not _SIGNATURE.fullmatch(self.signature):
            raise ValueError("its signature is malformed")

    def is_of(self, kind: str, record: bytes) -> bool:
        """Whether this is the key's signature of a record of this kind."""
        return PublicKey(self.key).verifies(_message(kind, record), self.signature)


def add_signature(kind: str, record: bytes, key: PrivateKey) -> bytes:
    """The bytes to store for a record."""
    signature = Signature(key.public.hex, key.sign(_message(kind, record)))
    return record + b"\n" + msgspec.json.encode(signature)


def signature_of(data: bytes) -> Signature | None:
    """The signature in the bytes of an object, not verified. Raises a msgspec error if it is malformed."""
    _, newline, line = data.partition(b"\n")
    if not newline:
        return None
    found = msgspec.json.decode(line, type=Signature)
    if msgspec.json.encode(found) != line:  # otherwise anyone could change the hash of a signed record
        raise msgspec.ValidationError("its signature is not written as it must be")
    return found


def _message(kind: str, record: bytes) -> bytes:
    """What is signed. The kind comes first, so that a record of one kind never passes as another."""
    return b"weightwire/1 " + kind.encode() + b"\n" + record
