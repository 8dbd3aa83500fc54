"""`with` for whatever has to be closed. Knows nothing else."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self

__all__ = ["Closeable"]


class Closeable(ABC):
    """Is closed when its block is left, however that is."""

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
