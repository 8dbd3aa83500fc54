"""`weightwire doctor`: runs the checks and prints one line for each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from weightwire.bucket import Bucket
from weightwire.cli.doctor.diagnosis import (
    Check,
    Role,
    check_disk,
    check_engine,
    check_kernel,
    check_memory,
    check_missing_directory,
    check_roles,
    check_run,
    check_store,
)
from weightwire.cli.doctor.doctor_output import CheckOutput, DoctorOutput
from weightwire.cli.doctor.machine import ask_engine, find_missing_directory, free_shared_memory, look_at_disk
from weightwire.cli.shared.bucket_command import Url, with_bucket
from weightwire.cli.shared.json_output import write_json
from weightwire.cli.shared.progress_bar import progress_bar
from weightwire.cli.shared.terminal import AsJson, counted
from weightwire.codec import vector_bits
from weightwire.engines.registry import split_engine
from weightwire.errors import EngineError, printable
from weightwire.inspection import Readiness, read_readiness
from weightwire.system import Runtime
from weightwire.upkeep import StoreTrial, measure_download, try_roles, try_store

__all__ = ["doctor"]


@dataclass(frozen=True)
class _Report:
    trial: StoreTrial
    checks: Sequence[Check]

    @property
    def ok(self) -> bool:
        return all(check.state != "problem" for check in self.checks)

    def can(self, role: Role) -> bool:
        return all(role not in check.stops for check in self.checks)

    @property
    def summary(self) -> str:
        verdicts = {
            (True, True): "can follow and publish",
            (True, False): "can follow, cannot publish",
            (False, True): "can publish, cannot follow",
            (False, False): "can neither follow nor publish",
        }
        states = [check.state for check in self.checks]
        counts = [counted(states.count(state), state) for state in ("problem", "warning") if state in states]
        return f"{verdicts[self.can('follow'), self.can('publish')]} ({', '.join(counts) or 'everything is ok'})"

    def to_json(self) -> DoctorOutput:
        trial = self.trial
        return DoctorOutput(
            url=trial.url,
            ok=self.ok,
            can_follow=self.can("follow"),
            can_publish=self.can("publish"),
            latency_seconds=trial.latency,
            clock_offset_seconds=trial.clock_offset,
            upload_bytes_per_second=trial.upload.rate if trial.upload else None,
            download_bytes_per_second=trial.download.rate if trial.download else None,
            checks=[
                CheckOutput(name=check.name, result=check.state, message=check.message, hint=check.hint)
                for check in self.checks
            ],
        )


def doctor(
    url: Url,
    into: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Also check the disk for a replica in this directory.")
    ] = None,
    engine: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=URL", help="Also check an engine, such as vllm=http://127.0.0.1:8000; repeatable."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check whether publishing and following work on this machine.

    Reads, lists, writes, creates and deletes probe objects under URL/probe/, measures latency and bandwidth, and checks
    the clock, the compiled kernel, the newest version of the run, and the roles that the key has the permissions for.
    Never changes the files of a run, and does not create a missing directory. Takes a few seconds. Exits with 1 if
    something does not work; a key without write permission is only a warning.
    """
    engines = [_checked(text) for text in engine or ()]
    with progress_bar("checking"):
        trial, found = with_bucket(url, _examine)
        report = _Report(trial, list(_checks(trial, found, into, engines)))
    if as_json:
        write_json(report.to_json())
    else:
        for check in report.checks:
            print(printable(f"{check.state:<8} {check.name:<10} {check.message}"))
            if check.hint and check.state != "ok":
                print(printable(f"{'':<19} hint: {check.hint}"))
        print(printable(report.summary))
    if not report.ok:
        raise typer.Exit(1)


async def _examine(bucket: Bucket) -> tuple[StoreTrial, Readiness | None]:
    """Tries the store and, if objects can be read, looks at the run."""
    runtime = Runtime()
    if find_missing_directory(bucket.url):  # a trial would create it
        return StoreTrial(bucket.url, bucket.strict), None
    trial = await try_store(bucket, runtime)
    if "://" in bucket.url and bucket.strict and not trial.unreachable:  # others have no roles
        await try_roles(bucket, runtime, trial)
    if not trial.works("read"):
        return trial, None
    found = await read_readiness(bucket)
    largest = max(found.files, key=lambda file: file.size, default=None)
    if trial.download is None and largest is not None:
        trial.download = await measure_download(bucket, runtime, largest.path, largest.size)
    return trial, found


def _checks(trial: StoreTrial, found: Readiness | None, into: Path | None, engines: Sequence[str]) -> Iterator[Check]:
    missing = find_missing_directory(trial.url)
    yield from [check_missing_directory(missing)] if missing else check_store(trial)
    if found is not None:
        yield check_run(found)
    roles = check_roles(trial, found)
    if roles is not None:
        yield roles
    yield check_kernel(vector_bits())
    weights = found.run.nbytes if found and found.run else None
    if into is not None:
        yield check_disk(look_at_disk(into), weights)
    memory = check_memory(free_shared_memory(), weights) if engines else None
    if memory is not None:
        yield memory
    for text in engines:
        yield check_engine(ask_engine(text))


def _checked(text: str) -> str:
    try:
        split_engine(text)
    except EngineError as problem:
        raise typer.BadParameter(f"{problem.message}; {problem.hint}", param_hint="--engine") from problem
    return text
