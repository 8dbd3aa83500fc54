"""The options for keys: which key signs, and which keys are trusted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from weightwire.chain import (
    KEY_VARIABLE,
    TRUST_VARIABLE,
    Signer,
    Trust,
    read_private_key,
    read_public_keys,
    read_trusted_keys,
    trusted_texts,
)
from weightwire.cli.shared.bucket_command import duration
from weightwire.follower import FIRST_USE

__all__ = ["KeyFile", "MaxAge", "Trusted", "TrustedOrFirst", "signer_of", "trust_of"]

KeyFile = Annotated[
    Path | None,
    typer.Option(
        "--key", metavar="FILE", show_default=f"{KEY_VARIABLE}, if set", help="Private key that signs every version."
    ),
]

Trusted = Annotated[
    list[str] | None,
    typer.Option(
        "--trust",
        metavar="KEY",
        show_default=f"{TRUST_VARIABLE}, if set",
        help="Public key, or a file of them: refuse what no trusted key signed. Repeatable.",
    ),
]

TrustedOrFirst = Annotated[
    list[str] | None,
    typer.Option(
        "--trust",
        metavar="KEY",
        show_default=f"{TRUST_VARIABLE}, if set",
        help="Public key, or a file of them: refuse what no trusted key signed. Repeatable. "
        f"`{FIRST_USE}` pins the keys that the run has now.",
    ),
]

MaxAge = Annotated[
    float | None,
    typer.Option(
        parser=duration,
        metavar="TIME",
        show_default="any",
        help="With --trust: refuse new versions if the publisher's last sign of life is older than this.",
    ),
]


def signer_of(key: Path | None, trust: Sequence[str] | None) -> Signer | None:
    """The key of a command that signs, and what it trusts beside it; None without a key."""
    private = read_private_key(key)
    return None if private is None else Signer(private, read_trusted_keys(trust or None))


def trust_of(given: Sequence[str] | None) -> Trust | None:
    """The trusted keys of a command that only reads; None if there are none."""
    texts = [one for one in trusted_texts(given or None) if one != FIRST_USE]  # which needs a replica
    return Trust(read_public_keys(texts)) if texts else None
