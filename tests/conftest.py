"""What several test files share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from stores import Rclone, SeaweedFS, running
from weightwire import codec
from weightwire.codec import _kernel, spec


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whatever needs a server is slow."""
    for item in items:
        if {"seaweedfs", "rclone"} & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(params=["kernel", "spec"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The C kernel, and then NumPy in its place, as where there was no compiler."""
    monkeypatch.setattr(codec, "KERNEL", _kernel if request.param == "kernel" else spec)
    return str(request.param)


@pytest.fixture
def without_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "KERNEL", spec)


@pytest.fixture(scope="session")
def seaweedfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedFS]:
    """One server for all tests: each uses a prefix of its own, and leaves it running."""
    server = SeaweedFS(tmp_path_factory.mktemp("seaweedfs"))
    with running(server):
        yield server


@pytest.fixture(scope="session")
def rclone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rclone]:
    server = Rclone(tmp_path_factory.mktemp("rclone"))
    with running(server):
        yield server
