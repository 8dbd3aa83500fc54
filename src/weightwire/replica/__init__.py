"""Hold: a follower's local checkpoint, which is of exactly one version whatever happens."""

from weightwire.replica.checkpoint_about import CheckpointAbout
from weightwire.replica.replica import Replica
from weightwire.replica.workdir import Position

__all__ = ["CheckpointAbout", "Position", "Replica"]
