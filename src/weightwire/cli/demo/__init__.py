"""`weightwire demo`: a whole run on one machine, and a board in the terminal that shows it."""

from weightwire.cli.demo.demo_command import demo

__all__ = ["demo"]
