"""Names the case that fails in a test of many cases."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["case"]


@contextmanager
def case(*names: object) -> Iterator[None]:
    """Adds the names of a case to what is raised for it, so that the report shows them.

    For hundreds of cases of a millisecond each: as parameters they would take several times as long.
    """
    try:
        yield
    except Exception as problem:
        problem.add_note(f"case: {', '.join(map(str, names))}")
        raise
