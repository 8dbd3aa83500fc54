"""docs/json.md, generated from the types of the commands' JSON output.

To rewrite the page after a type has changed: `PYTHONPATH=tests python -m support.json_page`.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import msgspec

from weightwire.cli.doctor.doctor_output import DoctorOutput
from weightwire.cli.shared.file_output import DiffOutput, PatchOutput, ShowOutput
from weightwire.cli.shared.json_output import ErrorOutput, RecoveredOutput, WarningOutput
from weightwire.cli.shared.run_output import (
    DemoOutput,
    FollowOutput,
    GcOutput,
    KeyOutput,
    KeysOutput,
    LogOutput,
    PublishOutput,
    RestoreOutput,
    StageOutput,
    StatusOutput,
    VerifyOutput,
    VersionOutput,
)

PAGE = Path(__file__).parents[2] / "docs" / "json.md"

OUTPUTS: dict[str, type[msgspec.Struct]] = {
    "publish": PublishOutput,
    "follow": FollowOutput,
    "restore": RestoreOutput,
    "doctor": DoctorOutput,
    "status": StatusOutput,
    "log": LogOutput,
    "verify": VerifyOutput,
    "gc": GcOutput,
    "keygen": KeyOutput,
    "keys": KeysOutput,
    "diff": DiffOutput,
    "patch": PatchOutput,
    "show": ShowOutput,
    "demo": DemoOutput,
}
"""What each command with `--json` writes."""

_SHARED: dict[type[msgspec.Struct], str] = {VersionOutput: "version", StageOutput: "stage"}
_TYPES = {int: "integer", float: "number", str: "string", bool: "boolean", types.NoneType: "null"}

_INTRODUCTION = """\
# JSON output

<!-- Generated from the types in src/weightwire/cli/*/*_output.py. To rewrite it:
     PYTHONPATH=tests python -m support.json_page -->

All commands except `page` and `serve` take `--json`. stdout then holds JSON only. Messages and progress bars stay on
stderr. Most commands write one document. `follow` without `--once` and `publish --watch` write one line per
version.

The same key means the same thing in every command:

- `bytes` is the size of what the record is about; other sizes are `<what>_bytes`.
- Durations are `seconds` or `<what>_seconds`.
- `time` is a point in time, in seconds since 1970 (UTC). The table says what happened then, and by which clock.
- Versions are `version` or `<what>_version`. They are null where there is none.
- `changed` counts weights. It is null for anchors, because nothing was compared.
- Every key is always present.

Exit codes: 0 success, 1 an error (or problems found by `verify` or `doctor`), 2 wrong usage, 130 interrupted by Ctrl-C.
"""


def render() -> str:
    parts = [_INTRODUCTION]
    parts += [_section("Errors", ErrorOutput), _section("Warnings", WarningOutput), _table(RecoveredOutput)]
    parts += [_section(f"`weightwire {command}`", output) for command, output in OUTPUTS.items()]
    parts += [_section(f"A {name}", kind) for kind, name in _SHARED.items()]
    return "\n".join(parts)


def _section(title: str, output: type[msgspec.Struct]) -> str:
    return f"## {title}\n\n{_table(output)}"


def _table(output: type[msgspec.Struct]) -> str:
    rows = [f"| `{key}` | {kind} | {meaning} |" for key, kind, meaning in _rows(output)]
    about = "" if output.__doc__ is None else " ".join(output.__doc__.split()) + "\n\n"
    return about + "\n".join(["| key | type | meaning |", "|---|---|---|", *rows]) + "\n"


def _rows(output: type[msgspec.Struct], prefix: str = "") -> Iterator[tuple[str, str, str]]:
    hints = get_type_hints(output, include_extras=True)
    for field in msgspec.structs.fields(output):
        kind, meaning = _split(hints[field.name])
        assert meaning, f"{output.__name__}.{field.name} has no description"
        yield prefix + field.name, _name(kind), meaning
        for inner, path in _structs(kind):
            if inner not in _SHARED:
                yield from _rows(inner, f"{prefix}{field.name}{path}.")


def _split(hint: Any) -> tuple[Any, str]:
    if get_origin(hint) is not Annotated:
        return hint, ""
    kind, *metas = get_args(hint)
    return kind, " ".join(meta.description for meta in metas if meta.description)


def _structs(kind: Any) -> Iterator[tuple[type[msgspec.Struct], str]]:
    """The records inside a type, and how a key reaches them."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        yield kind, ""
    origin = get_origin(kind)
    suffix = "[]" if origin is list else ".*" if origin is dict else ""
    for inner in get_args(kind):
        yield from ((found, suffix + path) for found, path in _structs(_split(inner)[0]))


def _name(kind: Any) -> str:
    origin, inner = get_origin(kind), [_split(one)[0] for one in get_args(kind)]
    if origin in (types.UnionType, Union):
        return " or ".join(map(_name, inner))
    if origin is list:
        return f"list of {_name(inner[0])}"
    if origin is dict:
        return f"object of {_name(inner[1])} by name"
    if kind in _SHARED:
        return f"[{_SHARED[kind]}](#a-{_SHARED[kind]})"
    return _TYPES.get(kind, "object")


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
