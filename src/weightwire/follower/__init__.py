"""Follow: the inference side. Keeps a replica at the newest version and hands out updates."""

from weightwire.follower.follower import Follower
from weightwire.follower.trust_settings import FIRST_USE
from weightwire.follower.update import Update
from weightwire.follower.wakeups import WakeupServer

__all__ = ["FIRST_USE", "Follower", "Update", "WakeupServer"]
