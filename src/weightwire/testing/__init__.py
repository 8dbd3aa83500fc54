"""Try: the tests that your own bucket must pass, as a class to inherit from. Needs pytest."""

import weightwire.testing.pytest_setup  # noqa: F401  must run before the import below

# isort: split
from weightwire.testing.bucket_contract import BucketContract, Opener, in_loop
from weightwire.testing.bucket_names import BAD_PATHS, ODD_NAMES

__all__ = ["BAD_PATHS", "ODD_NAMES", "BucketContract", "Opener", "in_loop"]
