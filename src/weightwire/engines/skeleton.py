"""The structure of a model without its weights: modules, and the objects in them that process weights.

An engine's processing changes a layer's structure as well as its weights. A copy of the structure from before can be
processed again, with any weights, and the running model is not touched.
"""

from __future__ import annotations

import enum
import functools
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch

__all__ = ["CopyTensor", "IsPart", "StructureCopier", "numbers_in", "opaque_in", "same_form", "tensors_in"]

IsPart = Callable[[object], bool]
"""Whether an object belongs to the model's structure, besides its modules. Other objects are shared by all copies."""

CopyTensor = Callable[[torch.Tensor], torch.Tensor]

_PLAIN = (str, bytes, int, float, bool, type(None), torch.dtype, torch.device, type, enum.Enum, types.ModuleType)
_BUILT_IN = (list, tuple, dict, set, frozenset)


class StructureCopier:
    """Copies modules and parts. Every object is copied once, so that two references stay references to one object."""

    def __init__(self, is_part: IsPart, copy_tensor: CopyTensor) -> None:
        self._is_part = is_part
        self._copy_tensor = copy_tensor
        self._copies: dict[int, Any] = {}
        self._originals: list[Any] = []  # so that their ids are not reused

    def copy(self, value: Any) -> Any:
        if isinstance(value, _PLAIN):
            return value
        if id(value) in self._copies:
            return self._copies[id(value)]
        if isinstance(value, torch.Tensor):
            return self._keep_attributes(value, self._note(value, self._copy_tensor(value)))
        if type(value) is set:
            return self._note(value, set(value))
        if isinstance(value, types.MethodType):
            return types.MethodType(value.__func__, self.copy(value.__self__))
        if type(value) is functools.partial:
            return functools.partial(self.copy(value.func), *self.copy(value.args), **self.copy(value.keywords))
        if type(value) in (list, tuple):
            return self._copy_sequence(value)
        if isinstance(value, dict):
            return self._copy_mapping(value)
        if isinstance(value, torch.nn.Module) or (self._is_part(value) and not isinstance(value, _BUILT_IN)):
            return self._copy_object(value)
        return value

    def _note(self, value: Any, copy: Any) -> Any:
        self._copies[id(value)] = copy
        self._originals.append(value)
        return copy

    def _keep_attributes(self, value: torch.Tensor, copy: torch.Tensor) -> torch.Tensor:
        """A parameter carries its own loader, which is a method of its layer."""
        if copy is not value and value.__dict__:
            copy.__dict__.update({name: self.copy(one) for name, one in value.__dict__.items()})
        return copy

    def _copy_sequence(self, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(self.copy(one) for one in value)
        copy = self._note(value, [])
        copy.extend(self.copy(one) for one in value)
        return copy

    def _copy_mapping(self, value: Any) -> Any:
        if type(value) not in (dict, OrderedDict):
            return value
        copy = self._note(value, type(value)())
        copy.update({key: self.copy(one) for key, one in value.items()})
        return copy

    def _copy_object(self, value: Any) -> Any:
        copy = self._note(value, object.__new__(type(value)))
        copy.__dict__.update({name: self.copy(one) for name, one in value.__dict__.items()})
        return copy


def tensors_in(root: torch.nn.Module, is_part: IsPart) -> dict[str, torch.Tensor]:
    """All tensors in a structure by the path to them, parameters first. Includes what functions enclose."""
    found = {f".{name}": one for name, one in root.named_parameters(remove_duplicate=False)}
    known = {id(one) for one in found.values()}
    for path, leaf in _leaves(root, "", is_part, set()):
        if isinstance(leaf, torch.Tensor) and id(leaf) not in known:
            known.add(id(leaf))
            found[path] = leaf
    return found


def numbers_in(root: torch.nn.Module, is_part: IsPart) -> dict[str, float]:
    """All plain numbers in a structure by the path to them."""
    leaves = _leaves(root, "", is_part, set())
    return {path: leaf for path, leaf in leaves if isinstance(leaf, int | float) and not isinstance(leaf, enum.Enum)}


def opaque_in(root: torch.nn.Module, is_part: IsPart) -> dict[str, str]:
    """The types of all objects that cannot be looked into, by the path to them. They may hold copies of weights."""
    known = (torch.Tensor, *_PLAIN, *_BUILT_IN)
    return {
        path: type(leaf).__name__
        for path, leaf in _leaves(root, "", is_part, set())
        if not isinstance(leaf, known) and not callable(leaf) and not is_part(leaf)
    }


def _leaves(value: Any, path: str, is_part: IsPart, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """What is in a structure, without what only holds other things. Objects that are met twice count once."""
    if isinstance(value, _PLAIN):
        yield path, value
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    children = [] if isinstance(value, torch.Tensor) else list(_children(value, is_part))
    if not children:
        yield path, value
    for name, child in children:
        yield from _leaves(child, f"{path}.{name}", is_part, seen)


def _children(value: Any, is_part: IsPart) -> Iterator[tuple[str, Any]]:
    if isinstance(value, torch.nn.Module):
        tables = ("_parameters", "_buffers", "_modules")
        for table in tables:
            yield from list(value.__dict__[table].items())
        yield from [(name, one) for name, one in value.__dict__.items() if name not in tables]
    elif isinstance(value, dict):
        yield from ((str(key), one) for key, one in list(value.items()))
    elif isinstance(value, list | tuple):
        yield from ((str(number), one) for number, one in enumerate(value))
    elif is_part(value):
        yield from list(value.__dict__.items())
    elif isinstance(value, types.MethodType):
        yield "self", value.__self__
    elif isinstance(value, functools.partial):
        yield from (("func", value.func), ("args", value.args), ("keywords", value.keywords))
    elif isinstance(value, types.FunctionType):
        cells = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        yield from ((name, cell.cell_contents) for name, cell in cells if not _is_empty(cell))


def _is_empty(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is None
    except ValueError:
        return True


def same_form(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and strides."""
    return (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
