"""Try: what a bucket of your own must do, as tests to inherit from. Needs pytest."""

import weightwire.testing.pytest_setup  # noqa: F401  before the asserts that it is for

# isort: split
from weightwire.testing.bucket_contract import BucketContract, Opener, in_loop
from weightwire.testing.bucket_names import BAD_PATHS, ODD_NAMES

__all__ = ["BAD_PATHS", "ODD_NAMES", "BucketContract", "Opener", "in_loop"]
