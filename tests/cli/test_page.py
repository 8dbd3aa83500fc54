"""`weightwire page`: output, exit codes and signals."""

from __future__ import annotations

import json
import re
import signal
import socket
import urllib.request
from pathlib import Path

import pytest

from support.clocked_bucket import first_weights, publish
from support.commands import Running, weightwire
from weightwire.bucket.registry import open_bucket


@pytest.fixture
def url(tmp_path: Path) -> Path:
    publish(open_bucket(tmp_path / "run"), first_weights(), 3)
    return tmp_path / "run"


def snapshot_in(page: Path) -> dict[str, object]:
    found = re.search(r'id="snapshot">(.*?)</script>', page.read_text(encoding="utf-8"), re.DOTALL)
    assert found
    return dict(json.loads(found[1]))


class TestExport:
    def test_export_is_one_file(self, url: Path, tmp_path: Path) -> None:
        out = tmp_path / "page.html"
        ran = weightwire("page", url, "--export", out)
        assert (ran.code, ran.out) == (0, "")
        assert ran.err.startswith(f"wrote {out}: ")
        assert snapshot_in(out)["url"] == str(url)

    def test_earlier_page_is_replaced(self, url: Path, tmp_path: Path) -> None:
        out = tmp_path / "page.html"
        weightwire("page", url, "--export", out)
        publish(open_bucket(url), first_weights(), 1)
        assert weightwire("page", url, "--export", out).code == 0
        versions = snapshot_in(out)["versions"]
        assert isinstance(versions, list)
        assert len(versions) == 6

    def test_other_files_are_not_replaced(self, url: Path, tmp_path: Path) -> None:
        out, directory = tmp_path / "notes.html", tmp_path / "directory.html"
        out.write_bytes(b"mine")
        directory.mkdir()
        weightwire("page", url, "--export", out).check_failed("exists and is not a page")
        assert out.read_bytes() == b"mine"
        weightwire("page", url, "--export", directory).check_failed("is a directory, not a file")
        weightwire("page", url, "--export", tmp_path / "no" / "page.html").check_failed("does not exist")

    def test_name_must_end_in_html(self, url: Path, tmp_path: Path) -> None:
        ran = weightwire("page", url, "--export", tmp_path / "notes.txt")
        assert ran.code == 2
        assert "notes.txt does not end in .html" in ran.err
        assert not (tmp_path / "notes.txt").exists()

    def test_empty_bucket_is_an_error(self, tmp_path: Path) -> None:
        (tmp_path / "empty").mkdir()
        ran = weightwire("page", tmp_path / "empty", "--export", tmp_path / "page.html")
        ran.check_failed("nothing has been published there yet")
        assert not (tmp_path / "page.html").exists()

    def test_unsupported_url_is_an_error(self, tmp_path: Path) -> None:
        weightwire("page", "ftp://x/y", "--export", tmp_path / "page.html").check_failed(
            "is not a supported kind of bucket"
        )


class TestLive:
    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_page_is_served_until_a_signal_stops_it(self, url: Path, number: int) -> None:
        with Running("page", url, "--port", "0", "--no-open") as running:
            address = running.wait_for("http://127.0.0.1:", stream="out").strip()
            with urllib.request.urlopen(f"{address}run.json", timeout=60) as answer:
                assert len(json.load(answer)["versions"]) == 4
            ran = running.stop(number)
        code, end = (130, "interrupted") if number == signal.SIGINT else (0, "stopped")
        assert (ran.code, ran.out) == (code, f"{address}\n")
        assert ran.err == f"showing {url} live; press Ctrl-C to stop\n{end}: the page has stopped\n"

    def test_port_in_use_is_an_error(self, url: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as other:
            port = other.getsockname()[1]
            ran = weightwire("page", url, "--port", port)
        ran.check_failed(f"127.0.0.1:{port}: the port is in use by another program")

    def test_address_of_another_machine_is_an_error(self, url: Path) -> None:
        weightwire("page", url, "--host", "203.0.113.7", "--port", "0").check_failed("cannot listen")

    def test_damaged_run_is_an_error(self, url: Path) -> None:
        (url / "run.json").write_bytes(b"nonsense")
        weightwire("page", url, "--port", "0").check_failed("run.json: cannot be read")

    def test_unsupported_url_is_an_error(self) -> None:
        weightwire("page", "ftp://x/y").check_failed("is not a supported kind of bucket")
        assert weightwire("page", "/tmp", "--port", "70000").code == 2
