"""Catch up: the way to a version, what it takes from the bucket, and the weights rebuilt from it."""

from weightwire.catchup.fetch import Fetched, Fetcher, Heard, fetch_side_files
from weightwire.catchup.restore import apply_version, copy_weights, load_anchor, restore_weights, schema_of

__all__ = [
    "Fetched",
    "Fetcher",
    "Heard",
    "apply_version",
    "copy_weights",
    "fetch_side_files",
    "load_anchor",
    "restore_weights",
    "schema_of",
]
