"""`weightwire restore`: one version of a run, from the bucket -> a checkpoint directory."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Container
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from weightwire.bucket import Bucket
from weightwire.catchup import Fetcher, fetch_side_files, schema_of
from weightwire.catchup import restore_weights as restore_weights
from weightwire.chain import ChainReader, Commit, Sealed, Start, read_run
from weightwire.chain import Path as Way
from weightwire.cli.shared.bucket_command import Url, with_bucket
from weightwire.cli.shared.terminal import AsJson, Threads, byte_size, note_if_slow, progress_bar, say, write_json
from weightwire.delta import digest
from weightwire.errors import CorruptDelta, DataGone, NoRun, NotFound, RunError, WeightwireError
from weightwire.system import Runtime
from weightwire.weights import Checkpoint, CheckpointWriter

__all__ = ["restore"]


def restore(
    url: Url,
    out: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="The checkpoint directory to write: a new one.")
    ],
    version: Annotated[
        int | None, typer.Option(metavar="N", min=0, show_default="the newest", help="Which version.")
    ] = None,
    base: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The checkpoint that the run starts from, if it has no anchor.")
    ] = None,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Write a version of the run at URL as a checkpoint.

    It is verified by its digest, and DIR appears all at once or not at all: weights, config, tokenizer, and a
    weightwire.json that says which version of which run this is. If DIR is called *.safetensors, it becomes a file with
    the weights alone.
    """
    began = time.perf_counter()
    note_if_slow()
    restored = with_bucket(url, lambda bucket: _restore(bucket, version, out, base, threads))
    seconds = time.perf_counter() - began
    commit = restored.commit
    step = "" if commit.step is None else f" (step {commit.step})"
    say(f"wrote {out}: version {commit.version}{step}, {byte_size(restored.nbytes)} of weights, {seconds:.2f} s")
    say(f"verified: state {commit.after[:12]}")
    if as_json:
        write_json(restored.summary | {"out": str(out), "seconds": round(seconds, 3)})


@dataclass(frozen=True)
class _Restored:
    url: str
    commit: Commit
    nbytes: int  # of weights
    fetched: int

    @property
    def summary(self) -> dict[str, Any]:
        return {
            "url": self.url,
            "run": self.commit.run,
            "version": self.commit.version,
            "step": self.commit.step,
            "state": self.commit.after,
            "weights_bytes": self.nbytes,
            "fetched_bytes": self.fetched,
        }


async def _restore(bucket: Bucket, version: int | None, out: Path, base: Path | None, threads: int | None) -> _Restored:
    chain = ChainReader(bucket, await read_run(bucket))
    head = await chain.read_head()
    if head is None or not head.record.after:
        raise NoRun(f"{bucket.url}: no weights have been published there yet", hint="wait for the publisher")
    target = await _find(chain, head, head.record.version if version is None else version)
    work = _Work(bucket, chain, out, Checkpoint(base) if base else None, threads)
    try:
        return await work.restore(target)
    except DataGone as problem:
        number = target.record.version
        raise DataGone(
            f"{bucket.url}: the data of version {number} is no longer there",
            hint=await _available(chain, head, number, work.fetcher.lost),
        ) from problem


async def _find(chain: ChainReader, head: Sealed[Commit], version: int) -> Sealed[Commit]:
    """The commit of a version, proven to be of the same chain as the newest."""
    newest = head.record.version
    if version > newest:
        raise RunError(f"{chain.bucket.url}: has no version {version}", hint=await _available(chain, head))
    commit = head if version == newest else await chain.read_linked(version, await chain.prove(head, version))
    if not commit.record.after:
        raise RunError(
            f"{chain.bucket.url}: version {version} holds no weights, it is from before the first",
            hint=await _available(chain, head),
        )
    return commit


class _Work:
    """Writes one version, however many ways to it have to be tried."""

    def __init__(
        self, bucket: Bucket, chain: ChainReader, out: Path, base: Checkpoint | None, threads: int | None
    ) -> None:
        self.fetcher = Fetcher(bucket, Runtime())
        self._bucket = bucket
        self._chain = chain
        self._out = out
        self._base = base
        self._threads = threads

    async def restore(self, target: Sealed[Commit]) -> _Restored:
        files = await fetch_side_files(self._bucket, self._chain.run)
        files["weightwire.json"] = _about(target)
        while True:
            path = await self._chain.plan(target, None, self.fetcher.lost)
            lost = len(self.fetcher.lost)
            try:
                return await self._write(path, files)
            except NotFound:
                if len(self.fetcher.lost) == lost:
                    raise
                # Of another way nothing is known to be gone, until it has been tried.

    async def _write(self, path: Way, files: dict[str, bytes]) -> _Restored:
        schema, runtime = schema_of(self._chain.run), Runtime()
        with CheckpointWriter(self._out, schema=schema, files=files) as writer:
            targets = {name: writer[name] for name in schema}
            with progress_bar("fetching", path.nbytes) as progress:
                state = await restore_weights(
                    path,
                    self.fetcher,
                    targets,
                    runtime,
                    base=self._base,
                    threads=self._threads,
                    told=_telling(path, progress),
                )
            with progress_bar("verifying", self._chain.run.nbytes) as progress:
                found = await runtime.run_in_thread(digest, targets, threads=self._threads, progress=progress)
            if not state.hex == found.hex == path.target.record.after:
                raise CorruptDelta(
                    f"{self._bucket.url}: what was fetched is not version {path.target.record.version}",
                    hint="run `weightwire verify`",
                )
            targets.clear()
        return _Restored(self._bucket.url, path.target.record, self._chain.run.nbytes, path.nbytes)


def _telling(path: Way, progress: Callable[[int], None]) -> Callable[[int], None]:
    sizes = {commit.record.version: commit.record.nbytes for commit in path.commits}
    if path.start is not None:
        sizes[path.origin.record.version] = path.start.nbytes
    return lambda version: progress(sizes.get(version, 0))


def _about(target: Sealed[Commit]) -> bytes:
    """As in the checkpoints of a replica."""
    commit = target.record
    about = {"run": commit.run, "version": commit.version, "commit": target.sha256, "state": commit.after}
    return (json.dumps(about, indent=2) + "\n").encode()


async def _available(chain: ChainReader, head: Sealed[Commit], above: int = 0, lost: Container[str] = ()) -> str:
    """Which versions can be restored, as a hint: all from the oldest that one can start from. It lies `above` one."""
    newest = head.record.version
    try:
        found = {(await chain.plan(head, None, lost)).origin.record.version}
        starts: list[Start] = [*(await chain.anchors(newest)).values()]
        if newest > 1:
            starts.append((await chain.read_linked(1, await chain.prove(head, 1))).record)
        for start in starts:
            if (
                start.version > above
                and start.files
                and all([await chain.bucket.find(one.path) for one in start.files])
            ):
                found.add(start.version)
    except WeightwireError:
        return "no version can be restored: run `weightwire verify`, and publish an anchor"
    return f"versions {min(found)} to {newest} can be restored"
