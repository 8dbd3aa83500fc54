"""Publish: the trainer's side. Captures weights, diffs, uploads and commits them behind the trainer's back."""

from weightwire.publisher.publication import Publication
from weightwire.publisher.publisher import Publisher
from weightwire.publisher.ranks.protocol import RankGroup

__all__ = ["Publication", "Publisher", "RankGroup"]
