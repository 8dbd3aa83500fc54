"""`weightwire keys`: lists the keys that may sign a run, and replaces them."""

from __future__ import annotations

from typing import Annotated

import typer

from weightwire.chain import PublicKey, read_public_keys
from weightwire.cli.shared.bucket_command import Url, url_of, with_bucket
from weightwire.cli.shared.json_output import write_json
from weightwire.cli.shared.run_output import KeysOutput
from weightwire.cli.shared.terminal import AsJson, say, warn
from weightwire.cli.shared.trust_options import KeyFile, Trusted, signer_of, trust_of
from weightwire.inspection import read_keys
from weightwire.system import Runtime
from weightwire.upkeep import change_keys

__all__ = ["keys"]


def keys(
    url: Url,
    add: Annotated[
        list[str] | None, typer.Option(metavar="KEY", help="Public key that may sign from now on, or its file.")
    ] = None,
    revoke: Annotated[
        list[str] | None, typer.Option(metavar="KEY", help="Public key that may no longer sign, or its file.")
    ] = None,
    key: KeyFile = None,
    trust: Trusted = None,
    as_json: AsJson = False,
) -> None:
    """List the keys that may sign versions of the run at URL. With --add or --revoke, change them.

    With --trust, the list is an error unless a trusted key leads to it.
    A change is a fence, signed with --key. It stops a running trainer, which must restart with a key that may sign.
    """
    added, revoked = read_public_keys(add or ()), read_public_keys(revoke or ())
    trusted = trust_of(trust)
    if added or revoked:
        signer = signer_of(key, trust)
        if signer is None:
            raise typer.BadParameter("needs --key", param_hint="--add" if added else "--revoke")
        trusted = signer.trust
        version = with_bucket(url, lambda bucket: change_keys(bucket, Runtime(), signer, added, revoked, warn))
        if version is None:
            say(f"{url_of(url)} has these keys already: nothing was changed")
        else:
            say(f"version {version} of {url_of(url)} changes the keys: restart the trainer with one of them")
        if version is not None and revoked:
            say("anchors that a revoked key signed no longer count: new followers may wait for the next version")
    found = with_bucket(url, lambda bucket: read_keys(bucket, trusted))
    if as_json:
        write_json(KeysOutput(url=url_of(url), keys=[str(PublicKey(one)) for one in found]))
        return
    for one in found:
        print(PublicKey(one))
    if found and trusted is None:
        say("the signatures behind this list were not checked: pass --trust KEY")
    if not found:
        say(f"{url_of(url)} is not signed: anyone who can write to the bucket can publish weights")
