"""A base class that gives `with` to objects with a `close` method."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self

__all__ = ["Closeable"]


class Closeable(ABC):
    """Is closed at the end of its `with` block."""

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
