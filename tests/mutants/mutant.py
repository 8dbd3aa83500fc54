"""A mutant: a small wrong version of the source, which tests must notice."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent.parent / "src"


class Rotten(Exception):
    """A mutant that no longer fits the source: rewrite it."""


@dataclass(frozen=True)
class Edit:
    """Replaces a text that occurs exactly once in a file of the package."""

    file: str
    old: str
    new: str

    def made(self, text: str) -> str:
        if text.count(self.old) != 1:
            raise Rotten(f"{self.file}: the text occurs {text.count(self.old)} times: {self.old!r}")
        return text.replace(self.old, self.new)


@dataclass(frozen=True)
class Mutant:
    """`rule` is the rule that it breaks. `tests` are those of the rooms that should notice."""

    name: str
    rule: str
    edits: tuple[Edit, ...]
    tests: tuple[str, ...]

    def patched(self, source: Path = SOURCE) -> dict[str, str]:
        """The changed files. Raises Rotten or SyntaxError if an edit no longer fits."""
        files: dict[str, str] = {}
        for edit in self.edits:
            path = source / "weightwire" / edit.file
            files[edit.file] = edit.made(files.get(edit.file) or path.read_text(encoding="utf-8"))
        for name, text in files.items():
            ast.parse(text, name)
        return files

    def apply(self, source: Path) -> None:
        for name, text in self.patched(source).items():
            (source / "weightwire" / name).write_text(text, encoding="utf-8")


def mutant(name: str, rule: str, tests: str, *edits: tuple[str, str, str]) -> Mutant:
    return Mutant(name, rule, tuple(Edit(*edit) for edit in edits), tuple(f"tests/{one}" for one in tests.split()))
