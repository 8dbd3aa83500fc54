"""Command: `weightwire` on the command line, one module per command; `shared` has what they share."""

from weightwire.cli.entry_point import main, script

__all__ = ["main", "script"]
