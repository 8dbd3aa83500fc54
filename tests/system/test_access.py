"""Who may use a server: tokens, Host and Origin headers."""

from __future__ import annotations

from base64 import b64encode
from pathlib import Path

import pytest

from weightwire.errors import CannotListen
from weightwire.system.access import Access, Guard, is_local_request, name_in, read_token

TOKEN = "0123456789abcdef-secret"


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("localhost", "localhost"),
        ("LocalHost:8000", "localhost"),
        ("127.0.0.1:", "127.0.0.1"),
        ("[::1]:8000", "::1"),
        ("[::1]evil", ""),
        ("localhost:evil", ""),
        ("localhost:\u0661", ""),
        ("::1", ""),
        ("", ""),
    ],
)
def test_host_name_is_read_from_a_host_header(host: str, name: str) -> None:
    assert name_in(host) == name


@pytest.mark.parametrize("header", ["localhost", "127.0.0.1:80", "127.8.9.1", "[::1]:80", "BOX.example:80"])
def test_local_request_names_this_machine(header: str) -> None:
    assert is_local_request([header], "box.example")


@pytest.mark.parametrize("header", ["", "evil.example", "127.0.0.1.evil.example", "10.0.0.1", "[::1]evil"])
def test_other_names_are_foreign(header: str) -> None:
    assert not is_local_request([header], "box.example")


@pytest.mark.parametrize("headers", [[], ["localhost", "localhost"], ["localhost", "evil.example"]])
def test_request_without_exactly_one_host_is_foreign(headers: list[str]) -> None:
    assert not is_local_request(headers, "box.example")


def status(guard: Guard, **headers: str | list[str]) -> int:
    """The status of a request with these headers: 200 if the guard lets it through."""

    def values(name: str) -> list[str]:
        found = headers.get(name, [])
        return [found] if isinstance(found, str) else found

    turned = guard.turned(values)
    return 200 if turned is None else turned.status


def basic(password: str) -> str:
    return "Basic " + b64encode(f"anyone:{password}".encode()).decode()


class TestToken:
    def test_token_comes_from_the_file_before_the_environment(self, tmp_path: Path) -> None:
        (tmp_path / "token").write_text(f"{TOKEN}\n")
        variables = {"WEIGHTWIRE_TOKEN": "f" * 32}
        assert read_token(tmp_path / "token", variables) == TOKEN
        assert read_token(None, variables) == "f" * 32

    @pytest.mark.parametrize("variables", [{}, {"WEIGHTWIRE_TOKEN": ""}, {"WEIGHTWIRE_TOKEN": " \n"}])
    def test_empty_variable_counts_as_unset(self, variables: dict[str, str]) -> None:
        assert read_token(None, variables) is None

    @pytest.mark.parametrize(
        "text", ["", "short-secret", f"{TOKEN} {TOKEN}", TOKEN + "\u00e9", "x" * 2000, f"{TOKEN}\n{TOKEN}"]
    )
    def test_invalid_token_is_refused_and_not_repeated(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "token").write_text(text, encoding="utf-8")
        with pytest.raises(CannotListen, match="token: not a valid token") as caught:
            read_token(tmp_path / "token")
        assert "secret" not in str(caught.value)

    def test_unreadable_file_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(CannotListen, match="cannot read the token"):
            read_token(tmp_path / "missing")

    def test_representation_hides_the_token(self) -> None:
        assert "secret" not in repr(Access(TOKEN))


class TestWithToken:
    @pytest.mark.parametrize("place", ["127.0.0.1", "0.0.0.0"])
    def test_bearer_token_is_required_everywhere(self, place: str) -> None:
        guard = Guard(Access(TOKEN, insecure=True), place, place)
        assert status(guard, Host="localhost") == 401
        assert status(guard, Authorization=f"Bearer {TOKEN}", Host="evil.example", Origin="null") == 200
        assert status(guard, Authorization=f"bearer  {TOKEN} ") == 200

    @pytest.mark.parametrize(
        "value",
        ["", "Bearer", f"Bearer {TOKEN}x", f"Bearer {TOKEN[:-1]}", f"Bearer {TOKEN.upper()}", TOKEN, f"Digest {TOKEN}"],
    )
    def test_other_credentials_are_refused(self, value: str) -> None:
        assert status(Guard(Access(TOKEN), "0.0.0.0", "0.0.0.0", browser=True), Authorization=value) == 401

    def test_repeated_header_is_refused(self) -> None:
        both = [f"Bearer {TOKEN}", "Bearer other"]
        assert status(Guard(Access(TOKEN), "0.0.0.0", "0.0.0.0"), Authorization=both) == 401

    def test_password_counts_only_for_browsers(self) -> None:
        assert status(Guard(Access(TOKEN), "h", "0.0.0.0", browser=True), Authorization=basic(TOKEN)) == 200
        assert status(Guard(Access(TOKEN), "h", "0.0.0.0", browser=True), Authorization=basic(TOKEN + "x")) == 401
        assert status(Guard(Access(TOKEN), "h", "0.0.0.0", browser=True), Authorization="Basic ?") == 401
        assert status(Guard(Access(TOKEN), "h", "0.0.0.0"), Authorization=basic(TOKEN)) == 401


class TestWithoutToken:
    @pytest.mark.parametrize("place", ["0.0.0.0", "::", "10.0.0.1", "192.0.2.1", "::ffff:10.0.0.1"])
    def test_server_stays_on_this_machine(self, place: str) -> None:
        with pytest.raises(CannotListen, match="box: cannot listen beyond this machine without a token") as caught:
            Guard(Access(), "box", place)
        hint = caught.value.hint or ""
        assert all(word in hint for word in ("WEIGHTWIRE_TOKEN", "--token-file", "127.0.0.1", "--insecure"))

    def test_insecure_admits_everyone(self) -> None:
        assert status(Guard(Access(insecure=True), "0.0.0.0", "0.0.0.0"), Host="box.example") == 200

    @pytest.mark.parametrize("place", ["127.0.0.1", "127.9.9.9", "::1"])
    def test_request_must_name_this_machine(self, place: str) -> None:
        for access in (Access(), Access(insecure=True)):
            guard = Guard(access, place, place)
            assert status(guard, Host="localhost:80") == 200
            assert status(guard, Host="evil.example") == 403
            assert status(guard) == 403

    @pytest.mark.parametrize(
        "origin", ["null", "http://evil.example", "http://localhost:81", "http://localhost", "localhost:80", ""]
    )
    def test_other_web_sites_are_refused(self, origin: str) -> None:
        guard = Guard(Access(), "127.0.0.1", "127.0.0.1")
        assert status(guard, Host="localhost:80", Origin=origin) == 403
        assert status(guard, Host="localhost:80", Origin="http://LOCALHOST:80") == 200
        assert status(guard, Host="localhost:80", Origin=["http://localhost:80", origin]) == 403
