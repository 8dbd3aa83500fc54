"""`weightwire restore`: one version of a run, from the bucket -> a checkpoint directory."""

from __future__ import annotations

import time
from collections.abc import Callable, Container
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from weightwire.bucket import Bucket
from weightwire.catchup import (
    LOST_FOR_GOOD,
    ChainPath,
    Fetcher,
    Start,
    around_lost_data,
    fetch_side_files,
    find_anchors,
    plan,
    plan_newest,
    restore_weights,
)
from weightwire.chain import ChainReader, Commit, Sealed, read_run
from weightwire.cli.shared.bucket_command import Url, with_bucket
from weightwire.cli.shared.terminal import AsJson, Threads, byte_size, note_if_slow, progress_bar, say, warn, write_json
from weightwire.delta import digest
from weightwire.errors import CorruptDelta, DataGone, NoRun, RunError, WeightwireError
from weightwire.replica import CheckpointAbout
from weightwire.system import Runtime
from weightwire.weights import ABOUT_FILE, Checkpoint, CheckpointWriter

__all__ = ["restore"]

_NONE = "no version can be restored: run `weightwire verify`, and publish an anchor"


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
    except LOST_FOR_GOOD as problem:
        gone = isinstance(problem, DataGone)
        if not gone and not work.fetcher.lost:  # it is a side file, which every version needs
            raise
        others = await _alternatives(chain, head, target, work.fetcher.lost)
        if gone:
            number = target.record.version
            raise DataGone(f"{bucket.url}: the data of version {number} is no longer there", hint=others) from problem
        raise problem.reworded(
            problem.message, hint=f"`weightwire verify` lists all that is damaged; {others}"
        ) from problem


async def _find(chain: ChainReader, head: Sealed[Commit], version: int) -> Sealed[Commit]:
    """The commit of a version, proven to be of the same chain as the newest."""
    newest = head.record.version
    if version > newest:
        raise RunError(f"{chain.bucket.url}: has no version {version}", hint=await _available(chain, head) or _NONE)
    commit = head if version == newest else await chain.read_linked(version, await chain.prove(head, version))
    if not commit.record.after:
        raise RunError(
            f"{chain.bucket.url}: version {version} holds no weights, it is from before the first",
            hint=await _available(chain, head) or _NONE,
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
        files[ABOUT_FILE] = _about(target)

        async def attempt() -> _Restored:
            return await self._write(await plan(self._chain, target, lost=self.fetcher.lost), files)

        return await around_lost_data(self.fetcher, attempt, warn)

    async def _write(self, path: ChainPath, files: dict[str, bytes]) -> _Restored:
        schema, runtime = self._chain.run.schema, Runtime()
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


def _telling(path: ChainPath, progress: Callable[[int], None]) -> Callable[[int], None]:
    sizes = {commit.record.version: commit.record.nbytes for commit in path.commits}
    if path.start is not None:
        sizes[path.origin.record.version] = path.start.nbytes
    return lambda version: progress(sizes.get(version, 0))


def _about(target: Sealed[Commit]) -> bytes:
    commit = target.record
    return CheckpointAbout(commit.run, commit.version, target.sha256, commit.after).to_json()


async def _available(chain: ChainReader, head: Sealed[Commit], above: int = 0, lost: Container[str] = ()) -> str:
    """Which versions above one can be restored: all from the oldest that one can start from. Empty if none can."""
    newest = head.record.version
    try:
        found = {(await plan(chain, head, lost=lost)).origin.record.version}
        starts: list[Start] = [*(await find_anchors(chain, newest)).values()]
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
        return ""
    return f"{_range(min(found), newest)} can be restored"


async def _alternatives(chain: ChainReader, head: Sealed[Commit], target: Sealed[Commit], lost: Container[str]) -> str:
    """What can be restored where a version cannot: the newest one before it, and those after it."""
    found = []
    try:
        older = (await plan_newest(chain, target, lost=lost)).target.record.version
        found.append(f"version {older} can be restored: --version {older}")
    except WeightwireError:
        pass  # none before it
    if target.sha256 != head.sha256:
        found.append(await _available(chain, head, target.record.version, lost))
    return "; ".join(filter(None, found)) or _NONE


def _range(first: int, last: int) -> str:
    return f"version {first}" if first == last else f"versions {first} to {last}"
