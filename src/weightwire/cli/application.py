"""The typer application: all commands, with errors as JSON where a command was called with `--json`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from weightwire import OutOfMemory, __version__
from weightwire.cli import (
    demo,
    diff,
    doctor,
    follow,
    gc,
    keygen,
    keys,
    log,
    page,
    patch,
    policy,
    publish,
    restore,
    serve,
    show,
    status,
    verify,
)
from weightwire.cli.shared.stop_signal import interrupt_leaves

__all__ = ["app"]

# Plain help and no boxes around errors: they read the same in a log as on a terminal.
app = typer.Typer(
    name="weightwire",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class _Command(TyperCommand):
    """A command that reports running out of memory, Ctrl-C and wrong numbers as every command does."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """`DIR URL`, where typer writes `{DIR} {URL}`."""
        return [piece.strip("{}") for piece in super().collect_usage_pieces(ctx)]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as problem:
            # Some releases of typer quote pydantic, which does not name the value.
            for one in getattr(problem.__cause__, "errors", list)():
                if one["type"] == "int_parsing":
                    problem.message = f"{one['input']!r} is not an integer"
            raise

    def invoke(self, ctx: Any) -> Any:
        try:
            with interrupt_leaves(lambda: "nothing was changed"):
                return super().invoke(ctx)
        except MemoryError as problem:
            hint = "use fewer --threads, or a machine with more memory"
            raise OutOfMemory("out of memory", hint=hint) from problem


def _add(command: Callable[..., None], usage: str = "[OPTIONS]", *, needs_arguments: bool = True) -> None:
    app.command(cls=_Command, no_args_is_help=needs_arguments, options_metavar=usage)(command)


# The demo, then commands on a run in the order in which users need them, then commands on files.
_add(demo.demo, needs_arguments=False)
_add(publish.publish)
_add(follow.follow, "[OPTIONS] --into DIR")
_add(serve.serve, "[OPTIONS] --follow URL")
_add(restore.restore, "[OPTIONS] -o DIR")
_add(doctor.doctor)
_add(policy.policy)
_add(status.status)
_add(log.log)
_add(page.page)
_add(verify.verify)
_add(gc.gc)
_add(keygen.keygen)
_add(keys.keys)
_add(diff.diff, "[OPTIONS] -o DELTA")
_add(patch.patch, "[OPTIONS] -o OUT")
_add(show.show)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"weightwire {__version__}")
        raise typer.Exit


@app.callback()
def weightwire(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit."),
    ] = False,
) -> None:
    """Ship a model's weight changes from a trainer to its inference servers, bit for bit."""
