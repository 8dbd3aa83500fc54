"""`python -m weightwire`: the command line."""

from weightwire.cli import main

main()
