"""Exports of a package that are imported on first use. Importing numpy takes a moment, and torch takes seconds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

__all__ = ["lazy_exports"]


def lazy_exports(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """A `__getattr__` for a package. `modules` maps each name to the module that defines it.

    Modules of the package are attributes, whether or not they have been imported.
    """

    def get(name: str) -> Any:
        if name in modules:
            return getattr(import_module(f"{package}.{modules[name]}"), name)
        module = f"{package}.{name}"
        missing = AttributeError(f"module {package!r} has no attribute {name!r}")
        if name.startswith("_"):  # importing __main__ would run it
            raise missing
        try:
            return import_module(module)
        except ModuleNotFoundError as problem:
            if problem.name != module:
                raise
            raise missing from None

    return get
