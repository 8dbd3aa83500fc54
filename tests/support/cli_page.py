"""docs/cli.md, generated from the typer application.

To rewrite the page after a help text has changed: `PYTHONPATH=tests python -m support.cli_page`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from weightwire.cli.application import app

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"

_INTRODUCTION = """\
# Commands

<!-- Generated from the help texts in src/weightwire/cli. To rewrite it:
     PYTHONPATH=tests python -m support.cli_page -->

Every command with its arguments and options, as `weightwire COMMAND --help` shows them. `--json` is explained in
[JSON output](json.md), exit codes and examples in [operations](operations.md#commands).

`weightwire --version` prints the version. `weightwire --install-completion` installs completion for your shell.
"""


def render() -> str:
    group: Any = typer.main.get_command(app)
    return "\n".join([_INTRODUCTION, *(_section(name, command) for name, command in group.commands.items())])


def _section(name: str, command: Any) -> str:
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    usage = " ".join(["weightwire", name, command.options_metavar, *(one.metavar for one in arguments)])
    about = [" ".join(paragraph.split()) for paragraph in command.help.split("\n\n")]
    rows = [f"| `{_name(one)}` | {_meaning(one)} |" for one in command.params]
    table = "\n".join(["| argument or option | meaning |", "|---|---|", *rows])
    return "\n\n".join([f"## {name}", f"`{usage}`", *about, table]) + "\n"


def _name(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return str(parameter.metavar)
    names = ", ".join(sorted([*parameter.opts, *parameter.secondary_opts], key=len))
    return f"{names} {parameter.metavar}" if parameter.metavar else names


def _meaning(parameter: Any) -> str:
    text = parameter.help.replace("; see docs/json.md", "").replace("|", r"\|")
    if parameter.param_type_name == "argument":
        return text if parameter.required else f"{text} Optional."
    if parameter.required:
        return f"{text} Required."
    default = _default(parameter)
    return f"{text} Default: {default}." if default else text


def _default(parameter: Any) -> str:
    """As the help shows it: a value, or words in place of it. Flags have none."""
    if isinstance(parameter.show_default, str):
        return parameter.show_default
    value = parameter.default
    return "" if value is None or isinstance(value, bool) else f"`{value}`"


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
