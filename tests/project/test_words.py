"""Phrases that we kept writing and that readers stumble over stay out of every text in the repository."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent

# Written in pieces, so that this file passes its own test.
STUMBLING_BLOCKS = re.compile(
    "|".join(("is n" + "o ", r"\bane" + r"w\b", "all the sa" + "me", r"\b(?:to|for|of) wh" + "o(?!le)")), re.IGNORECASE
)
# The name of a test begins with its subject: it must read without the name of its class.
WITHOUT_A_SUBJECT = re.compile("test_(?:of|that|is|are|but|with|in|to|by|as)_")
TEXTS = {".c", ".cfg", ".css", ".h", ".html", ".in", ".js", ".md", ".py", ".svg", ".toml", ".txt", ".yaml", ".yml", ""}


def texts() -> list[Path]:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.check_output(command, cwd=ROOT, text=True).split("\0")
    found = [ROOT / name for name in names if name and not name.startswith(("tests/golden/", "tests/hostile/"))]
    return [path for path in found if path.suffix in TEXTS and path.is_file() and path.name != "LICENSE"]


def test_no_text_contains_a_stumbling_block() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in texts()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if STUMBLING_BLOCKS.search(line)
    ]
    assert found == []


@pytest.mark.parametrize("text", ["this is n" + "o word", "ane" + "w", "All the sa" + "me", "of wh" + "om"])
def test_each_stumbling_block_is_found(text: str) -> None:
    assert STUMBLING_BLOCKS.search(text)


def complaints(source: str) -> list[str]:
    """Names of tests without a subject, and docstrings that begin in the middle of a sentence."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and WITHOUT_A_SUBJECT.match(node.name):
            found.append(node.name)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node) or ""
            found += [text] if text.startswith("That ") else []
    return found


def test_every_test_name_and_docstring_stands_alone() -> None:
    sources = [path for path in texts() if path.suffix == ".py" and path.is_relative_to(ROOT / "tests")]
    found = {str(path.relative_to(ROOT)): complaints(path.read_text(encoding="utf-8")) for path in sources}
    assert not {path: wrong for path, wrong in found.items() if wrong}


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("class TestNames:\n    def test_of_a_module_are_short(self) -> None: ...", "test_of_a_module_are_short"),
        ("async def test_in_a_directory() -> None: ...", "test_in_a_directory"),
        ("def check() -> None:\n    'That it holds.'", "That it holds."),
        ("def test_inference_tensors_are_read() -> None:\n    'Thatched.'", None),
    ],
)
def test_names_and_docstrings_that_do_not_stand_alone_are_found(source: str, complaint: str | None) -> None:
    assert complaints(source) == ([complaint] if complaint else [])
