"""Tidy: deletes data that nothing needs any longer, changes keys, and tries out stores. Everything here may write."""

from weightwire.upkeep.gc import Sweep, sweep
from weightwire.upkeep.key_change import change_keys
from weightwire.upkeep.retention import Removal, Retention
from weightwire.upkeep.store_trial import Operation, StoreTrial, Transfer, measure_download, try_roles, try_store

__all__ = [
    "Operation",
    "Removal",
    "Retention",
    "StoreTrial",
    "Sweep",
    "Transfer",
    "change_keys",
    "measure_download",
    "sweep",
    "try_roles",
    "try_store",
]
