"""Carry: stores bytes by URL, in object stores, on the Hugging Face Hub or in a directory."""

from weightwire.bucket.bucket import GET_LIMIT, Bucket, ObjectInfo
from weightwire.bucket.concurrency import each
from weightwire.bucket.forwarding import ForwardingBucket
from weightwire.bucket.probe import PROBE_FOLDER, is_probe, probe_bucket
from weightwire.bucket.registry import BUCKET_URLS, BucketPlace, open_bucket, place_of
from weightwire.bucket.silence import MonitoredBucket

__all__ = [
    "BUCKET_URLS",
    "GET_LIMIT",
    "PROBE_FOLDER",
    "Bucket",
    "BucketPlace",
    "ForwardingBucket",
    "MonitoredBucket",
    "ObjectInfo",
    "each",
    "is_probe",
    "open_bucket",
    "place_of",
    "probe_bucket",
]
