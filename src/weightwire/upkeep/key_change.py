"""Replaces the keys that may sign a run, by a fence that one of the old keys signs."""

from __future__ import annotations

from weightwire.bucket import Bucket
from weightwire.chain import ChainReader, ChainWriter, PublicKey, Signer, Warn, read_run
from weightwire.errors import BadKey, Untrusted
from weightwire.system import Runtime

__all__ = ["change_keys"]


async def change_keys(
    bucket: Bucket, runtime: Runtime, signer: Signer, add: frozenset[str], revoke: frozenset[str], warn: Warn
) -> int | None:
    """Returns the version of the fence, or None if the run has exactly these keys already.

    The fence locks out the running publisher, which may hold a revoked key.
    """
    run = await read_run(bucket)
    if not run.keys:
        raise Untrusted(
            f"{bucket.url}: this run is not signed", hint="start a new run: `weightwire publish --key FILE`"
        )
    chain = ChainReader(bucket, run, signer.trust)
    before = await chain.keys_after(await chain.read_head())
    after = sorted((before | add) - revoke)
    if not after:
        raise BadKey(
            f"{bucket.url}: no key would be left to sign this run", hint="add a key in the same command: --add KEY"
        )
    if unknown := sorted(revoke - before):
        raise BadKey(f"{PublicKey(unknown[0]).short} is not a key of this run", hint="`weightwire keys URL` lists them")
    if before == set(after):
        return None
    writer = ChainWriter(bucket, run, runtime, warn, signer)
    await writer.take_over([PublicKey(key) for key in after])
    return writer.next_version - 1
