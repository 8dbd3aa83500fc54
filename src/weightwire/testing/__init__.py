"""Try: what a bucket of your own must do, as tests to inherit from."""

from weightwire.testing.bucket_contract import *  # noqa: F403
