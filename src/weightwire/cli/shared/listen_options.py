"""The options of every command that listens: who may use its server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from weightwire.system import TOKEN_VARIABLE, Access, read_token

__all__ = ["Insecure", "TokenFile", "access_of"]

TokenFile = Annotated[
    Path | None,
    typer.Option(
        "--token-file",
        metavar="FILE",
        show_default=TOKEN_VARIABLE,
        help="File with the token that requests must carry. Needed to listen beyond this machine.",
    ),
]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="Listen beyond this machine without a token: everyone may connect.")
]


def access_of(token_file: Path | None, insecure: bool) -> Access:
    return Access(read_token(token_file), insecure)
