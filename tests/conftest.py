"""Shared fixtures and hooks."""

from __future__ import annotations

import gc
import os
import shutil
import sys
import threading
from collections.abc import Generator, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

from support.stores import Rclone, SeaweedFS, running
from support.vllm_server import VLLM, tiny_model
from weightwire.codec import _kernel, block_codec, numpy_kernel

WITH_VLLM = {
    "tests/project/test_deploy.py",
    "tests/engines/vllm/test_client.py",
    "tests/engines/vllm/test_lora_server.py",
    "tests/engines/vllm/test_server_health.py",
    "tests/engines/vllm/test_families.py",
    "tests/engines/vllm/test_prefix_cache.py",
    "tests/project/test_docs_engines.py",
    "tests/project/test_readme.py",
    "tests/trainers/test_trl_trainer.py",
}
# Each needs something that takes long to make: pages in a browser, every error, a kernel with sanitizers, engines, a
# store with a key for each role.
IN_ONE_PROCESS = {
    "tests/cli/test_follow_ready.py",
    "tests/faults/test_role_keys.py",
    "tests/faults/test_stolen_keys.py",
    "tests/fuzz/test_golden_mutations.py",
    "tests/page/test_browser.py",
    "tests/page/test_run_sizes.py",
    "tests/project/test_design.py",
    "tests/project/test_error_catalogue.py",
}
# Slow tests here take half a minute or more. They start first, so that no process is left alone with one at the end.
LONGEST = {
    "tests/cli/demo/test_demo_command.py",
    "tests/cli/test_serve.py",
    "tests/faults/test_fanout.py",
    "tests/faults/test_kills.py",
    "tests/faults/test_soak.py",
    "tests/project/test_docs_first_run.py",
    "tests/project/test_wordle.py",
    "tests/trainers/test_trl_serve.py",
}
AHEAD = 8  # tests that a process is given before it needs them
SERVERS = {"rclone", "seaweedfs", "vllm", "vllm_split"}
# `make core` tests the core without torch. A test that imports one of these packages is skipped there.
BEYOND_THE_CORE = {"openai", "peft", "starlette", "torch", "transformers", "trl", "uvicorn", "vllm", "websockets"}
CORE_ONLY = find_spec("torch") is None

MEMORY, ENOUGH = Path("/dev/shm"), 4 << 30


def pytest_configure() -> None:
    """Puts temporary directories into memory if there is space: on a disk, tests mostly wait for syncs."""
    if MEMORY.is_dir() and os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > ENOUGH:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks tests that need a server as slow, and puts the longest tests first."""
    for item in items:
        if SERVERS & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: not (_file_of(item.nodeid) in LONGEST and item.get_closest_marker("slow")))


def _file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keeps the garbage collector from reading every module and test again: here, and in each of its later passes."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_finish() -> None:
    """Limits torch to one thread if several processes test: otherwise their threads spin and wait."""
    if "PYTEST_XDIST_WORKER" in os.environ and "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


def absent(problem: BaseException | None) -> str | None:
    """The missing package of this exception, if only the full environment has it."""
    name = (problem.name or "").partition(".")[0] if isinstance(problem, ModuleNotFoundError) else ""
    return name if CORE_ONLY and name in BEYOND_THE_CORE else None


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    call = getattr(report, "call", None)
    if report.failed and call and (package := absent(call.excinfo.value.__cause__)):
        report.outcome, report.longrepr = "skipped", (str(collector.path), 0, f"Skipped: needs {package}")
    return report


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call() -> Generator[None, object, object]:
    try:
        return (yield)
    except ModuleNotFoundError as problem:
        if package := absent(problem):
            pytest.skip(f"needs {package}")
        raise


class Scheduling(LoadScopeScheduling):  # type: ignore[misc]
    """Runs all tests that need vLLM in one process, whose servers take half a minute to start, and others by file."""

    def _split_scope(self, nodeid: str) -> str:
        file = _file_of(nodeid)
        return "vllm" if file in WITH_VLLM else file if file in IN_ONE_PROCESS else nodeid

    def mark_test_complete(self, node: WorkerController, item_index: int, duration: float = 0) -> None:
        """Also forgets what is complete: xdist counts all that a process was given, after every test."""
        super().mark_test_complete(node, item_index, duration)
        scope = self._split_scope(self.registered_collections[node][item_index])
        if all(self.assigned_work[node][scope].values()):
            del self.assigned_work[node][scope]

    def _reschedule(self, node: WorkerController) -> None:
        """Gives a process several tests ahead. With two, as in xdist, it waits after every test for the next one."""
        if node.shutting_down:
            return
        if not self.workqueue:
            node.shutdown()
        while self.workqueue and self._pending_of(self.assigned_work[node]) < AHEAD:
            self._assign_work_unit(node)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduling | None:
    """Without slow tests none needs vLLM, and the default scheduler is faster."""
    return None if config.option.markexpr == "not slow" else Scheduling(config, log)


@pytest.fixture(autouse=True)
def closed_publishers_and_followers() -> Iterator[None]:
    """Fails a test that leaves a publisher or a follower open: its thread would disturb the tests after it."""
    before = {*threading.enumerate()}
    yield
    names = {"weightwire-publisher", "weightwire-follower"}
    for left in [one for one in threading.enumerate() if one.name in names and one not in before]:
        left.join(60)  # a close with a timeout leaves it to a request that ends soon
        assert not left.is_alive()


@pytest.fixture(params=["kernel", "spec"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The C kernel, then NumPy in its place."""
    monkeypatch.setattr(block_codec, "KERNEL", _kernel if request.param == "kernel" else numpy_kernel)
    return str(request.param)


@pytest.fixture
def without_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_codec, "KERNEL", numpy_kernel)


@pytest.fixture(scope="session")
def seaweedfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedFS]:
    """One server for all tests. Each test uses its own prefix."""
    server = SeaweedFS(tmp_path_factory.mktemp("seaweedfs"))
    with running(server):
        yield server


@pytest.fixture(scope="session")
def rclone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rclone]:
    server = Rclone(tmp_path_factory.mktemp("rclone"))
    with running(server):
        yield server


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint that vLLM servers start from. Tests must not change it."""
    return tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def vllm(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Iterator[VLLM]:
    """One server for all tests. It still holds the weights of the test before."""
    server = VLLM(tmp_path_factory.mktemp("vllm"), tiny, options=["--enable-scale-out"])
    with running(server):
        yield server


@pytest.fixture(scope="session")
def vllm_split(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Iterator[VLLM]:
    """A server with two workers, which hold half of each layer."""
    server = VLLM(tmp_path_factory.mktemp("vllm-split"), tiny, tensor_parallel=2)
    with running(server):
        yield server
