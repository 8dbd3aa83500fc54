"""`weightwire demo`: a whole run on one machine, with a live board in the terminal."""

from weightwire.cli.demo.demo_command import demo

__all__ = ["demo"]
