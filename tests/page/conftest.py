"""One real browser for all tests of the page."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest

from support.chromium import Chromium, chromium_path

NOT_RUN = "the page was not tested in a browser: chromium is not installed (apt install chromium)"


@pytest.fixture(scope="session")
def browser() -> Iterator[Chromium]:
    path = chromium_path()
    if path is None:
        warnings.warn(NOT_RUN, stacklevel=1)
        pytest.skip(NOT_RUN)
    with Chromium(path) as browser:
        yield browser
