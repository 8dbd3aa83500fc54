"""Catch up: plan the way to a version, fetch its files, restore its weights, and get past what is lost."""

from weightwire.catchup.detour import LOST_FOR_GOOD, around_lost_data
from weightwire.catchup.fetch import Fetched, Fetcher, fetch_side_files
from weightwire.catchup.plan import ChainPath, NoWay, Start, anchors_of, find_anchors, plan, plan_newest
from weightwire.catchup.restore import apply_version, load_anchor, restore_weights

__all__ = [
    "LOST_FOR_GOOD",
    "ChainPath",
    "Fetched",
    "Fetcher",
    "NoWay",
    "Start",
    "anchors_of",
    "apply_version",
    "around_lost_data",
    "fetch_side_files",
    "find_anchors",
    "load_anchor",
    "plan",
    "plan_newest",
    "restore_weights",
]
