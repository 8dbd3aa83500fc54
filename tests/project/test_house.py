"""House rules: import order, front doors, names and sizes."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from project.front_doors import FRONT_DOORS

ROOT = Path(__file__).parent.parent.parent
PACKAGE = ROOT / "src" / "weightwire"
MODULES = sorted(PACKAGE.rglob("*.py"))
SOURCES = sorted(
    path
    for folder in ("src", "tests", "benchmarks", "examples", "deploy")
    for kind in ("*.py", "*.c", "*.h", "*.js")
    for path in (ROOT / folder).rglob(kind)
)

# A room imports only from rooms before it in this list.
ORDER = [
    "lazy_exports",
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

# Imports (importer, imported) that are forbidden although the order would allow them.
FORBIDDEN = {("follower", "publisher"), ("replica", "bucket"), ("replica", "publisher")} | {
    ("bucket", room) for room in ("weights", "codec", "delta")
}

# Modules beside the rooms.
FILES = {"errors", "lazy_exports"}

# Rooms whose modules are imported one by one, because each needs different packages, such as torch or starlette.
OPEN_ROOMS = {"engines", "trainers", "server", "page", "demo", "cli", "testing"}

# The only rooms that may import torch. The core must work without it.
TORCH = {"engines", "server", "trainers"}

# Packages that are slow to import and not needed to diff, patch or follow.
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

# Module names that may repeat, because both modules are about the same thing: a command and the code that it runs, a
# framework and its adapter, the registry of a room.
REPEATED_MODULES = {"gc", "page", "restore", "status", "verify", "demo", "torch", "publish", "registry", "keys"}

MOST_LINES = 500
MOST_FUNCTION_LINES = 40
MOST_ATTRIBUTES = 12
# docs/PROTOCOL.md decides the fields of a record, and the page those of a view.
WIDE = {"Commit", "RunView", "VersionView", "ReplicaView"}


def room_of(path: Path) -> str:
    """The entry of ORDER that a file belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def dotted(path: Path) -> str:
    return ".".join(("weightwire", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imports(path: Path) -> list[tuple[str, str]]:
    """The (module, name) pairs of all imports in a file, including those inside functions."""
    found: list[tuple[str, str]] = []
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found += ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: use absolute imports"
            found += ((node.module or "", alias.name) for alias in node.names)
    return found


def rooms_imported(path: Path) -> set[str]:
    """The entries of ORDER that a file imports. `from weightwire import x` counts as `__init__` unless x is a room."""
    inside = [(module, name) for module, name in imports(path) if module.split(".")[0] == "weightwire"]
    rooms = {module.split(".")[1] if "." in module else name for module, name in inside}
    return {room if room in ORDER else "__init__" for room in rooms}


def statements(tree: ast.Module) -> list[ast.stmt]:
    """The top-level statements of a module, without its docstring."""
    return tree.body[1:] if ast.get_docstring(tree) else tree.body


def at_fault(find: Callable[[Path], object]) -> dict[str, object]:
    """What a rule finds wrong, by module. A test per module and rule would be two thousand tests."""
    found = {path.relative_to(PACKAGE).as_posix(): find(path) for path in MODULES}
    return {name: problem for name, problem in found.items() if problem}


class TestModule:
    def test_room_of_every_module_is_in_the_order(self) -> None:
        strays = at_fault(lambda path: room_of(path) not in ORDER)
        assert not strays, "add the new room to ORDER, after everything it imports"

    def test_modules_import_only_from_rooms_before_their_own(self) -> None:
        def later(path: Path) -> set[str]:
            own = ORDER.index(room_of(path))
            return {other for other in rooms_imported(path) if ORDER.index(other) > own}

        assert not at_fault(later)

    def test_modules_do_not_import_forbidden_rooms(self) -> None:
        assert not at_fault(lambda path: {(room_of(path), other) for other in rooms_imported(path)} & FORBIDDEN)

    def test_modules_enter_other_rooms_through_their_front_doors(self) -> None:
        def past_the_door(path: Path) -> list[str]:
            found = []
            for module, name in imports(path):
                parts = module.split(".")
                if parts[0] != "weightwire" or len(parts) < 2 or parts[1] in (room_of(path), *FILES, *OPEN_ROOMS):
                    continue
                if len(parts) > 2:
                    found.append(f"import {name} from weightwire.{parts[1]}, not from {module}")
                elif name not in FRONT_DOORS[parts[1]]:
                    found.append(f"{module} does not export {name}")
            return found

        assert not at_fault(past_the_door)

    def test_modules_import_torch_only_in_rooms_that_may(self) -> None:
        def imports_torch(path: Path) -> bool:
            return "torch" in {module.split(".")[0] for module, _ in imports(path)}

        assert not at_fault(lambda path: room_of(path) not in TORCH and imports_torch(path))

    def test_modules_have_at_most_500_lines(self) -> None:
        sizes = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in MODULES}
        assert not at_fault(lambda path: sizes[path] if sizes[path] > MOST_LINES else 0)

    def test_modules_have_a_docstring(self) -> None:
        assert not at_fault(lambda path: not ast.get_docstring(parsed(path)))


def only_exports(node: ast.stmt) -> bool:
    """True for imports, also under TYPE_CHECKING, and for assignments to the names that describe a package."""
    if isinstance(node, ast.If):
        return ast.unparse(node.test).removeprefix("not ") == "TYPE_CHECKING" and all(map(only_exports, node.body))
    names = [target.id for target in getattr(node, "targets", []) if isinstance(target, ast.Name)]
    allowed = {"__all__", "__version__", "__getattr__", "__dir__"}
    return isinstance(node, ast.Import | ast.ImportFrom) or (len(names) == 1 and names[0] in allowed)


def test_front_doors_only_export() -> None:
    doors = PACKAGE.rglob("__init__.py")
    assert not [
        f"{door}: {ast.unparse(node)}" for door in doors for node in statements(parsed(door)) if not only_exports(node)
    ]


@pytest.mark.parametrize("room", sorted(FRONT_DOORS))
def test_front_door_exports_exactly_the_pinned_names(room: str) -> None:
    """Adding or removing an exported name needs the same change in front_doors.py."""
    door = importlib.import_module(f"weightwire.{room}".rstrip("."))
    exported = getattr(door, "__all__", [])
    assert sorted(exported) == FRONT_DOORS[room]
    assert all(hasattr(door, name) and not name.startswith("_") for name in exported)


def test_every_front_door_is_pinned() -> None:
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert rooms | {""} == set(FRONT_DOORS)


def test_the_package_has_at_most_22_entries_and_each_has_a_summary() -> None:
    entries = [path for path in PACKAGE.iterdir() if path.name not in ("__init__.py", "__main__.py", "py.typed")]
    entries = [path for path in entries if path.suffix == ".py" or (path / "__init__.py").exists()]
    assert len(entries) <= 22
    for path in entries:
        doc = ast.get_docstring(parsed(path / "__init__.py" if path.is_dir() else path))
        assert doc, path
        assert doc.split("\n\n")[0].endswith("."), f"{path}: the docstring must begin with a sentence"


def room_table() -> dict[str, list[str]]:
    """Maps each room in the design's table to the other cells of its row."""
    table = (ROOT / "docs/design.md").read_text(encoding="utf-8").split("\n| room |")[1].split("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    return {room.strip("`").removesuffix("/").removesuffix(".py"): cells for room, *cells in rows}


def test_design_lists_every_room_in_order() -> None:
    assert list(room_table()) == [room for room in ORDER if not room.startswith("__")]


def test_docstring_of_a_room_begins_with_its_verb() -> None:
    for room, (verb, _) in room_table().items():
        if room not in FILES:
            doc = ast.get_docstring(parsed(PACKAGE / room / "__init__.py")) or ""
            assert doc.split(":")[0].lower() == verb, room


def type_names(tree: ast.Module) -> list[str]:
    """The classes and type aliases (`Rows = tuple[int, int]`) of a module, without type variables, which may repeat."""
    names = [node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    for node in tree.body:
        if isinstance(node, ast.Assign) and not ast.unparse(node.value).startswith(("TypeVar(", "ParamSpec(")):
            names += [target.id for target in node.targets if isinstance(target, ast.Name)]
    names = [name.lstrip("_") for name in names]
    return [name for name in names if name[:1].isupper() and not name.isupper()]


def test_class_names_are_unique() -> None:
    """Private names count, because grep finds both."""
    names = Counter(name for path in MODULES for name in type_names(parsed(path)))
    assert not [name for name, count in names.items() if count > 1]


def test_module_names_are_unique() -> None:
    """A package and the module of its main class may share a name: publisher/publisher.py."""
    modules = [path for path in MODULES if path.stem not in ("__init__", path.parent.name)]
    names = Counter(path.stem for path in modules)
    packages = Counter(path.parent.name for path in MODULES if path.stem == "__init__")
    assert {name for name, count in (names + packages).items() if count > 1} <= REPEATED_MODULES


def test_nothing_is_called_utils() -> None:
    assert not [path for path in SOURCES if path.stem.strip("_") in {"util", "utils", "helpers", "misc", "common"}]


@pytest.mark.parametrize("folder", ["src", "tests", "benchmarks", "examples", "deploy"])
def test_files_have_at_most_500_lines(folder: str) -> None:
    sizes = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCES if folder in path.parts}
    assert not {path.relative_to(ROOT).as_posix(): size for path, size in sizes.items() if size > MOST_LINES}


def test_functions_have_at_most_40_lines() -> None:
    long = {}
    for path in MODULES:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = node.body[1:] if ast.get_docstring(node) and len(node.body) > 1 else node.body
                if (node.end_lineno or 0) - body[0].lineno + 1 > MOST_FUNCTION_LINES:
                    long[f"{dotted(path)}.{node.name}"] = (node.end_lineno or 0) - body[0].lineno + 1
    assert not long


def attributes(node: ast.ClassDef) -> set[str]:
    """The attributes of a class: its fields, and the names that its methods assign on `self`."""
    fields = {one.target.id for one in node.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)}
    for one in ast.walk(node):
        if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store) and ast.unparse(one.value) == "self":
            fields.add(one.attr)
    return fields


def test_classes_have_at_most_12_attributes() -> None:
    classes = [(path, node) for path in MODULES for node in ast.walk(parsed(path)) if isinstance(node, ast.ClassDef)]
    found = {f"{dotted(path)}.{node.name}": len(attributes(node)) for path, node in classes if node.name not in WIDE}
    assert not {name: count for name, count in found.items() if count > MOST_ATTRIBUTES}


def test_tests_mirror_the_rooms() -> None:
    rooms = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir() and any(path.glob("**/test_*.py"))}
    assert rooms <= {*ORDER, "faults", "fuzz", "hostile", "project"}
    assert not list((ROOT / "tests").glob("test_*.py")), "put each test in the folder of the room that it tests"


@pytest.mark.parametrize(
    "statement",
    ["import weightwire.engines", "from weightwire.engines.vllm import oldest_version, served_version"],
)
def test_engine_registry_does_not_import_torch_or_vllm(statement: str) -> None:
    code = f"import sys; {statement}; print(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    assert not HEAVY & set(subprocess.check_output([sys.executable, "-c", code], text=True).split())


@pytest.mark.parametrize(
    ("statement", "needed"),
    [
        ("import weightwire.cli", {"weightwire"}),
        ("from weightwire import *", {"weightwire", "numpy", "msgspec"}),
    ],
)
def test_importing_weightwire_needs_few_packages(statement: str, needed: set[str]) -> None:
    code = f"import sys; before = {{*sys.modules}}; {statement}; print(*{{*sys.modules}} - before)"
    names = subprocess.check_output([sys.executable, "-c", code], text=True).split()
    imported = {name.split(".")[0] for name in names} - sys.stdlib_module_names

    # msgspec imports typing_extensions if it is installed.
    assert imported - {"typing_extensions"} == needed
