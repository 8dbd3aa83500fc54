"""`weightwire publish`: publishes checkpoints, one or all that a trainer writes, and remembers the last one."""

from weightwire.cli.publish.publish_command import publish

__all__ = ["publish"]
