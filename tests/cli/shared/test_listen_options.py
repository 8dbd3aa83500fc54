"""Who may use the server of a command: `--token-file`, WEIGHTWIRE_TOKEN and `--insecure`."""

from __future__ import annotations

import urllib.error
import urllib.request
from pathlib import Path

import pytest

from support.clocked_bucket import first_weights, publish
from support.commands import Running, weightwire
from weightwire.bucket.registry import open_bucket

TOKEN = "a-token-of-the-tests"


@pytest.fixture(autouse=True)
def _no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WEIGHTWIRE_TOKEN", raising=False)


@pytest.fixture
def url(tmp_path: Path) -> Path:
    publish(open_bucket(tmp_path / "run"), first_weights(), 1)
    return tmp_path / "run"


def status(address: str, path: str, token: str | None = None, method: str = "GET") -> int:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    try:
        with urllib.request.urlopen(
            urllib.request.Request(address + path, headers=headers, method=method), timeout=60
        ) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as problem:
        return problem.code


def follow(url: Path, *options: str | Path) -> tuple[str | Path, ...]:
    return "follow", url, "--into", url.parent / "replica", *options


def page(url: Path, *options: str | Path) -> tuple[str | Path, ...]:
    return "page", url, "--port", "0", "--no-open", *options


class TestRefusal:
    def test_follow_does_not_listen_beyond_this_machine_without_a_token(self, url: Path) -> None:
        weightwire(*follow(url, "--listen", "0.0.0.0:0")).check_failed("without a token", "--token-file", "--insecure")

    def test_page_does_not_listen_beyond_this_machine_without_a_token(self, url: Path) -> None:
        weightwire(*page(url, "--host", "0.0.0.0")).check_failed("without a token", "--token-file", "--insecure")

    def test_serve_does_not_listen_beyond_this_machine_without_a_token(self, url: Path, tmp_path: Path) -> None:
        (tmp_path / "model").mkdir()
        words = ("serve", tmp_path / "model", "--follow", url, "--host", "0.0.0.0", "--port", "0")
        weightwire(*words).check_failed("without a token", "--token-file", "--insecure")

    def test_invalid_token_is_refused_on_any_address(self, url: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("WEIGHTWIRE_TOKEN", "too-short")
        ran = weightwire(*page(url))
        ran.check_failed("WEIGHTWIRE_TOKEN: not a valid token")
        assert "too-short" not in ran.err

    @pytest.mark.parametrize("options", [["--insecure"], ["--token-file", "x"]])
    def test_follow_without_a_server_takes_no_token(self, url: Path, options: list[str]) -> None:
        ran = weightwire(*follow(url, "--once", *options))
        assert ran.code == 2
        assert f"{options[0]}: needs --listen" in ran.err

    @pytest.mark.parametrize("command", ["follow", "page", "serve"])
    def test_token_cannot_be_a_command_line_option(self, command: str) -> None:
        """Every user of the machine can see the command line."""
        ran = weightwire(command, "--token", TOKEN)
        assert ran.code == 2
        assert "No such option: --token" in ran.err


class TestToken:
    def test_page_asks_for_the_token_of_the_file(self, url: Path, tmp_path: Path) -> None:
        (tmp_path / "token").write_text(TOKEN + "\n")
        with Running(*page(url, "--host", "0.0.0.0", "--token-file", tmp_path / "token")) as running:
            port = running.wait_for("http://0.0.0.0:", stream="out").strip().rstrip("/").rpartition(":")[2]
            running.wait_for("the password is the token")
            address = f"http://127.0.0.1:{port}"
            assert [status(address, path) for path in ("/", "/run.json", "/page.js")] == [401] * 3
            assert [status(address, path, TOKEN) for path in ("/", "/run.json")] == [200] * 2

    def test_follow_asks_for_the_token_of_the_environment(self, url: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("WEIGHTWIRE_TOKEN", TOKEN)
        with Running(*follow(url, "--listen", "127.0.0.1:0")) as running:
            address = running.wait_for("listening on").split()[-1]
            assert status(address, "/wake", method="POST") == 401
            assert status(address, "/metrics", "b" * 32) == 401
            assert status(address, "/wake", TOKEN, method="POST") == 202
            assert status(address, "/metrics", TOKEN) == 200

    def test_insecure_server_admits_everyone(self, url: Path) -> None:
        with Running(*follow(url, "--listen", "0.0.0.0:0", "--insecure")) as running:
            port = running.wait_for("listening on").rpartition(":")[2].strip()
            assert status(f"http://127.0.0.1:{port}", "/metrics") == 200
