"""`weightwire publish`: publishes one checkpoint, or each one that a trainer writes."""

from weightwire.cli.publish.publish_command import publish

__all__ = ["publish"]
