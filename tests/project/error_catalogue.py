"""The error catalogue: provokes the errors of weightwire and writes them down in docs/errors.md.

    python tests/project/error_catalogue.py     # write docs/errors.md again after a message has changed

Every provocation in `tests/project/provocations/` makes one error happen for real. The catalogue also notes which calls
in the source made an error, and finds those that no provocation reached.
"""

from __future__ import annotations

import ast
import getpass
import importlib
import re
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).parent.parent.parent
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "tests"))

import pytest  # noqa: E402

from project.provocations.case import Case, Provocation  # noqa: E402
from weightwire import errors  # noqa: E402
from weightwire.errors import WeightwireError  # noqa: E402

PACKAGE = ROOT / "src" / "weightwire"
PAGE = ROOT / "docs" / "errors.md"
ROOMS = sorted(
    path.stem for path in (ROOT / "tests/project/provocations").glob("*.py") if path.stem not in ("case", "__init__")
)


@dataclass(frozen=True, order=True)
class Place:
    """A line of the package's source that took part in making an error."""

    file: str
    line: int


@dataclass(frozen=True)
class Provoked:
    """What one provocation raised."""

    name: str
    error: WeightwireError
    message: str
    hint: str


@dataclass(frozen=True)
class Site:
    """A call in the source that makes an error."""

    file: str
    function: str
    first: int
    last: int

    @property
    def name(self) -> str:
        return f"{self.file}: {self.function}"


# --- provoking ---------------------------------------------------------------------------------------------------


class Catalogue:
    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        self.provoked: list[Provoked] = []
        self.silent: list[str] = []  # provocations that raised no WeightwireError
        self.places: set[Place] = set()

    def collect(self) -> None:
        with self._noting_places():
            for room in ROOMS:
                module = importlib.import_module(f"project.provocations.{room}")
                for number, provocation in enumerate(module.PROVOCATIONS):
                    self._provoke(f"{room}[{number}]", provocation)

    def _provoke(self, name: str, provocation: Provocation) -> None:
        here = Path(tempfile.mkdtemp(dir=self._directory))
        with pytest.MonkeyPatch.context() as patch:
            try:
                provocation(Case(here, patch))
            except WeightwireError as error:
                message, hint = (normalised(text or "", here) for text in (error.message, error.hint))
                self.provoked.append(Provoked(name, error, message, hint))
            except Exception as error:
                self.silent.append(f"{name}: {type(error).__name__}: {error}")
            else:
                self.silent.append(f"{name}: nothing was raised")

    @contextmanager
    def _noting_places(self) -> Iterator[None]:
        make = WeightwireError.__init__

        def noting(error: WeightwireError, message: str, *, hint: str | None = None) -> None:
            with self._lock:
                self.places.update(_places(sys._getframe(1)))
            make(error, message, hint=hint)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(WeightwireError, "__init__", noting)
            yield

    def unprovoked(self) -> list[Site]:
        """The calls that make an error and that no provocation reached."""
        reached: dict[str, set[int]] = {}
        for place in self.places:
            reached.setdefault(place.file, set()).add(place.line)
        return [site for site in sites() if not reached.get(site.file, set()) & {*range(site.first, site.last + 1)}]


def _places(frame: FrameType | None) -> Iterator[Place]:
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(PACKAGE):
            yield Place(path.relative_to(PACKAGE).as_posix(), frame.f_lineno)
        frame = frame.f_back


# Parts of a message that differ from machine to machine or from run to run.
_VARYING = [
    (r"http://127\.0\.0\.1:\d+", "http://127.0.0.1:8000"),
    (r"\b127\.0\.0\.1:\d+", "127.0.0.1:8000"),
    (r"memory://[a-z]+-[0-9a-f]{32}", "memory://bucket"),
    (r"\b[\d,]+ (bytes )?are free", r"1,000 \1are free"),
    (r"only \d+ MiB are free", "only 100 MiB are free"),
    (r"weightwire-\d+-\d+", "weightwire-1000-8000"),
    (r"/works/[0-9a-f]{8}\b", "/works/1234abcd"),
    (r"0x[0-9a-f]+", "0x1234"),
]


def normalised(text: str, here: Path) -> str:
    """A text without what is different on every machine."""
    text = text.replace(str(here), "/data").replace(str(ROOT), "/weightwire").replace(str(Path.home()), "~")
    text = text.replace(f"on {socket.gethostname()}", "on HOST").replace(f"({getpass.getuser()})", "(USER)")
    for pattern, replacement in _VARYING:
        text = re.sub(pattern, replacement, text)
    # Hashes and run ids. Two that differ still differ.
    seen: list[str] = []
    for found in re.findall(r"\b(?:[0-9a-f]{64}|[0-9a-f]{32}|[0-9a-f]{16}|[0-9a-f]{12})\b", text):
        if found not in seen:
            text = text.replace(found, "abcdef"[len(seen)] * len(found))
            seen.append(found)
    return text


# --- the source --------------------------------------------------------------------------------------------------


# Functions that make or raise the error for a text they are given.
_HELPERS = {"_refuse", "corrupt", "fail", "refuse", "rolled_back"}


@cache
def error_names() -> frozenset[str]:
    """The error classes of the package, by name, wherever they are. Read from the source, so that it does not matter
    what has been imported."""
    bases = {
        node.name: {base.id for base in node.bases if isinstance(base, ast.Name)}
        for tree in _sources().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    found = {WeightwireError.__name__}
    while more := {name for name, above in bases.items() if above & found} - found:
        found |= more
    return frozenset(found)


@cache
def _sources() -> dict[str, ast.Module]:
    """The parsed modules of the package, by path."""
    paths = sorted(PACKAGE.rglob("*.py"))
    return {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text(encoding="utf-8")) for path in paths}


@cache
def sites() -> Sequence[Site]:
    """Every call that makes an error: of an error class, or of a function that makes one."""
    return [
        Site(file, function, call.lineno, call.end_lineno or call.lineno)
        for file, tree in _sources().items()
        if file != "errors.py"
        for function, call in _calls(tree, "")
        if _makes_error(call)
    ]


def _calls(node: ast.AST, function: str) -> Iterator[tuple[str, ast.Call]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _calls(child, f"{function}.{child.name}".lstrip("."))
            continue
        if isinstance(child, ast.Call):
            yield function, child
        yield from _calls(child, function)


def _makes_error(call: ast.Call) -> bool:
    name = call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")
    if name == "at" and isinstance(call.func, ast.Attribute):  # NotFound.at(...)
        name = getattr(call.func.value, "id", "")
    if name in _HELPERS:
        return any(isinstance(argument, ast.JoinedStr | ast.Constant) for argument in call.args)
    takes_hint = any(keyword.arg == "hint" for keyword in call.keywords)
    return name in error_names() or (takes_hint and name in ("error", "reworded", ""))


# --- the page ----------------------------------------------------------------------------------------------------

_INTRODUCTION = """\
# Error messages

Every error has a code, a message and a hint. This page lists the messages by code.
[Troubleshooting](troubleshooting.md) explains each code. The tests provoke every error on this page and compare the
texts. `python tests/project/error_catalogue.py` writes the page again.
"""


def page(provoked: Sequence[Provoked]) -> str:
    """docs/errors.md."""
    classes = [getattr(errors, name) for name in errors.__all__]
    sections = [_INTRODUCTION]
    for kind in sorted(classes, key=lambda kind: str(kind.code)):
        texts = sorted({(one.message, one.hint) for one in provoked if one.error.code == kind.code})
        if texts:
            shown = [f"{message}\nhint: {hint}" if hint else message for message, hint in texts]
            body = "\n\n".join(shown)
            sections.append(f"## {kind.code}\n\n`{kind.__name__}`: {_summary(kind)}\n\n```text\n{body}\n```\n")
    return "\n".join(sections)


def _summary(kind: type[WeightwireError]) -> str:
    return " ".join((kind.__doc__ or "").split())


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        catalogue = Catalogue(Path(directory))
        catalogue.collect()
    PAGE.write_text(page(catalogue.provoked), encoding="utf-8")
    missed = catalogue.unprovoked()
    print(f"{len(catalogue.provoked)} errors provoked; {len(sites()) - len(missed)} of {len(sites())} calls reached")
    for problem in [*catalogue.silent, *(f"{site.file}:{site.first}: not reached" for site in missed)]:
        print(problem)


if __name__ == "__main__":
    main()
