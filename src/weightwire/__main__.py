"""`python -m weightwire`: the command line."""

from weightwire.cli import script

script()
