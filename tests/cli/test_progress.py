"""Progress on a real terminal: bytes, rate and time left."""

from __future__ import annotations

import asyncio
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from support.clocked_bucket import first_weights, publish
from support.commands import Training, on_terminal, weightwire
from weightwire.bucket.directory import DirectoryBucket
from weightwire.bucket.registry import open_bucket
from weightwire.cli.shared.progress_bar import ProgressBar

Change = Callable[..., None]

BYTES = r"\d+ k?B of 5\d kB +\S+ [kM]?B/s +\d+:\d\d left"

pytestmark = pytest.mark.usefixtures("drawn_progress")


@pytest.fixture
def drawn_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws every change of a progress bar. Rich draws ten times a second, if the machine has the time."""

    def drawn(change: Change) -> Change:
        def drawing(self: ProgressBar, *given: Any) -> None:
            time.sleep(0.01)  # the rate is measured between two changes
            change(self, *given)
            if self._display is not None:
                self._display.refresh()

        return drawing

    for name in ("add", "set"):
        monkeypatch.setattr(ProgressBar, name, drawn(getattr(ProgressBar, name)))


def test_publish_and_follow_show_bytes_rate_and_time_left(tmp_path: Path) -> None:
    published = on_terminal("publish", Training(tmp_path).save("checkpoint-1"), tmp_path / "run", "--threads", 1)
    assert published.code == 0
    assert re.search(f"encoding .* {BYTES}", published.err)

    followed = on_terminal("follow", tmp_path / "run", "--into", tmp_path / "replica", "--once", "--threads", 1)
    assert followed.code == 0
    assert re.search(f"applying .* {BYTES}", followed.err)


def test_export_shows_bytes(tmp_path: Path) -> None:
    publish(open_bucket(tmp_path / "run"), first_weights(), 3)
    ran = on_terminal("page", tmp_path / "run", "--export", tmp_path / "page.html")
    assert ran.code == 0
    assert re.search(r"reading the run .* \d\S* k?B +\S+ [kM]?B/s", ran.err)


class TestGc:
    @pytest.fixture
    def url(self, tmp_path: Path) -> Path:
        """A run with six objects that gc may delete."""
        publish(open_bucket(tmp_path / "run"), first_weights(), 7, anchor_every=2)
        return tmp_path / "run"

    def test_gc_shows_deleted_objects_rate_and_time_left(self, url: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        delete_one_by_one(monkeypatch)
        ran = on_terminal("gc", url, "--window", "0s", "--grace", "0s")
        assert ran.code == 0
        assert re.search(r"deleting .* \d of 6 objects +\d+/s +\d+:\d\d left", ran.err)

    def test_interrupt_of_gc_reports_the_deleted_objects(self, url: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with monkeypatch.context() as patch:
            delete_one_by_one(patch, interrupt_after=2)
            ran = weightwire("gc", url, "--window", "0s", "--grace", "0s")
        assert (ran.code, ran.err) == (130, "interrupted: 2 objects deleted; run this again to delete the rest\n")
        assert weightwire("gc", url, "--window", "0s", "--grace", "0s").err.startswith("deleted 4 objects")


def delete_one_by_one(patch: pytest.MonkeyPatch, interrupt_after: int | None = None) -> None:
    """Makes a directory delete one object after the other, and perhaps presses Ctrl-C."""
    count, lock, delete = 0, asyncio.Lock(), DirectoryBucket.delete

    async def delete_alone(self: DirectoryBucket, path: str) -> None:
        nonlocal count
        if path.startswith("probe/"):
            await delete(self, path)
            return
        async with lock:
            if count == interrupt_after:
                signal.raise_signal(signal.SIGINT)
                await asyncio.sleep(60)
            await delete(self, path)
            count += 1

    patch.setattr(DirectoryBucket, "delete", delete_alone)
