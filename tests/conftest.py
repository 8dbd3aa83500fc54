"""What several test files share."""

from __future__ import annotations

import pytest

from weightwire import codec
from weightwire.codec import _kernel, spec


@pytest.fixture(params=["kernel", "spec"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The C kernel, and then NumPy in its place, as where there was no compiler."""
    monkeypatch.setattr(codec, "KERNEL", _kernel if request.param == "kernel" else spec)
    return str(request.param)


@pytest.fixture
def without_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "KERNEL", spec)
