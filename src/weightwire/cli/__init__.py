"""Command: `weightwire` on the command line, one module per command; what commands share is in `shared`."""

from weightwire.cli.entry_point import main, script

__all__ = ["main", "script"]
