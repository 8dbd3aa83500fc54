"""The rules of `weightwire doctor`: how measured facts become checks."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.clocked_bucket import clocked, first_weights, publish, run
from weightwire.chain.reader import read_run
from weightwire.chain.records import Run
from weightwire.cli.doctor.diagnosis import (
    Check,
    Role,
    check_disk,
    check_engine,
    check_kernel,
    check_memory,
    check_run,
    check_store,
)
from weightwire.cli.doctor.machine import Disk, EngineAnswer
from weightwire.errors import (
    BrokenChain,
    BucketError,
    DataGone,
    EngineGone,
    NotFound,
    PermissionDenied,
    Unavailable,
    UnsafeBucket,
    WeightwireError,
)
from weightwire.inspection.readiness import Readiness
from weightwire.upkeep.store_trial import Operation, StoreTrial, Transfer

GB = 10**9
BOTH: tuple[Role, ...] = ("follow", "publish")


@pytest.fixture(scope="module")
def a_run() -> Run:
    bucket = clocked()
    publish(bucket, first_weights(), 1)
    return run(read_run(bucket))


def store(problems: dict[Operation, BucketError] | None = None, **facts: object) -> dict[str, Check]:
    results: dict[Operation, BucketError | None] = dict.fromkeys(("list", "write", "read", "create", "delete"))
    results.update(problems or {})
    trial = StoreTrial("s3://bucket/run", True, results)
    for name, value in facts.items():
        setattr(trial, name, value)
    return {check.name: check for check in check_store(trial)}


def test_working_store_has_only_ok_checks() -> None:
    checks = store(latency=0.01, clock_offset=0.5, upload=Transfer(GB, 10), download=Transfer(GB, 2))

    assert {check.state for check in checks.values()} == {"ok"}
    assert not any(check.stops for check in checks.values())
    assert checks["bandwidth"].message == "upload 100 MB/s, download 500 MB/s"
    assert checks["latency"].message == "10 ms for a small request"


def test_unreachable_store_is_the_only_line() -> None:
    problem = Unavailable("s3://bucket: timed out", hint="wait")
    assert list(store({"list": problem}).values()) == [
        Check("store", "problem", "s3://bucket: timed out", "wait", BOTH),
    ]


@pytest.mark.parametrize(
    ("operation", "state", "stops"),
    [
        ("list", "warning", ("publish",)),
        ("write", "warning", ("publish",)),
        ("read", "problem", BOTH),
        ("create", "problem", ("publish",)),
        ("delete", "warning", ()),
    ],
)
def test_denied_operation_stops_the_commands_that_need_it(
    operation: Operation, state: str, stops: tuple[str, ...]
) -> None:
    check = store({operation: PermissionDenied("denied", hint="ask")})[operation]
    assert (check.state, check.stops) == (state, stops)
    assert check.hint


@pytest.mark.parametrize("operation", ["list", "write", "read", "create", "delete"])
def test_operation_that_fails_for_another_reason_is_a_problem(operation: Operation) -> None:
    check = store({operation: BucketError("No space left on device", hint="free space")})[operation]
    assert (check.state, check.message, check.hint) == ("problem", "No space left on device", "free space")


def test_unsafe_store_cannot_be_published_to() -> None:
    check = store({"create": UnsafeBucket("two trainers", hint="another store")})["create"]
    assert (check.state, check.stops) == ("problem", ("publish",))


def test_single_writer_store_is_a_warning() -> None:
    check = store(strict=False)["create"]
    assert (check.state, check.stops) == ("warning", ())


def test_slow_store_is_a_warning() -> None:
    assert store(latency=1.5)["latency"].state == "warning"


@pytest.mark.parametrize(
    ("offset", "state", "text"),
    [(5, "ok", "agrees"), (-5, "ok", "agrees"), (130, "warning", "2 min behind"), (-130, "warning", "2 min ahead of")],
)
def test_wrong_clock_is_a_warning(offset: float, state: str, text: str) -> None:
    check = store(clock_offset=float(offset))["clock"]
    assert check.state == state
    assert text in check.message


def test_run_check_names_the_newest_version(a_run: Run) -> None:
    assert "no run here yet" in check_run(Readiness()).message
    assert "has no version yet" in check_run(Readiness(a_run)).message
    ready = check_run(Readiness(a_run, 3))
    assert (ready.state, ready.stops) == ("ok", ())
    assert "version 3" in ready.message
    assert "org/model" in check_run(Readiness(a_run, 3, base="org/model")).message
    assert check_run(Readiness(a_run, 3, lost=("a",))).state == "warning"


@pytest.mark.parametrize(
    ("problem", "stops"), [(DataGone("x"), ("follow",)), (NotFound("x"), ("follow",)), (BrokenChain("x"), BOTH)]
)
def test_unreadable_run_is_a_problem(problem: WeightwireError, stops: tuple[str, ...], a_run: Run) -> None:
    check = check_run(Readiness(a_run, 3, problem=problem))
    assert (check.state, check.stops) == ("problem", stops)


def test_missing_kernel_is_a_warning() -> None:
    assert check_kernel(None).state == "warning"
    assert [check_kernel(bits).message for bits in (0, 256, 512)] == [
        "compiled",
        "compiled, using AVX2",
        "compiled, using AVX-512",
    ]


@pytest.mark.parametrize(
    ("free", "shares_blocks", "state"),
    [
        (19, False, "problem"),
        (20, False, "warning"),
        (29, False, "warning"),
        (30, False, "ok"),
        (9, True, "problem"),
        (19, True, "warning"),
        (20, True, "ok"),
    ],
)
def test_disk_must_hold_a_replica(free: int, shares_blocks: bool, state: str) -> None:
    check = check_disk(Disk(Path("/x"), free * GB, shares_blocks), 10 * GB)
    assert (check.state, check.stops) == (state, ("follow",) if state == "problem" else ())


def test_disk_without_a_run_is_ok() -> None:
    assert check_disk(Disk(Path("/x"), 1), None).state == "ok"


def test_disk_that_cannot_be_written_is_a_problem() -> None:
    check = check_disk(Disk(Path("/x"), problem="Read-only file system"), None)
    assert (check.state, check.message, check.stops) == (
        "problem",
        "/x: cannot be written (Read-only file system)",
        ("follow",),
    )


def test_small_shared_memory_is_a_warning() -> None:
    assert check_memory(None, GB) is None
    small, large = check_memory(64 << 20, GB), check_memory(GB, GB)
    assert small
    assert large
    assert (small.state, large.state) == ("warning", "ok")


def test_unreachable_engine_is_a_problem() -> None:
    gone = check_engine(EngineAnswer("vllm", problem=EngineGone("http://x: cannot be reached", hint="start it")))
    assert (gone.state, gone.hint, gone.stops) == ("problem", "start it", ("follow",))
    assert check_engine(EngineAnswer("vllm", "vLLM 0.29.0", 7)).message == (
        "vLLM 0.29.0 with the weightwire plugin, serves version 7"
    )
    assert "unknown version" in check_engine(EngineAnswer("vllm", "vLLM 0.29.0")).message
    assert "not contacted" in check_engine(EngineAnswer("other")).message
