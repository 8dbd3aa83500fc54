"""The page's server: its responses, its access rules, and its behaviour when the bucket fails."""

from __future__ import annotations

import gzip
import json
import shutil
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.clocked_bucket import first_weights, publish, stepped
from support.http_client import ask, raw_reply
from weightwire.bucket.registry import open_bucket
from weightwire.errors import CannotListen, WeightwireError
from weightwire.page.page_server import PORT, PageServer


@pytest.fixture
def url(tmp_path: Path) -> Path:
    publish(open_bucket(tmp_path / "run"), first_weights(), 3)
    return tmp_path / "run"


@pytest.fixture
def page(url: Path) -> Iterator[PageServer]:
    with PageServer(url, port=0) as page:
        yield page


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageServer]:
    """One server for all tests that only read."""
    url = tmp_path_factory.mktemp("quiet") / "run"
    publish(open_bucket(url), first_weights(), 3)
    with PageServer(url, port=0) as page:
        yield page


def snapshot(page: PageServer) -> dict[str, Any]:
    return dict(json.loads(ask(page.address, "/run.json")[1]))


def wait_for(page: PageServer, key: str, value: object) -> dict[str, Any]:
    until = time.monotonic() + 60
    while time.monotonic() < until:
        found = snapshot(page)
        if found[key] == value or (callable(value) and value(found[key])):
            return found
        time.sleep(0.05)
    raise AssertionError(f"{key} stays {found[key]!r}")


class TestAnswers:
    @pytest.mark.parametrize(
        ("path", "kind"),
        [
            ("/", "text/html; charset=utf-8"),
            ("/?x=1", "text/html; charset=utf-8"),
            ("/page.css", "text/css; charset=utf-8"),
            ("/page.js", "text/javascript; charset=utf-8"),
            ("/plotly.js", "text/javascript; charset=utf-8"),
            ("/run.json", "application/json"),
        ],
    )
    def test_each_part_of_the_page_is_served(self, quiet: PageServer, path: str, kind: str) -> None:
        answer, body = ask(quiet.address, path)
        assert (answer.status, answer.getheader("Content-Type"), bool(body)) == (200, kind, True)
        policy = answer.getheader("Content-Security-Policy") or ""
        assert "script-src 'self';" in policy
        assert "unsafe-eval" not in policy
        assert answer.getheader("X-Content-Type-Options") == "nosniff"

    @pytest.mark.parametrize("path", ["/x", "/../errors.py", "/page_server.py", "/page.html"])
    def test_other_paths_are_not_found(self, quiet: PageServer, path: str) -> None:
        assert ask(quiet.address, path)[0].status == 404

    def test_run_json_has_all_versions(self, quiet: PageServer) -> None:
        assert [one["version"] for one in snapshot(quiet)["versions"]] == [0, 1, 2, 3]

    def test_an_unchanged_snapshot_is_not_sent_again(self, quiet: PageServer) -> None:
        tag = ask(quiet.address, "/run.json")[0].getheader("ETag") or ""
        answer, body = ask(quiet.address, "/run.json", If_None_Match=tag)
        assert (answer.status, body) == (304, b"")

    @pytest.mark.parametrize("path", ["/run.json", "/plotly.js"])
    def test_bodies_are_compressed_on_request(self, quiet: PageServer, path: str) -> None:
        plain, packed = ask(quiet.address, path)[1], ask(quiet.address, path, Accept_Encoding="gzip")
        assert packed[0].getheader("Content-Encoding") == "gzip"
        assert gzip.decompress(packed[1]) == plain

    def test_head_has_no_body(self, quiet: PageServer) -> None:
        answer, body = ask(quiet.address, "/", "HEAD")
        assert (answer.status, body) == (200, b"")

    @pytest.mark.parametrize(
        "host", ["evil.example", "evil.example:8765", "127.0.0.1.evil.example", "[::1]evil", "[::1]:1:2", ""]
    )
    def test_a_foreign_host_header_is_rejected(self, quiet: PageServer, host: str) -> None:
        assert ask(quiet.address, "/run.json", Host=host)[0].status == 403

    def test_a_request_with_two_hosts_is_rejected(self, quiet: PageServer) -> None:
        request = b"GET /run.json HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n"
        assert raw_reply(quiet.address, request).startswith(b"HTTP/1.0 403 ")

    @pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1:99", "[::1]:99"])
    def test_local_host_headers_are_accepted(self, quiet: PageServer, host: str) -> None:
        assert ask(quiet.address, "/run.json", Host=host)[0].status == 200

    @pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
    def test_only_get_and_head_are_implemented(self, quiet: PageServer, method: str) -> None:
        assert ask(quiet.address, "/run.json", method)[0].status == 501


class TestLive:
    def test_a_new_version_appears(self, page: PageServer, url: Path) -> None:
        tag = ask(page.address, "/run.json")[0].getheader("ETag")
        publish(open_bucket(url), stepped(first_weights(), 2), 1)
        found = wait_for(page, "versions", lambda versions: len(versions) == 6)
        assert found["trouble"] == ""
        assert ask(page.address, "/run.json")[0].getheader("ETag") != tag

    def test_the_last_snapshot_stays_while_the_bucket_is_broken(self, page: PageServer, url: Path) -> None:
        commit = url / "commits" / "00000000000000000004.json"
        commit.write_bytes(b"nonsense")
        found = wait_for(page, "trouble", bool)
        assert "00000000000000000004.json: cannot be read" in found["trouble"]
        assert len(found["versions"]) == 4
        commit.unlink()
        assert len(wait_for(page, "trouble", "")["versions"]) == 4

    def test_a_run_that_starts_later_appears(self, tmp_path: Path) -> None:
        (tmp_path / "run").mkdir()
        with PageServer(tmp_path / "run", port=0) as page:
            assert snapshot(page)["run"] == ""
            publish(open_bucket(tmp_path / "run"), first_weights(), 1)
            wait_for(page, "versions", lambda versions: len(versions) == 2)

    def test_a_deleted_run_is_reported_until_a_new_one_starts(self, page: PageServer, url: Path) -> None:
        shutil.rmtree(url)
        url.mkdir()
        found = wait_for(page, "trouble", lambda trouble: trouble.endswith("the run was deleted"))
        assert len(found["versions"]) == 4
        publish(open_bucket(url), first_weights(3), 1)
        assert wait_for(page, "versions", lambda versions: len(versions) == 2)["trouble"] == ""

    def test_a_damaged_run_is_an_error_at_startup(self, url: Path) -> None:
        (url / "run.json").write_bytes(b"nonsense")
        with pytest.raises(WeightwireError, match=r"run\.json: cannot be read"):
            PageServer(url, port=0)


class TestPorts:
    def test_a_port_in_use_is_an_error(self, url: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as other:
            port = other.getsockname()[1]
            with pytest.raises(CannotListen, match=f"127.0.0.1:{port}: the port is in use by another program"):
                PageServer(url, port=port)

    def test_the_default_port_moves_on_if_it_is_in_use(self, url: Path) -> None:
        with PageServer(url) as first, PageServer(url) as second:
            ports = [int(page.address.rstrip("/").rpartition(":")[2]) for page in (first, second)]
        # Not in this order: another program may have left a port meanwhile.
        assert ports[0] != ports[1]
        assert all(PORT <= port < PORT + 20 for port in ports)

    @pytest.mark.parametrize("host", ["no.such.host.invalid", "203.0.113.7", "a" * 300])
    def test_a_foreign_address_is_an_error(self, url: Path, host: str) -> None:
        with pytest.raises(CannotListen, match="cannot listen"):
            PageServer(url, host=host, port=0)

    def test_close_frees_the_port(self, url: Path) -> None:
        with PageServer(url, port=0) as page:
            port = int(page.address.rstrip("/").rpartition(":")[2])
        PageServer(url, port=port).close()
