"""Hold: a follower's local checkpoint, which holds exactly one version at any time."""

from weightwire.replica.checkpoint_about import CheckpointAbout
from weightwire.replica.current_refresh import CurrentRefresh
from weightwire.replica.replica import Replica
from weightwire.replica.seen_run import SeenRun
from weightwire.replica.workdir import Position

__all__ = ["CheckpointAbout", "CurrentRefresh", "Position", "Replica", "SeenRun"]
