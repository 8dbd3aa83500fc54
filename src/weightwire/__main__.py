"""`python -m weightwire`: the command line."""

from weightwire.cli.entry_point import script

script()
