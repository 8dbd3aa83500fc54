"""Publish: the trainer's side. Captures weights, then encodes, uploads and commits them in the background."""

from weightwire.publisher.publication import Publication
from weightwire.publisher.publisher import Publisher
from weightwire.publisher.ranks.protocol import RankGroup

__all__ = ["Publication", "Publisher", "RankGroup"]
