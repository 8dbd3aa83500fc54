"""The house rules that a machine can check: order, front doors, names and sizes."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections import Counter
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

# A room imports only from rooms before it, `weightwire/__init__.py` from all but the last three.
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

# Rooms whose modules are imported one by one: each needs packages of its own, such as torch or starlette.
OPEN_ROOMS = {"engines", "trainers", "server", "page", "demo", "cli", "testing"}

# The only rooms that may import torch; the core must work where it is not installed.
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

# Modules of one name are the same thing seen from two rooms: a command and what it runs, a framework and its adapter,
# the list of a room that others can add to.
SAME_THING = {"gc", "page", "restore", "status", "verify", "demo", "torch", "publish", "registry"}

MOST_LINES = 500
MOST_FUNCTION_LINES = 40
MOST_ATTRIBUTES = 12
# What a record holds is decided by docs/PROTOCOL.md, and what a view holds by the page.
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
    """The module and the name of everything that a file imports, wherever in the file."""
    found: list[tuple[str, str]] = []
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found += ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: imports are absolute"
            found += ((node.module or "", alias.name) for alias in node.names)
    return found


def rooms_imported(path: Path) -> set[str]:
    """What `imports` says, as entries of ORDER; a plain name of the package comes from its `__init__`."""
    inside = [(module, name) for module, name in imports(path) if module.split(".")[0] == "weightwire"]
    rooms = {module.split(".")[1] if "." in module else name for module, name in inside}
    return {room if room in ORDER else "__init__" for room in rooms}


def statements(tree: ast.Module) -> list[ast.stmt]:
    """What a module does besides its docstring."""
    return tree.body[1:] if ast.get_docstring(tree) else tree.body


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(PACKAGE).as_posix())
class TestModule:
    def test_has_its_place_in_the_order(self, path: Path) -> None:
        assert room_of(path) in ORDER, "add the new room to ORDER, after everything it imports"

    def test_imports_only_from_rooms_before_its_own(self, path: Path) -> None:
        own = ORDER.index(room_of(path))
        later = {other for other in rooms_imported(path) if ORDER.index(other) > own}
        assert not later, f"{room_of(path)} must not import {sorted(later)}"

    def test_does_not_import_strangers(self, path: Path) -> None:
        assert not {(room_of(path), other) for other in rooms_imported(path)} & STRANGERS

    def test_enters_other_rooms_through_their_front_doors(self, path: Path) -> None:
        for module, name in imports(path):
            parts = module.split(".")
            if parts[0] != "weightwire" or len(parts) < 2 or parts[1] in (room_of(path), "errors", *OPEN_ROOMS):
                continue
            assert len(parts) == 2, f"import {name} from weightwire.{parts[1]}: {module} is behind that front door"
            assert name in FRONT_DOORS[parts[1]], f"{module} does not export {name}"

    def test_imports_torch_only_at_the_edge(self, path: Path) -> None:
        assert room_of(path) in TORCH or "torch" not in {module.split(".")[0] for module, _ in imports(path)}

    def test_has_at_most_500_lines(self, path: Path) -> None:
        assert len(path.read_text(encoding="utf-8").splitlines()) <= MOST_LINES

    def test_says_what_it_knows(self, path: Path) -> None:
        assert ast.get_docstring(parsed(path))


def only_exports(node: ast.stmt) -> bool:
    """An import (perhaps for type checkers alone), or one of the names that say what a package exports."""
    if isinstance(node, ast.If):
        return ast.unparse(node.test) == "TYPE_CHECKING" and all(map(only_exports, node.body))
    names = [target.id for target in getattr(node, "targets", []) if isinstance(target, ast.Name)]
    return isinstance(node, ast.Import | ast.ImportFrom) or names in (["__all__"], ["__version__"], ["__getattr__"])


def test_a_front_door_only_exports() -> None:
    doors = PACKAGE.rglob("__init__.py")
    assert not [
        f"{door}: {ast.unparse(node)}" for door in doors for node in statements(parsed(door)) if not only_exports(node)
    ]


@pytest.mark.parametrize("room", sorted(FRONT_DOORS))
def test_front_door_exports_exactly_the_names_that_are_listed(room: str) -> None:
    """A name that joins or leaves a front door is a decision: it is made in front_doors.py too."""
    door = importlib.import_module(f"weightwire.{room}".rstrip("."))
    exported = getattr(door, "__all__", [])
    assert sorted(exported) == FRONT_DOORS[room]
    assert all(hasattr(door, name) and not name.startswith("_") for name in exported)


def test_every_room_has_a_front_door_that_is_listed() -> None:
    rooms = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert rooms | {""} == set(FRONT_DOORS)


def test_the_house_has_at_most_22_entries_and_each_says_what_it_is() -> None:
    entries = [path for path in PACKAGE.iterdir() if path.name not in ("__init__.py", "__main__.py", "py.typed")]
    entries = [path for path in entries if path.suffix == ".py" or (path / "__init__.py").exists()]
    assert len(entries) <= 22
    for path in entries:
        doc = ast.get_docstring(parsed(path / "__init__.py" if path.is_dir() else path))
        assert doc, path
        assert doc.split("\n\n")[0].endswith("."), f"{path}: begins with a sentence"


def room_table(document: str) -> dict[str, list[str]]:
    """The other cells of a document's table of rooms, by the entry of ORDER."""
    table = (ROOT / document).read_text(encoding="utf-8").split("\n| room |")[1].split("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    return {room.strip("`").removesuffix("/").removesuffix(".py"): cells for room, *cells in rows}


@pytest.mark.parametrize("document", ["README.md", "docs/design.md"])
def test_the_documents_list_every_room_in_order(document: str) -> None:
    assert list(room_table(document)) == [room for room in ORDER if not room.startswith("__")]


def test_the_verb_of_a_room_is_the_first_word_of_its_docstring() -> None:
    for room, (verb, _) in room_table("docs/design.md").items():
        if room != "errors":
            doc = ast.get_docstring(parsed(PACKAGE / room / "__init__.py")) or ""
            assert doc.split(":")[0].lower() == verb, room


def type_names(tree: ast.Module) -> list[str]:
    """The classes and type aliases (`Rows = tuple[int, int]`) of a module. Type variables may repeat."""
    names = [node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    for node in tree.body:
        if isinstance(node, ast.Assign) and not ast.unparse(node.value).startswith(("TypeVar(", "ParamSpec(")):
            names += [target.id for target in node.targets if isinstance(target, ast.Name)]
    names = [name.lstrip("_") for name in names]
    return [name for name in names if name[:1].isupper() and not name.isupper()]


def test_a_class_name_means_one_thing() -> None:
    """A private name counts too: grep finds both."""
    names = Counter(name for path in MODULES for name in type_names(parsed(path)))
    assert not [name for name, count in names.items() if count > 1]


def test_a_module_name_means_one_thing() -> None:
    """A package and the module of its main class may share one: publisher/publisher.py."""
    modules = [path for path in MODULES if path.stem not in ("__init__", path.parent.name)]
    names = Counter(path.stem for path in modules)
    packages = Counter(path.parent.name for path in MODULES if path.stem == "__init__")
    assert {name for name, count in (names + packages).items() if count > 1} <= SAME_THING


def test_nothing_is_called_utils() -> None:
    assert not [path for path in SOURCES if path.stem.strip("_") in {"util", "utils", "helpers", "misc", "common"}]


@pytest.mark.parametrize("folder", ["src", "tests", "benchmarks", "examples", "deploy"])
def test_files_are_short(folder: str) -> None:
    """Python, C and JavaScript alike."""
    sizes = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCES if folder in path.parts}
    assert not {path.relative_to(ROOT).as_posix(): size for path, size in sizes.items() if size > MOST_LINES}


def test_functions_read_without_scrolling() -> None:
    long = {}
    for path in MODULES:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = node.body[1:] if ast.get_docstring(node) and len(node.body) > 1 else node.body
                if (node.end_lineno or 0) - body[0].lineno + 1 > MOST_FUNCTION_LINES:
                    long[f"{dotted(path)}.{node.name}"] = (node.end_lineno or 0) - body[0].lineno + 1
    assert not long


def attributes(node: ast.ClassDef) -> set[str]:
    """What an object of this class holds: fields, and what its methods assign to `self`."""
    fields = {one.target.id for one in node.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)}
    for one in ast.walk(node):
        if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store) and ast.unparse(one.value) == "self":
            fields.add(one.attr)
    return fields


def test_classes_are_of_a_readable_size() -> None:
    classes = [(path, node) for path in MODULES for node in ast.walk(parsed(path)) if isinstance(node, ast.ClassDef)]
    found = {f"{dotted(path)}.{node.name}": len(attributes(node)) for path, node in classes if node.name not in WIDE}
    assert not {name: count for name, count in found.items() if count > MOST_ATTRIBUTES}


def test_tests_mirror_the_rooms() -> None:
    rooms = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir() and any(path.glob("**/test_*.py"))}
    assert rooms <= {*ORDER, "faults", "hostile", "project"}
    assert not list((ROOT / "tests").glob("test_*.py")), "every test is in the room of what it tests"


@pytest.mark.parametrize(
    "statement",
    ["import weightwire.engines", "from weightwire.engines.vllm import oldest_version, served_version"],
)
def test_engines_are_found_without_importing_torch_or_vllm(statement: str) -> None:
    code = f"import sys; {statement}; print(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    assert not HEAVY & set(subprocess.check_output([sys.executable, "-c", code], text=True).split())


def test_importing_weightwire_is_cheap() -> None:
    """Counted, not timed: besides the standard library it needs only NumPy and msgspec."""
    code = "import sys; before = {*sys.modules}; import weightwire; print(*{*sys.modules} - before)"
    names = subprocess.check_output([sys.executable, "-c", code], text=True).split()
    imported = {name.split(".")[0] for name in names} - sys.stdlib_module_names

    # msgspec imports typing_extensions where it happens to be installed.
    assert imported - {"typing_extensions"} == {"weightwire", "numpy", "msgspec"}
