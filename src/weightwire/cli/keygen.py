"""`weightwire keygen`: makes the key pair of a publisher."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from weightwire.chain import PrivateKey
from weightwire.cli.shared.json_output import write_json
from weightwire.cli.shared.run_output import KeyOutput
from weightwire.cli.shared.terminal import AsJson, say

__all__ = ["keygen"]


def keygen(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="New file for the private key.")],
    as_json: AsJson = False,
) -> None:
    """Make a key pair that signs versions: FILE and FILE.pub.

    FILE is the private key, which only you can read: pass it to the publisher with --key. FILE.pub is the public key:
    pass it to followers with --trust.
    """
    key = PrivateKey.generate()
    key.write(file)
    say(f"wrote {file} (private: keep it on the trainer) and {file}.pub")
    if as_json:
        write_json(KeyOutput(key=str(key.public)))
    else:
        print(key.public)
