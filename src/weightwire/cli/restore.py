"""`weightwire restore`: writes one version of a run as a checkpoint."""

from __future__ import annotations

import time
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from weightwire.bucket import Bucket
from weightwire.catchup import (
    LOST_FOR_GOOD,
    NEED_ANCHOR,
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
from weightwire.chain import FENCE, ChainReader, Commit, Run, Sealed, find_or_list, read_run
from weightwire.cli.shared.bucket_command import Base, Url, with_bucket
from weightwire.cli.shared.json_output import write_json
from weightwire.cli.shared.progress_bar import ProgressBar, StageBar, progress_bar
from weightwire.cli.shared.run_output import RestoreOutput
from weightwire.cli.shared.stop_signal import interrupt_leaves, output_left
from weightwire.cli.shared.terminal import AsJson, Threads, byte_size, note_if_slow, say, warn
from weightwire.cli.shared.trust_options import Trusted, trust_of
from weightwire.delta import digest
from weightwire.errors import CorruptDelta, DataGone, NoRun, RunError, WeightwireError
from weightwire.replica import CheckpointAbout
from weightwire.system import Runtime
from weightwire.telemetry import start_progress
from weightwire.weights import ABOUT_FILE, Checkpoint, CheckpointWriter, weights_file_name

__all__ = ["restore"]

_NONE = f"no version can be restored; {NEED_ANCHOR}"


def restore(
    url: Url,
    out: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="DIR", help="Checkpoint directory to write. It must be new or empty."),
    ],
    version: Annotated[
        int | None, typer.Option(metavar="N", min=0, show_default="the newest", help="Version to restore.")
    ] = None,
    base: Base = None,
    trust: Trusted = None,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Write a version of the run at URL as a checkpoint.

    The weights are verified by their digest, and DIR appears complete or not at all. It holds weights, config,
    tokenizer, and weightwire.json with the run, version and step. If DIR ends in .safetensors, it becomes one file with
    the weights alone.
    """
    began = time.perf_counter()
    trusted = trust_of(trust)
    note_if_slow()

    async def work(bucket: Bucket) -> _Restored:
        return await _restore(ChainReader(bucket, await read_run(bucket), trusted), version, out, base, threads)

    with interrupt_leaves(output_left(out)):
        restored = with_bucket(url, work)
    seconds = time.perf_counter() - began
    commit = restored.commit
    step = "" if restored.step is None else f" (step {restored.step})"
    whole = byte_size(restored.run.nbytes)
    say(f"wrote {out}: version {commit.version}{step}, {whole} of weights, {seconds:.2f} s")
    say(f"verified: state {commit.after[:12]}")
    if as_json:
        write_json(restored.output(out, seconds))


@dataclass(frozen=True)
class _Restored:
    url: str
    run: Run
    commit: Commit
    step: int | None
    fetched_bytes: int

    def output(self, out: Path, seconds: float) -> RestoreOutput:
        return RestoreOutput(
            url=self.url,
            run=self.run.run,
            version=self.commit.version,
            step=self.step,
            state=self.commit.after,
            time=self.commit.time,
            metrics=self.commit.metrics,
            bytes=self.fetched_bytes,
            weights=self.run.parameters,
            weights_bytes=self.run.nbytes,
            checkpoint=str(out),
            seconds=round(seconds, 3),
        )


async def _restore(
    chain: ChainReader, version: int | None, out: Path, base: Path | None, threads: int | None
) -> _Restored:
    head = await chain.read_head()
    if head is None or not head.record.after:
        raise NoRun(f"{chain.bucket.url}: no weights have been published there yet", hint="wait for the publisher")
    target = await _find(chain, head, head.record.version if version is None else version)
    weights = Checkpoint(base) if base else None
    with progress_bar("restoring") as bar:
        work = _Work(chain.bucket, chain, out, weights, threads, bar)
        return await _restore_or_suggest(work, chain, head, target)


async def _restore_or_suggest(
    work: _Work, chain: ChainReader, head: Sealed[Commit], target: Sealed[Commit]
) -> _Restored:
    """Restores a version. If its data is lost, the error says which versions can be restored."""
    try:
        return await work.restore(target)
    except LOST_FOR_GOOD as problem:
        gone = isinstance(problem, DataGone)
        if not gone and not work.fetcher.lost:  # a side file, which every version needs
            raise
        others = await _alternatives(chain, head, target, work.fetcher.lost)
        if gone:
            number = target.record.version
            raise DataGone(f"{chain.bucket.url}: the data of version {number} is deleted", hint=others) from problem
        raise problem.reworded(problem.message, hint=f"`weightwire verify URL` lists all damage; {others}") from problem


async def _find(chain: ChainReader, head: Sealed[Commit], version: int) -> Sealed[Commit]:
    """The commit of a version, proven to belong to the chain of the newest."""
    newest = head.record.version
    if version > newest:
        raise RunError(f"{chain.bucket.url}: has no version {version}", hint=await _available(chain, head) or _NONE)
    commit = head if version == newest else await chain.read_linked(version, await chain.prove(head, version))
    if not commit.record.after:
        raise RunError(
            f"{chain.bucket.url}: version {version} is older than the first weights",
            hint=await _available(chain, head) or _NONE,
        )
    return commit


class _Work:
    """Writes one version, over other paths if data is lost."""

    def __init__(
        self,
        bucket: Bucket,
        chain: ChainReader,
        out: Path,
        base: Checkpoint | None,
        threads: int | None,
        bar: ProgressBar,
    ) -> None:
        self.fetcher = Fetcher(bucket, Runtime())
        self._bar = bar
        self._bucket = bucket
        self._chain = chain
        self._out = out
        self._base = base
        self._threads = threads

    async def restore(self, target: Sealed[Commit]) -> _Restored:
        files = await fetch_side_files(self._bucket, self._chain.run)
        step = await _step(self._chain, target)
        files[ABOUT_FILE] = _about(target, step)

        async def attempt() -> _Restored:
            path = await plan(self._chain, target, lost=self.fetcher.lost)
            await self._write(path, files)
            return _Restored(self._bucket.url, self._chain.run, target.record, step, path.nbytes)

        return await around_lost_data(self.fetcher, attempt, warn)

    async def _write(self, path: ChainPath, files: dict[str, bytes]) -> None:
        schema, runtime = self._chain.run.schema, Runtime()
        with CheckpointWriter(self._out, schema=schema, files=files, weights_file=weights_file_name(schema)) as writer:
            targets = {name: writer[name] for name in schema}
            state = await restore_weights(
                path,
                self.fetcher,
                targets,
                runtime,
                base=self._base,
                threads=self._threads,
                progress=start_progress(StageBar(self._bar)),
            )
            self._bar.begin("verifying", self._chain.run.nbytes)
            found = await runtime.run_in_thread(digest, targets, threads=self._threads, progress=self._bar.add)
            if not state.hex == found.hex == path.target.record.after:
                raise CorruptDelta(
                    f"{self._bucket.url}: the fetched data is not version {path.target.record.version}",
                    hint="run `weightwire verify URL`",
                )
            targets.clear()


async def _step(chain: ChainReader, target: Sealed[Commit]) -> int | None:
    """The training step of the weights. A fence has the weights, and the step, of the version before it."""
    if target.record.kind != FENCE:
        return target.record.step
    try:
        weights = await chain.read_weights_before(target)
    except WeightwireError:  # an anchor may hold the weights although older commits are damaged
        return None
    return weights.record.step if weights else None


def _about(target: Sealed[Commit], step: int | None) -> bytes:
    commit = target.record
    return CheckpointAbout(commit.run, commit.version, target.sha256, commit.after).to_json(step=step)


async def _available(chain: ChainReader, head: Sealed[Commit], above: int = 0, lost: Container[str] = ()) -> str:
    """The versions above `above` that can be restored, as text; empty if there are none."""
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
                and all([await find_or_list(chain.bucket, one.path) for one in start.files])
            ):
                found.add(start.version)
    except WeightwireError:
        return ""
    return f"{_range(min(found), newest)} can be restored"


async def _alternatives(chain: ChainReader, head: Sealed[Commit], target: Sealed[Commit], lost: Container[str]) -> str:
    """The versions that can be restored instead: the newest one before the target, and those after it."""
    found = []
    try:
        older = (await plan_newest(chain, target, lost=lost)).target.record.version
        found.append(f"version {older} can be restored: --version {older}")
    except WeightwireError:
        pass
    if target.sha256 != head.sha256:
        found.append(await _available(chain, head, target.record.version, lost))
    return "; ".join(filter(None, found)) or _NONE


def _range(first: int, last: int) -> str:
    return f"version {first}" if first == last else f"versions {first} to {last}"
