"""Hold: a follower's local checkpoint, which is of exactly one version whatever happens."""

from weightwire.replica.replica import Replica
from weightwire.replica.workdir import Position

__all__ = ["Position", "Replica"]
