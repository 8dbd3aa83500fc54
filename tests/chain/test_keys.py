"""Keys are made, written and read; anything that is not a key is one clear error without its content."""

from __future__ import annotations

import stat
import subprocess
from pathlib import Path

import pytest

from weightwire.chain.keys import PrivateKey, PublicKey, read_private_key, read_trusted_keys
from weightwire.errors import BadKey, OutputError

# The library raises an InternalError for it.
SHORT_X25519 = """\
-----BEGIN PRIVATE KEY-----
MC4CAQAwBQYDK2VvBCIEIAABAgMEBQYHCAkKCwwNDgQ8ERITFBUWGxgZGhscHR4f
-----END PRIVATE KEY-----
"""


@pytest.fixture
def key() -> PrivateKey:
    return PrivateKey.generate()


def test_a_written_key_is_private_and_reads_back(key: PrivateKey, tmp_path: Path) -> None:
    path = tmp_path / "trainer"
    key.write(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    read = read_private_key(path)
    assert read is not None
    assert read.public == key.public
    assert read_trusted_keys([tmp_path / "trainer.pub"]) == {key.public.hex}


def test_a_key_is_never_overwritten(key: PrivateKey, tmp_path: Path) -> None:
    key.write(tmp_path / "trainer")
    before = (tmp_path / "trainer").read_bytes()
    with pytest.raises(OutputError, match="exists already"):
        PrivateKey.generate().write(tmp_path / "trainer")
    assert (tmp_path / "trainer").read_bytes() == before


def test_keys_come_from_the_environment(key: PrivateKey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trainer"
    key.write(path)
    for given in (str(path), path.read_text()):
        monkeypatch.setenv("WEIGHTWIRE_KEY", given)
        read = read_private_key(None)
        assert read is not None
        assert read.public == key.public
    other = PrivateKey.generate().public
    monkeypatch.setenv("WEIGHTWIRE_TRUST", f"{path}.pub, {other}")
    assert read_trusted_keys(None) == {key.public.hex, other.hex}


@pytest.mark.parametrize("given", [[], [""], ["ed25519:" + "ab" * 32, ""]])
def test_trust_that_names_no_key_is_an_error(given: list[str]) -> None:
    """An empty variable in a script must not mean that everybody is trusted."""
    with pytest.raises(BadKey, match="'trust' names no key"):
        read_trusted_keys(given)


@pytest.mark.parametrize("text", ["", " ", ","])
def test_an_empty_variable_is_an_error(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTWIRE_TRUST", text)
    with pytest.raises(BadKey, match="WEIGHTWIRE_TRUST names no key"):
        read_trusted_keys(None)


def test_without_a_variable_there_is_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WEIGHTWIRE_KEY", "WEIGHTWIRE_TRUST"):
        monkeypatch.delenv(name, raising=False)
    assert read_private_key(None) is None
    assert read_trusted_keys(None) == frozenset()


def test_a_file_may_hold_several_keys_and_comments(key: PrivateKey, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"# trainers\n{key.public}  # the first\n\n{'ab' * 32}\n")
    assert read_trusted_keys([path]) == {key.public.hex, "ab" * 32}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is not a private key"),
        ("ed25519:" + "ab" * 32, "is not a private key"),
        ("-----BEGIN PRIVATE KEY-----\nc2VjcmV0\n-----END PRIVATE KEY-----\n", "is not a private key"),
        (SHORT_X25519, "is not a private key"),
    ],
)
def test_other_files_are_refused_as_private_keys(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text(content)
    with pytest.raises(BadKey, match=message) as caught:
        read_private_key(path)
    assert "c2VjcmV0" not in str(caught.value)


@pytest.mark.parametrize(
    ("algorithm", "message"), [("RSA", "is not an Ed25519 key"), ("X25519", "is not an Ed25519 key")]
)
def test_keys_of_other_algorithms_are_refused(algorithm: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "key"
    subprocess.run(["openssl", "genpkey", "-algorithm", algorithm, "-out", path], check=True, capture_output=True)
    with pytest.raises(BadKey, match=message):
        read_private_key(path)


def test_a_key_of_openssl_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "key"
    subprocess.run(["openssl", "genpkey", "-algorithm", "ED25519", "-out", path], check=True, capture_output=True)
    key = read_private_key(path)
    assert key is not None
    assert key.public.verifies(b"text", key.sign(b"text"))


def test_a_private_key_is_not_accepted_as_a_public_one(key: PrivateKey, tmp_path: Path) -> None:
    key.write(tmp_path / "trainer")
    with pytest.raises(BadKey, match="is a private key") as caught:
        read_trusted_keys([tmp_path / "trainer"])
    assert "trainer.pub" in str(caught.value.hint)


@pytest.mark.parametrize("text", ["", "# mine", "ed25519:12", "ed25519:" + "AB" * 32, "hello"])
def test_a_file_without_keys_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "keys.pub"
    path.write_text(text + "\n")
    with pytest.raises(BadKey, match=r"is not a file of public keys|has no public key"):
        read_trusted_keys([path])


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    for read in (lambda: read_private_key(tmp_path / "none"), lambda: read_trusted_keys([tmp_path / "none"])):
        with pytest.raises(BadKey, match="none: cannot be read"):
            read()


def test_a_private_key_in_place_of_a_path_is_not_repeated(key: PrivateKey, tmp_path: Path) -> None:
    key.write(tmp_path / "trainer")
    pem = (tmp_path / "trainer").read_text()
    secret, without_begin = pem.splitlines()[1], pem.partition("\n")[2]
    for read, text in (
        (read_private_key, secret),
        (read_private_key, without_begin),
        (lambda text: read_trusted_keys([text]), secret),
        (lambda text: read_trusted_keys([text]), without_begin),
        (lambda text: read_trusted_keys([text]), pem),
    ):
        with pytest.raises(BadKey) as caught:
            read(text)
        assert secret not in f"{caught.value} {caught.value.hint}"


@pytest.mark.parametrize("text", ["a\0b", "x" * 5000])
def test_a_text_that_is_no_path_is_a_bad_key(text: str) -> None:
    for read in (read_private_key, lambda text: read_trusted_keys([text])):
        with pytest.raises(BadKey, match="cannot be read"):
            read(text)


def test_only_the_signature_of_the_key_over_the_message_counts(key: PrivateKey) -> None:
    signature = key.sign(b"message")
    assert key.public.verifies(b"message", signature)
    assert not key.public.verifies(b"massage", signature)
    assert not PrivateKey.generate().public.verifies(b"message", signature)
    assert not key.public.verifies(b"message", "00" * 64)
    assert not PublicKey("ff" * 32).verifies(b"message", signature)


def test_a_private_key_does_not_show_itself(key: PrivateKey, tmp_path: Path) -> None:
    key.write(tmp_path / "trainer")
    secret = (tmp_path / "trainer").read_text().splitlines()[1]
    assert secret not in f"{key!r} {key} {vars(key)}"
