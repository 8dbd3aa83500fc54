"""Tidy: deletes what nobody needs any more."""

from weightwire.upkeep.gc import Sweep, sweep
from weightwire.upkeep.retention import Removal, Retention

__all__ = ["Removal", "Retention", "Sweep", "sweep"]
