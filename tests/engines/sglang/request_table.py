"""Reads from SGLang's wheels which requests they accept: the facts in request_table.json.

    pip download --no-deps --only-binary=:all: -d wheels sglang==0.5.23
    python tests/engines/sglang/request_table.py wheels/*.whl          # compares, and fails if they differ
    python tests/engines/sglang/request_table.py --write wheels/*.whl  # replaces the table

Parses the sources: SGLang needs CUDA to be imported.
"""

from __future__ import annotations

import ast
import json
import sys
import zipfile
from pathlib import Path
from typing import Any

DEFAULT = " = default"  # ends the type of a field that may be left out
TABLE = Path(__file__).with_name("request_table.json")
ENDPOINTS = {
    "/begin_weight_update",
    "/continue_generation",
    "/end_weight_update",
    "/flush_cache",
    "/model_info",
    "/pause_generation",
    "/server_info",
    "/update_weight_version",
    "/update_weights_from_disk",
    "/update_weights_from_tensor",
}
SETTINGS = {"custom_weight_loader", "dp_size", "enable_eplb", "nnodes", "pp_size", "quantization", "tp_size"}


def facts_of(wheel: Path) -> dict[str, Any]:
    with zipfile.ZipFile(wheel) as opened:

        def source(path: str) -> str:
            return opened.read(f"sglang/srt/{path}").decode()

        routes = _routes(ast.parse(source("entrypoints/http_server.py")))
        classes = _classes(ast.parse(source("managers/io_struct.py")))
        settings = [
            name
            for name in opened.namelist()
            if name == "sglang/srt/server_args.py" or name.startswith("sglang/srt/arg_groups/fields/")
        ]
        fields = {name for path in settings for name in _field_names(ast.parse(opened.read(path).decode()))}
    return {
        "endpoints": {path: name for path, name in sorted(routes.items()) if path in ENDPOINTS},
        "requests": {name: classes[name] for path, name in routes.items() if path in ENDPOINTS and name},
        "settings": sorted(SETTINGS & fields),
    }


def _routes(tree: ast.Module) -> dict[str, str]:
    """The class of the body of each endpoint, or an empty string if it takes none."""
    found = {}
    for node in tree.body:
        if isinstance(node, ast.AsyncFunctionDef):
            bodies = [ast.unparse(one.annotation) for one in node.args.args if one.arg == "obj" and one.annotation]
            name = bodies[0].removeprefix("Annotated[").partition(",")[0] if bodies else ""
            for one in node.decorator_list:
                first = one.args[0] if isinstance(one, ast.Call) and one.args else None
                if isinstance(first, ast.Constant):
                    found[str(first.value)] = name
    return found


def _classes(tree: ast.Module) -> dict[str, dict[str, str]]:
    """The types of the fields of each class, with those of its bases."""
    nodes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}

    def fields(node: ast.ClassDef) -> dict[str, str]:
        found: dict[str, str] = {}
        for base in node.bases:
            if isinstance(base, ast.Name) and base.id in nodes:
                found |= fields(nodes[base.id])
        for one in node.body:
            if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name):
                found[one.target.id] = ast.unparse(one.annotation) + ("" if one.value is None else DEFAULT)
        return found

    return {name: fields(node) for name, node in nodes.items()}


def _field_names(tree: ast.Module) -> set[str]:
    nodes = (one for one in ast.walk(tree) if isinstance(one, ast.AnnAssign))
    return {one.target.id for one in nodes if isinstance(one.target, ast.Name)}


def main(arguments: list[str]) -> int:
    wheels = [Path(one) for one in arguments if one != "--write"]
    found = {wheel.name.split("-")[1]: facts_of(wheel) for wheel in wheels}
    if "--write" in arguments:
        TABLE.write_text(json.dumps(found, indent=2, sort_keys=True) + "\n")
        return 0
    known = json.loads(TABLE.read_text())
    differing = [version for version, facts in found.items() if facts != known.get(version)]
    print(f"differ from {TABLE.name}: {', '.join(differing)}" if differing else "all as in the table")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
