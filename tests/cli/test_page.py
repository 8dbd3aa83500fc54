"""`weightwire page`, as a user sees it: what goes to stdout and what to stderr, exit codes, and how it ends."""

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


def picture_in(page: Path) -> dict[str, object]:
    found = re.search(r'id="picture">(.*?)</script>', page.read_text(encoding="utf-8"), re.DOTALL)
    assert found
    return dict(json.loads(found[1]))


class TestExport:
    def test_one_file(self, url: Path, tmp_path: Path) -> None:
        out = tmp_path / "page.html"
        ran = weightwire("page", url, "--export", out)
        assert (ran.code, ran.out) == (0, "")
        assert ran.err.startswith(f"wrote {out}: ")
        assert picture_in(out)["url"] == url.as_uri()

    def test_an_earlier_page_is_replaced(self, url: Path, tmp_path: Path) -> None:
        out = tmp_path / "page.html"
        weightwire("page", url, "--export", out)
        publish(open_bucket(url), first_weights(), 1)
        assert weightwire("page", url, "--export", out).code == 0
        versions = picture_in(out)["versions"]
        assert isinstance(versions, list)
        assert len(versions) == 6

    def test_nothing_else_is(self, url: Path, tmp_path: Path) -> None:
        out = tmp_path / "model.safetensors"
        out.write_bytes(b"weights")
        weightwire("page", url, "--export", out).check_failed("exists, and is no page")
        assert out.read_bytes() == b"weights"
        weightwire("page", url, "--export", tmp_path).check_failed("is a directory already")
        weightwire("page", url, "--export", tmp_path / "no" / "page.html").check_failed("there is no directory")

    def test_of_no_run(self, tmp_path: Path) -> None:
        (tmp_path / "empty").mkdir()
        ran = weightwire("page", tmp_path / "empty", "--export", tmp_path / "page.html")
        ran.check_failed("nothing has been published there yet")
        assert not (tmp_path / "page.html").exists()

    def test_of_no_url(self, tmp_path: Path) -> None:
        weightwire("page", "ftp://x/y", "--export", tmp_path / "page.html").check_failed("is no bucket")


class TestLive:
    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_until_it_is_told_to_stop(self, url: Path, number: int) -> None:
        with Running("page", url, "--port", "0", "--no-open") as running:
            address = running.wait_for("http://127.0.0.1:", stream="out").strip()
            with urllib.request.urlopen(f"{address}run.json", timeout=10) as answer:
                assert len(json.load(answer)["versions"]) == 4
            ran = running.stop(number)
        assert (ran.code, ran.out) == (0, f"{address}\n")
        assert ran.err == f"the page of {url}; Ctrl-C ends it\n"

    def test_a_port_in_use(self, url: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as other:
            port = other.getsockname()[1]
            ran = weightwire("page", url, "--port", port)
        ran.check_failed(f"127.0.0.1:{port}: another program listens there already")

    def test_a_host_that_is_not_this_machine(self, url: Path) -> None:
        weightwire("page", url, "--host", "203.0.113.7", "--port", "0").check_failed("cannot be listened on")

    def test_a_bucket_that_cannot_be_read(self, url: Path) -> None:
        (url / "run.json").write_bytes(b"nonsense")
        weightwire("page", url, "--port", "0").check_failed("run.json: cannot be read")

    def test_of_no_url(self) -> None:
        weightwire("page", "ftp://x/y").check_failed("is no bucket")
        assert weightwire("page", "/tmp", "--port", "70000").code == 2
