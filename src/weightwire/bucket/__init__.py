"""Carry: bytes by URL, in object stores, on the Hugging Face Hub or in a directory. Never sees a tensor."""

from weightwire.bucket.bucket import Bucket, ObjectInfo
from weightwire.bucket.concurrency import each
from weightwire.bucket.probe import PROBE_FOLDER, probe_bucket
from weightwire.bucket.registry import open_bucket

__all__ = ["PROBE_FOLDER", "Bucket", "ObjectInfo", "each", "open_bucket", "probe_bucket"]
