"""Errors of runs: commits that are missing or wrong, data that is gone, versions that do not exist."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import tempfile
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import weightwire
from project.provocations.case import OTHER, WEIGHTS, Case, Provocation, follow, publish
from support.chains import ChainBucket, forged
from support.failing_bucket import Quick, Troubled, conflicting, in_memory, missing, quickly
from support.records import a_run, chain_of, grow, sha, store, token
from weightwire import Publisher, open_bucket
from weightwire.catchup import Fetcher, fetch_side_files, plan
from weightwire.chain import ChainReader, Commit, Run, commit_path, create_until_taken, read_run, seal, unseal
from weightwire.cli.application import app
from weightwire.page.run_reader import RunReader
from weightwire.system import Runtime

THIRD = OTHER | {"norm": WEIGHTS["norm"] * 2}


def command(*words: str | Path) -> None:
    """Runs a command in this process."""
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        app([str(word) for word in words], standalone_mode=False)


def three_versions(case: Case) -> Path:
    return publish(case, WEIGHTS, OTHER, THIRD, anchor_every=10**6)


def restore(damage: Callable[[Path], object], *options: str) -> Provocation:
    """Restores a run of three versions after it was damaged."""

    def provoke(case: Case) -> None:
        run = three_versions(case)
        damage(run)
        command("restore", run, "-o", case.here / "out", *options)

    return provoke


def remove(run: Path, pattern: str) -> None:
    for path in list(run.glob(pattern)):
        path.unlink()


def flip(run: Path, pattern: str) -> None:
    """Changes the last byte of some objects."""
    for path in run.glob(pattern):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)


def commit_file(run: Path, version: int) -> Path:
    return run / commit_path(version)


def edit(run: Path, version: int, **fields: Any) -> None:
    """Changes fields of a commit."""
    path = commit_file(run, version)
    path.write_bytes(json.dumps(json.loads(path.read_bytes()) | fields).encode())


def followed(damage: Callable[[Path], object]) -> Provocation:
    def provoke(case: Case) -> None:
        run = three_versions(case)
        damage(run)
        follow(case)

    return provoke


def refollowed(change: Callable[[Path], object]) -> Provocation:
    """Follows a run, changes the run, and follows it again into the same directory."""

    def provoke(case: Case) -> None:
        run = three_versions(case)
        follow(case)
        change(run)
        follow(case)

    return provoke


def rolled_back_run(run: Path) -> None:
    for version in (2, 3):
        commit_file(run, version).unlink()
    remove(run, "HEAD.json")


def run_with_another_history(run: Path) -> None:
    rolled_back_run(run)
    with Publisher(run, blocking=True) as publisher:
        publisher.publish(THIRD)
        publisher.publish(WEIGHTS)


def run_with_another_schema(run: Path) -> None:
    path = run / "run.json"
    record = json.loads(path.read_bytes())
    record["tensors"]["w"] = ["F32", [3, 2]]
    path.write_bytes(json.dumps(record).encode())


def commit_of_another_run(case: Case) -> None:
    publish(case)
    other = Case(case.here / "other", case.patch)
    publish(other)
    commit_file(case.run, 0).write_bytes(commit_file(other.run, 0).read_bytes())
    weightwire.Publisher(case.run)


def run_of_a_newer_format(case: Case) -> None:
    run = publish(case)
    path = run / "run.json"
    record = json.loads(path.read_bytes())
    path.write_bytes(json.dumps(record | {"format": record["format"].replace("/1", "/9")}).encode())
    follow(case)


def read_chain(work: Callable[[ChainBucket], Any], *, denied: bool = False) -> Provocation:
    """Work on a chain of eight commits without data."""

    def provoke(case: Case) -> None:
        bucket = ChainBucket(chain_of(8))
        if denied:
            bucket.deny_missing()
        asyncio.run(work(bucket))

    return provoke


def forged_parent(case: Case) -> None:
    commits = chain_of(8)
    bucket = ChainBucket(commits)
    bucket.rewrite(forged(commits, 4))
    asyncio.run(bucket.chain.read_linked(4, commits[4].sha256))


def second_commit(case: Case, **fields: Any) -> None:
    """A chain whose newest commit breaks a rule."""
    commits = chain_of(4)
    grow(commits, **fields)
    bucket = ChainBucket(commits)
    asyncio.run(bucket.chain.read_parent(commits[-1]))


def breaks(**fields: Any) -> Provocation:
    return lambda case: second_commit(case, **fields)


def fenced_publisher(case: Case) -> None:
    with Publisher(case.run, blocking=True) as first:
        first.publish(WEIGHTS)
        with Publisher(case.run, blocking=True) as second:
            second.publish(OTHER)
        first.publish(OTHER)


def claim_lost_to_a_higher_epoch(case: Case) -> None:
    """A publisher claims an epoch, and one with a higher epoch commits before it does."""
    from weightwire.chain import ChainWriter

    bucket = in_memory()
    asyncio.run(store(bucket, chain_of(3)))
    writer = ChainWriter(bucket, a_run(), Quick(), lambda message: None)

    async def overtaken(act: Any) -> Any:
        commits = chain_of(3)
        grow(commits, "fence", epoch=9)
        await bucket.inner.create(commit_path(3), commits[3].data)
        return await act()

    bucket.trouble("create", "epochs/", overtaken)
    asyncio.run(writer.take_over())


def gc_of_a_broken_run(case: Case) -> None:
    run = three_versions(case)
    commit_file(run, 1).unlink()
    command("gc", run)


def gc_that_misses_a_commit(case: Case) -> None:
    run = three_versions(case)
    bucket = Troubled(open_bucket(run))
    from weightwire.upkeep.gc import _read_commits

    record = asyncio.run(read_run(bucket))
    commit_file(run, 1).unlink()
    asyncio.run(_read_commits(ChainReader(bucket, record), [1]))


def damaged_side_file(case: Case) -> None:
    run = publish(case, files={"config.json": b"{}"})
    flip(run, "files/*/*")
    asyncio.run(fetch_side_files(open_bucket(run), asyncio.run(read_run(open_bucket(run)))))


def no_room_for_large_data(case: Case) -> None:
    def fail(**_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    case.patch.setattr("weightwire.catchup.fetch._IN_MEMORY", 10)
    three_versions(case)
    case.patch.setattr(tempfile, "TemporaryFile", fail)
    follow(case)


def base_of(case: Case, base: Any, **settings: Any) -> None:
    """A run that starts from a base checkpoint, followed with `base`."""
    publish(case, OTHER, base=WEIGHTS, source="hf://org/model", anchor_every=10**6)
    follow(case, base=base, **settings)


def delta_in_place_of_an_anchor(case: Case) -> None:
    run = three_versions(case)
    bucket = open_bucket(run)
    record = unseal(commit_file(run, 2).read_bytes(), Commit, "").record
    asyncio.run(Fetcher(bucket, Quick()).fetch(record.files, "anchor"))


def another_state(version: int) -> Provocation:
    """A run whose commit names a state that its data does not lead to."""

    def provoke(case: Case) -> None:
        run = three_versions(case)
        commits = [unseal(commit_file(run, number).read_bytes(), Commit, "") for number in range(4)]
        parent = commits[version - 1]
        for number in range(version, 4):
            fields = {name: getattr(commits[number].record, name) for name in commits[number].record.__struct_fields__}
            fields |= {"parent": parent.sha256, "before": parent.record.after}
            if number == version:
                fields["after"] = sha("another state")
            fields["back"] = asyncio.run(_back(run, parent))
            parent = seal(Commit(**fields))
            commit_file(run, number).write_bytes(parent.data)
            if number == version:
                break
        for number in range(version + 1, 4):
            commit_file(run, number).unlink()
        remove(run, "HEAD.json")
        follow(case)

    return provoke


async def _back(run: Path, parent: Any) -> tuple[str, ...]:
    bucket = open_bucket(run)
    return await ChainReader(bucket, await read_run(bucket)).back_of(parent)


def page_of_a_deleted_run(case: Case) -> None:
    publish(case)

    async def look_twice() -> None:
        reader = RunReader(open_bucket(case.run), Runtime())
        await reader.look()
        remove(case.run, "run.json")
        await reader.look()

    asyncio.run(look_twice())


def run_with_only_a_fence(case: Case) -> Path:
    """A run whose publisher has not published weights yet."""
    asyncio.run(store(open_bucket(case.run), chain_of(1)))
    return case.run


def held_version_outside_the_chain(case: Case) -> None:
    commits = chain_of(6)
    bucket = ChainBucket(commits)
    asyncio.run(plan(bucket.chain, commits[5], at=forged(commits, 3)))


def run_without_an_anchor(case: Case) -> None:
    commits = chain_of(6)
    lost = {file.path for file in commits[1].record.files}
    asyncio.run(plan(ChainBucket(commits).chain, commits[5], lost=lost))


def commit_of_another_version(case: Case) -> None:
    commits = chain_of(4)
    bucket = ChainBucket(commits)
    bucket.put_now(commit_path(2), commits[3].data)
    asyncio.run(bucket.chain.read(2))


def chain_without_a_fence(case: Case) -> None:
    commits = chain_of(4)
    bucket = ChainBucket(commits)
    bucket.put_now(commit_path(0), grow([], "anchor", epoch=1).data)
    asyncio.run(bucket.chain.read(0))


def truncated_data(case: Case) -> None:
    run = three_versions(case)
    for path in run.glob("anchors/1/*"):
        path.write_bytes(path.read_bytes()[:100])
    follow(case)


def unreadable_record(case: Case) -> None:
    unseal(b"{}", Run, "s3://bucket/run/run.json")


def huge_record(case: Case) -> None:
    run = publish(case)
    with (run / "run.json").open("wb") as file:
        file.truncate(1 << 40)
    follow(case)


def commit_that_exists_and_cannot_be_read(case: Case) -> None:
    bucket = in_memory()
    bucket.trouble("create", "", conflicting, times=1e9)
    bucket.trouble("get", "", missing, times=1e9)
    quickly(create_until_taken(bucket, commit_path(1), b"{}", Quick(), lambda message: None))


def every_version_exists(case: Case) -> None:
    async def there(act: Any) -> Any:
        return act

    bucket = ChainBucket(chain_of(2))
    bucket.trouble("find", "", there, times=1e9)
    asyncio.run(bucket.chain.find_head())


def side_file_that_grew(case: Case) -> None:
    run = publish(case, files={"config.json": b"{}"})
    (grown,) = run.glob("files/*/*")
    grown.write_bytes(b"{}{}")
    asyncio.run(fetch_side_files(open_bucket(run), asyncio.run(read_run(open_bucket(run)))))


def base_at_a_path_named_by_a_store(case: Case) -> None:
    bucket = in_memory()
    with Publisher(bucket, base=WEIGHTS, source="/data/model", threads=1):
        pass
    follow(case, bucket)


PROVOCATIONS: list[Provocation] = [
    lambda case: follow(case),
    lambda case: command("restore", case.run, "-o", case.here / "out"),
    lambda case: command("page", case.run, "--export", case.here / "page.html"),
    unreadable_record,
    huge_record,
    commit_that_exists_and_cannot_be_read,
    every_version_exists,
    run_of_a_newer_format,
    commit_of_another_run,
    read_chain(lambda bucket: bucket.chain.read_linked(9, sha("nine"))),
    read_chain(lambda bucket: bucket.chain.read_linked(9, sha("nine")), denied=True),
    forged_parent,
    breaks(parent=sha("another")),
    breaks(before=sha("another")),
    breaks(epoch=1, kind="fence"),
    breaks(epoch=7),
    breaks(run=token("another run")),
    breaks(back=(sha("another"), sha("one"))),
    # Data
    followed(lambda run: remove(run, "anchors/1/*")),
    followed(lambda run: remove(run, "deltas/2/*")),
    followed(lambda run: flip(run, "anchors/1/*")),
    followed(lambda run: commit_file(run, 1).unlink()),
    followed(lambda run: edit(run, 0, kind="anchor")),
    followed(lambda run: (run / "run.json").write_text("{}")),
    refollowed(rolled_back_run),
    refollowed(run_with_another_history),
    refollowed(run_with_another_schema),
    no_room_for_large_data,
    delta_in_place_of_an_anchor,
    another_state(1),
    another_state(3),
    damaged_side_file,
    side_file_that_grew,
    base_at_a_path_named_by_a_store,
    lambda case: base_of(case, None),
    lambda case: base_of(case, THIRD),
    # Commands
    restore(lambda run: None, "--version", "9"),
    restore(lambda run: None, "--version", "0"),
    restore(lambda run: remove(run, "deltas/2/*")),
    restore(lambda run: flip(run, "deltas/3/*")),
    gc_of_a_broken_run,
    gc_that_misses_a_commit,
    page_of_a_deleted_run,
    lambda case: command("restore", run_with_only_a_fence(case), "-o", case.here / "out"),
    lambda case: follow(case, run_with_only_a_fence(case)),
    held_version_outside_the_chain,
    run_without_an_anchor,
    commit_of_another_version,
    chain_without_a_fence,
    truncated_data,
    # Publishers
    fenced_publisher,
    claim_lost_to_a_higher_epoch,
]
