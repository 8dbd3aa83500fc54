"""Makes pytest explain failed asserts of this package as it does for test files."""

from __future__ import annotations

try:
    import pytest
except ModuleNotFoundError as problem:
    raise ModuleNotFoundError("weightwire.testing needs pytest: pip install pytest", name="pytest") from problem

__all__: list[str] = []

pytest.register_assert_rewrite("weightwire.testing.bucket_contract")
