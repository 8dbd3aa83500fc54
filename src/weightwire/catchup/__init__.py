"""Catch up: plan a path to a version, fetch its files, restore its weights, and route around lost data."""

from weightwire.catchup.data_file_check import FileClaim, check_data_file, hash_object
from weightwire.catchup.detour import LOST_FOR_GOOD, around_lost_data
from weightwire.catchup.fetch import Fetched, Fetcher, fetch_side_file, fetch_side_files, missing_side_file
from weightwire.catchup.plan import NEED_ANCHOR, ChainPath, NoPath, Start, anchors_of, find_anchors, plan, plan_newest
from weightwire.catchup.remote_file import RemoteFile
from weightwire.catchup.restore import apply_version, load_anchor, restore_weights

__all__ = [
    "LOST_FOR_GOOD",
    "NEED_ANCHOR",
    "ChainPath",
    "Fetched",
    "Fetcher",
    "FileClaim",
    "NoPath",
    "RemoteFile",
    "Start",
    "anchors_of",
    "apply_version",
    "around_lost_data",
    "check_data_file",
    "fetch_side_file",
    "fetch_side_files",
    "find_anchors",
    "hash_object",
    "load_anchor",
    "missing_side_file",
    "plan",
    "plan_newest",
    "restore_weights",
]
