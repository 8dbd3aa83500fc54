"""The options of commands that listen: who may use the server, and when it says that it is ready."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from weightwire.cli.shared.bucket_command import duration
from weightwire.system import TOKEN_VARIABLE, Access, read_token

__all__ = ["Insecure", "MaxBehind", "MaxLag", "TokenFile", "access_of"]

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

MaxBehind = Annotated[
    int | None,
    typer.Option(
        min=0,
        metavar="N",
        show_default="any number",
        help="GET /readyz answers 503 if an engine is more than N versions behind the newest.",
    ),
]
MaxLag = Annotated[
    float | None,
    typer.Option(
        parser=duration,
        metavar="TIME",
        show_default="any time",
        help="GET /readyz answers 503 if an engine has not served the newest version for longer than this, or the "
        "bucket could not be read for that long.",
    ),
]


def access_of(token_file: Path | None, insecure: bool) -> Access:
    return Access(read_token(token_file), insecure)
