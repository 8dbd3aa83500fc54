"""The house rules that a machine can check."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PACKAGE = ROOT / "src" / "weightwire"
MODULES = sorted(PACKAGE.rglob("*.py"))

# A module or folder imports only from those before it, `weightwire/__init__.py` from all but the last two.
ORDER = [
    "errors",
    "telemetry",
    "system",
    "weights",
    "codec",
    "delta",
    "bucket",
    "chain",
    "catchup",
    "publisher",
    "replica",
    "follower",
    "upkeep",
    "inspection",
    "engines",
    "trainers",
    "server",
    "page",
    "demo",
    "__init__",
    "testing",
    "cli",
    "__main__",
]

# Pairs that do not know each other although the order would let them.
STRANGERS = {("follower", "publisher"), ("replica", "bucket"), ("replica", "publisher")} | {
    ("bucket", room) for room in ("weights", "codec", "delta")
}

# The only ones that may import torch; the core must work where it is not installed.
TORCH = {"engines", "server", "trainers"}

# Slow to import, and not needed to diff, patch or follow.
HEAVY = {
    "httpx",
    "huggingface_hub",
    "ml_dtypes",
    "obstore",
    "plotly",
    "prometheus_client",
    "pytest",
    "rich",
    "safetensors",
    "starlette",
    "torch",
    "transformers",
    "typer",
    "uvicorn",
    "vllm",
}


def part(path: Path) -> str:
    """The entry of ORDER that a file belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[str]:
    """The full name of everything a file imports, wherever in the file."""
    package = ("weightwire", *path.relative_to(PACKAGE).parent.parts)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join((*parents, *([node.module] if node.module else [])))
            yield from (f"{base}.{alias.name}" for alias in node.names)


def parts_imported(path: Path) -> set[str]:
    """What `imports` says, as entries of ORDER; a plain name of the package comes from its `__init__`."""
    names = [name.split(".") for name in imports(path)]
    inside = {name[1] if len(name) > 1 else "__init__" for name in names if name[0] == "weightwire"}
    return {name if name in ORDER else "__init__" for name in inside}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
class TestModule:
    def test_has_its_place_in_the_order(self, path: Path) -> None:
        assert part(path) in ORDER, "add the new module to ORDER, after everything it imports"

    def test_imports_only_from_before_it(self, path: Path) -> None:
        own = ORDER.index(part(path))
        later = {other for other in parts_imported(path) if ORDER.index(other) > own}
        assert not later, f"{part(path)} must not import {sorted(later)}"

    def test_does_not_import_strangers(self, path: Path) -> None:
        assert not {(part(path), other) for other in parts_imported(path)} & STRANGERS

    def test_imports_torch_only_at_the_edge(self, path: Path) -> None:
        assert part(path) in TORCH or "torch" not in {name.split(".")[0] for name in imports(path)}

    def test_has_at_most_500_lines(self, path: Path) -> None:
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 500

    def test_says_what_it_knows(self, path: Path) -> None:
        assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))


def test_nothing_is_called_utils() -> None:
    found = [path for path in PACKAGE.rglob("*") if path.stem.strip("_") in {"util", "utils", "helpers", "misc"}]
    assert not found


@pytest.mark.parametrize(
    "statement",
    ["import weightwire.engines", "from weightwire.engines.vllm import oldest_version, served_version"],
)
def test_engines_are_found_without_importing_torch_or_vllm(statement: str) -> None:
    code = f"import sys; {statement}; print(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    assert not HEAVY & set(subprocess.check_output([sys.executable, "-c", code], text=True).split())


def test_importing_weightwire_is_cheap() -> None:
    code = (
        "import sys, time; start = time.perf_counter(); import weightwire;"
        "print(time.perf_counter() - start, *sorted({name.split('.')[0] for name in sys.modules}))"
    )
    runs = [subprocess.check_output([sys.executable, "-c", code], text=True).split() for _ in range(3)]

    assert not HEAVY & set(runs[0])
    # Ten times what it takes, in the best of three: only a new heavy import can miss that.
    assert min(float(seconds) for seconds, *_ in runs) < 2
