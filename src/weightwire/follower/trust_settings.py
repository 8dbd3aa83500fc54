"""Which publishers a follower trusts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from weightwire.chain import TRUST_VARIABLE, read_public_keys, trusted_texts
from weightwire.errors import BadKey

__all__ = ["FIRST_USE", "TrustSettings"]

FIRST_USE = "first-use"
"""Instead of keys: trust the keys that the run has when it is followed for the first time."""


@dataclass(frozen=True)
class TrustSettings:
    """`keys` are public keys in hex. `max_age`: seconds since the publisher's last sign of life; None: any."""

    keys: frozenset[str] = frozenset()
    pins: bool = False  # the keys of the first use
    max_age: float | None = None

    @classmethod
    def of(cls, trust: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None, max_age: float | None) -> Self:
        """From the arguments of a follower; without any, from WEIGHTWIRE_TRUST."""
        given = trusted_texts([trust] if isinstance(trust, str | os.PathLike) else trust)
        keys = [one for one in given if one != FIRST_USE]
        settings = cls(read_public_keys(keys) if keys else frozenset(), FIRST_USE in given, max_age)
        if max_age is not None and not (isinstance(max_age, int | float) and max_age > 0):
            raise BadKey(f"max_age: {max_age!r} is not a number of seconds above 0", hint="pass seconds, such as 300")
        if max_age is not None and not settings.is_active:
            raise BadKey(
                "max_age needs trusted keys: without them, a sign of life proves nothing",
                hint=f"pass --trust KEY, trust= in Python, or {TRUST_VARIABLE}; to limit the lag of engines: --max-lag",
            )
        return settings

    @property
    def is_active(self) -> bool:
        return bool(self.keys) or self.pins
