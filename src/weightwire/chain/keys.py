"""Ed25519 keys: how they are made, read from files and written as text."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from weightwire.errors import BadKey, MissingDependency, OutputError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

__all__ = [
    "KEY_VARIABLE",
    "TRUST_VARIABLE",
    "PrivateKey",
    "PublicKey",
    "read_private_key",
    "read_public_keys",
    "read_trusted_keys",
    "trusted_texts",
]

KEY_VARIABLE = "WEIGHTWIRE_KEY"
"""Environment variable: the private key of a publisher, as a file or as PEM text."""

TRUST_VARIABLE = "WEIGHTWIRE_TRUST"
"""Environment variable: the public keys that a reader trusts, or their files, separated by spaces or commas."""

_PREFIX = "ed25519:"
_TEXT = re.compile(r"(?:ed25519:)?([0-9a-f]{64})")
_PEM = "-----BEGIN"
_BARE_KEY = re.compile(r"[0-9A-Za-z+/=]{43,}")  # 32 bytes or more in base64 or hex
_LARGEST = 1 << 16  # bytes of a key file
_MAKE = "`weightwire keygen FILE` makes one"


@dataclass(frozen=True)
class PublicKey:
    """`hex` is how records name it; `str()` is how people see it."""

    hex: str

    def __str__(self) -> str:
        return f"{_PREFIX}{self.hex}"

    @property
    def short(self) -> str:
        return f"{_PREFIX}{self.hex[:12]}"

    def verifies(self, message: bytes, signature: str) -> bool:
        """Whether the signature, in hex, is one of this key over the message."""
        ed25519 = _ed25519()
        from cryptography.exceptions import InvalidSignature

        try:
            ed25519.Ed25519PublicKey.from_public_bytes(bytes.fromhex(self.hex)).verify(
                bytes.fromhex(signature), message
            )
        except (InvalidSignature, ValueError):
            return False
        return True


class PrivateKey:
    """Signs for a publisher. Its text form is PEM (PKCS8), as OpenSSL writes it."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        """Use `generate` or `read_private_key`."""
        self._key = key
        self.public = PublicKey(key.public_key().public_bytes_raw().hex())

    @classmethod
    def generate(cls) -> PrivateKey:
        return cls(_ed25519().Ed25519PrivateKey.generate())

    @classmethod
    def from_pem(cls, pem: bytes, where: str) -> PrivateKey:
        ed25519 = _ed25519()
        from cryptography.exceptions import InternalError, UnsupportedAlgorithm
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        try:
            key = load_pem_private_key(pem, password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm, InternalError) as problem:
            # The library's text may quote the file, so it is left out.
            encrypted = isinstance(problem, TypeError)
            why = "is encrypted" if encrypted else "is not a private key in PEM format"
            raise BadKey(f"{where}: {why}", hint="decrypt it with openssl" if encrypted else _MAKE) from None
        if not isinstance(key, ed25519.Ed25519PrivateKey):
            raise BadKey(f"{where}: is not an Ed25519 key", hint=_MAKE)
        return cls(key)

    def sign(self, message: bytes) -> str:
        return self._key.sign(message).hex()

    def write(self, path: Path) -> None:
        """Writes the private key to a new file that only its owner can read, and the public key beside it."""
        from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

        pem = self._key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        for place, data, mode in ((path, pem, 0o600), (public_path(path), f"{self.public}\n".encode(), 0o644)):
            try:
                with open(os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
                    file.write(data)
            except FileExistsError as problem:
                raise OutputError(
                    f"{place}: exists already", hint="choose another name: keys are not overwritten"
                ) from problem
            except OSError as problem:
                raise OutputError(
                    f"{place}: cannot be written ({problem.strerror})", hint="check the path"
                ) from problem


def public_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.pub")


def read_private_key(given: str | os.PathLike[str] | PrivateKey | None) -> PrivateKey | None:
    """The key in a file or in PEM text; by default that of WEIGHTWIRE_KEY, if it is set."""
    if isinstance(given, PrivateKey):
        return given
    where = KEY_VARIABLE if given is None else "key"
    text = os.environ.get(KEY_VARIABLE) if given is None else os.fspath(given)
    if not text:
        return None
    if text.lstrip().startswith(_PEM):
        return PrivateKey.from_pem(text.encode(), where)
    return PrivateKey.from_pem(_read(text), text)


def read_public_keys(texts: Iterable[str]) -> frozenset[str]:
    """The keys in these texts or files, as hex."""
    return frozenset(key.hex for text in texts for key in _public_keys(text))


def read_trusted_keys(given: Iterable[str | os.PathLike[str]] | None) -> frozenset[str]:
    """The keys that were given as trusted, as hex; by default those of WEIGHTWIRE_TRUST."""
    return read_public_keys(trusted_texts(given))


def trusted_texts(given: Iterable[str | os.PathLike[str]] | None) -> list[str]:
    """What was given as trusted; by default the words of WEIGHTWIRE_TRUST. To trust nothing is an error: an empty
    variable in a script must not mean that everybody is trusted."""
    if given is None and TRUST_VARIABLE not in os.environ:
        return []
    words = os.environ[TRUST_VARIABLE].replace(",", " ").split() if given is None else given
    texts = [os.fspath(one) for one in words]
    if not texts or not all(texts):
        where = TRUST_VARIABLE if given is None else "'trust'"
        raise BadKey(f"{where} names no key", hint="pass a public key or its file; to trust everybody, leave it out")
    return texts


def _public_keys(text: str) -> Iterator[PublicKey]:
    if matched := _TEXT.fullmatch(text):
        yield PublicKey(matched[1])
        return
    if text.lstrip().startswith(_PEM):
        raise BadKey("the key to trust is a private key", hint="pass the public key, which keygen wrote to FILE.pub")
    lines = _read(text).decode(errors="replace").split("\n")
    found = [line for line in (line.partition("#")[0].strip() for line in lines) if line]
    if not found:
        raise BadKey(f"{text}: has no public key", hint="each line must be ed25519: and 64 hex digits")
    for line in found:
        if line.startswith(_PEM):
            raise BadKey(f"{text}: is a private key", hint=f"trust its public key: {public_path(Path(text))}")
        matched = _TEXT.fullmatch(line)
        if matched is None:
            raise BadKey(f"{text}: is not a file of public keys", hint="each line must be ed25519: and 64 hex digits")
        yield PublicKey(matched[1])


def _read(text: str) -> bytes:
    """Reads the file of this path. If there is none, the text may be a bare private key, which no error repeats."""
    try:
        with Path(text).open("rb") as file:
            return file.read(_LARGEST)
    except (OSError, ValueError) as problem:
        why = problem.strerror if isinstance(problem, OSError) else "not a path"
        shown = "the file of the key" if "\n" in text or _BARE_KEY.fullmatch(text) else text
        raise BadKey(f"{shown}: cannot be read ({why})", hint=f"check the path; {_MAKE}") from None


def _ed25519() -> ModuleType:
    """The module, imported only where keys are used."""
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as problem:
        raise MissingDependency(
            "signatures need the package 'cryptography', which is not installed", hint="pip install cryptography"
        ) from problem
    return ed25519
