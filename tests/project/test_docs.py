"""README.md, docs/ and deploy/: every code block is run by a test, and every link leads somewhere."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from support import cli_page
from support.doc_pages import PAGES, ROOT, CodeBlock, read_page

INSTALLS = "installs packages from an index"
DOCKER = "needs Docker"
EXCERPT = "an excerpt of a command that tests/project/test_docs_first_run.py runs"
HUB = "needs an account on the Hugging Face Hub"
RECORDINGS = "takes minutes and 14 GB of memory; tests/project/test_benchmarks.py runs the same scripts on small data"

# Blocks that no test runs, and why.
NOT_RUN = {
    ("README.md", "The demo"): "`make demo` installs everything; tests/cli/demo runs the demo",
    ("docs/install.md", "From a clone"): INSTALLS,
    ("docs/first-run.md", "The demo"): "`make demo` installs everything; tests/cli/demo runs the demo",
    ("docs/buckets.md", "The Hub's S3 gateway"): HUB,
    ("docs/performance.md", "Reproduce the numbers"): RECORDINGS,
    ("deploy/environment/README.md", "The Wordle environment"): EXCERPT,
    ("deploy/environment/README.md", "Docker"): DOCKER,
    ("deploy/environment/README.md", "A Space"): HUB,
    ("deploy/rollout/README.md", "Docker"): DOCKER,
    ("deploy/rollout/README.md", "A Space"): HUB,
}


@cache
def claims() -> set[tuple[str, str, str]]:
    """Page, heading and language of every `blocks("page", "heading", "language")` in the tests."""
    found = set()
    sources = (path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py"))
    for source in (one for one in sources if "blocks(" in one):
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "blocks" and len(node.args) > 1:
                [page, *_], headings, [language, *_] = (*map(_strings, node.args), ["sh"])[:3]
                found |= {(page, heading, language) for heading in headings}
    return found


def _strings(node: ast.expr) -> list[str]:
    return [one.value for one in ast.walk(node) if isinstance(one, ast.Constant) and isinstance(one.value, str)]


def is_run(block: CodeBlock) -> bool:
    return (block.page, block.heading, block.language) in claims()


@pytest.mark.parametrize("page", PAGES)
def test_every_code_block_is_run_by_a_test(page: str) -> None:
    for block in read_page(page):
        if block.language in ("sh", "python", "bash", "console"):
            reason = NOT_RUN.get((page, block.heading))
            assert is_run(block) or reason, f"{page}: no test runs the {block.language} block below {block.heading!r}"


def test_every_block_that_is_not_run_exists() -> None:
    headings = {(page, block.heading) for page in PAGES for block in read_page(page)}
    assert not NOT_RUN.keys() - headings


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_to_an_existing_target(page: str) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", (ROOT / page).read_text(encoding="utf-8")):
        if target.startswith(("https://", "http://")):
            continue
        name, _, anchor = target.partition("#")
        path = (ROOT / page).parent / name if name else ROOT / page
        assert path.exists(), target
        assert not anchor or anchor in anchors_of(path), target


def anchors_of(path: Path) -> list[str]:
    """The anchors that GitHub gives to the headings of a page."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    return [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]


def test_the_command_reference_is_generated_from_the_help() -> None:
    rewrite = "PYTHONPATH=tests python -m support.cli_page"
    assert cli_page.PAGE.read_text(encoding="utf-8") == cli_page.render(), (
        f"docs/cli.md is out of date: run `{rewrite}`"
    )
