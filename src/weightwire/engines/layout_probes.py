"""What an engine does to weights after loading them, learned by probes.

Runs the engine's own processing on a copy of a layer whose weights are numbered: the bits of each weight are a part of
its number. Where a number turns up afterwards, its weight was copied to. Numbers that do not fit into a weight take
several probes. A last probe with other bits tells copies from values that only look like a number.

Slices of a tensor (experts) that are all laid out alike share one table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from weightwire.engines.skeleton import IsPart, StructureCopier, numbers_in, opaque_in, tensors_in
from weightwire.engines.weight_map import storage_of
from weightwire.weights import torch_integer_dtype

__all__ = ["PostLoad", "ProcessedLayout", "Relayout", "probe"]

PostLoad = Callable[[torch.nn.Module], object]
"""What the engine does to a layer after loading its weights."""

Numbers = npt.NDArray[np.int64]
_StorageUnits = npt.NDArray[np.unsignedinteger[Any]]

_CHUNK = 1 << 22
_MIX = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class Relayout:
    """Where the units of a loaded tensor's storage are in a storage of the running model.

    `table` has a position in the target for each unit of a slice, or -1. From slice to slice, positions grow by
    `len(table)` in the loaded storage, and by `target_stride` in the target. `target` is the path to a tensor in the
    target storage, and `size` the number of units there.
    """

    target: str
    size: int
    table: npt.NDArray[np.integer[Any]]
    slices: int = 1
    target_stride: int = 0

    def fits(self, tensor: torch.Tensor) -> bool:
        """Whether this tensor's storage has the size of the target."""
        return int(tensor.untyped_storage().nbytes()) == self.size * int(tensor.element_size())


@dataclass(frozen=True)
class ProcessedLayout:
    """Where the weights of a layer are after processing, by the path of the loaded parameter.

    Those that are not in `moved` are still where they were loaded, besides their copies in `relayouts`. `aliases` are
    other tensors that share their storages. If some tensors are computed and not copied, `recomputed` are the paths to
    all tensors that depend on the weights. `gone` parameters no longer exist: those of their weights that are nowhere
    have no effect. Parameters in `read` may have become plain numbers, which cannot be patched. If `problem` is not
    empty, weights of other parameters are lost or hidden, and the layer cannot be patched.
    """

    relayouts: Mapping[str, tuple[Relayout, ...]]
    moved: frozenset[str]
    aliases: frozenset[str] = frozenset()
    recomputed: tuple[str, ...] = ()
    gone: frozenset[str] = frozenset()
    read: frozenset[str] = frozenset()
    problem: str = ""


def probe(layer: torch.nn.Module, process: PostLoad, is_part: IsPart) -> ProcessedLayout:
    """Learns what `process` does to a layer. The layer's parameters may be on the meta device."""
    return _Probes(layer, process, is_part).run()


# --- numbers as bits ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Code:
    """How a probe writes numbers as bits: one digit of them, or noise."""

    digit: int = 0
    noise: int = 0

    def bits(self, numbers: Numbers, width: int) -> _StorageUnits:
        """`width` is in bytes."""
        wide = numbers.astype(np.uint64)
        if self.noise:
            mixed = (wide + np.uint64(self.noise)) * _MIX
            shifted = (mixed ^ (mixed >> np.uint64(31))) * _MIX >> np.uint64(64 - 8 * width)
        else:
            shift = 8 * width * self.digit
            shifted = wide >> np.uint64(shift) if shift < 64 else np.zeros_like(wide)
        return shifted.astype(f"<u{width}")


_FIRST_NOISE, _SECOND_NOISE = _Code(noise=1), _Code(noise=1 << 40)


@dataclass(frozen=True)
class _Source:
    """A loaded parameter. Its units are numbered from `first`."""

    path: str
    tensor: torch.Tensor
    first: int

    @property
    def units(self) -> int:
        return int(self.tensor.untyped_storage().nbytes()) // int(self.tensor.element_size())

    def chunks(self) -> Iterator[tuple[slice, Numbers]]:
        for begin in range(0, self.units, _CHUNK):
            end = min(self.units, begin + _CHUNK)
            yield slice(begin, end), np.arange(self.first + begin, self.first + end)


def _flat_units(tensor: torch.Tensor) -> _StorageUnits:
    """The whole storage of a tensor, in units of its width."""
    flat = torch.empty(0, dtype=torch_integer_dtype(tensor.element_size()), device=tensor.device)
    units: Any = flat.set_(tensor.untyped_storage()).cpu().numpy()
    found: _StorageUnits = units.view(f"<u{tensor.element_size()}")
    return found


@dataclass(frozen=True)
class _Processed:
    """A layer after processing, with the storages of its loaded parameters."""

    tensors: dict[str, torch.Tensor]
    loaded: dict[str, torch.Tensor]
    numbers: dict[str, float]
    opaque: dict[str, str]


class _Probes:
    def __init__(self, layer: torch.nn.Module, process: PostLoad, is_part: IsPart) -> None:
        self._layer, self._process, self._is_part = layer, process, is_part
        self._sources: dict[int, _Source] = {}
        number = 1  # 0 stands for units that hold no weight
        for name, tensor in layer.named_parameters():
            source = self._sources[id(tensor)] = _Source(f".{name}", tensor, number)
            number += source.units
        self._end = number

    def run(self) -> ProcessedLayout:
        first = self._processed(_FIRST_NOISE)
        moved = frozenset(one.path for one in self._sources.values() if not self._stays(one, first))
        kept = {storage_of(one) for path, one in first.loaded.items() if path not in moved}
        others = {path: one for path, one in first.tensors.items() if storage_of(one) not in kept}
        aliases = frozenset(path for path in first.tensors if path not in others and path not in first.loaded)
        second = self._processed(_SECOND_NOISE)
        scalars = frozenset(one.path for one in self._sources.values() if one.units == 1) - first.tensors.keys()
        numbers = self._numbers_from(first, second)
        read = scalars if numbers else frozenset[str]()
        hidden = self._hidden(first) or (self._read_weights(first, scalars) if numbers else "")
        if hidden or (not others and not moved):
            return ProcessedLayout({}, moved, aliases, read=read, problem=hidden)
        varying = [path for path in _one_per_storage(others) if self._varies(path, first, second)]
        again = self._processed(_FIRST_NOISE) if varying else first
        varying = [path for path in varying if not self._varies(path, first, again)]  # others were never initialized
        readings = [first, second, *(self._processed(_Code(digit)) for digit in range(self._digits(first, varying)))]
        relayouts: dict[str, tuple[Relayout, ...]] = {}
        recomputed: tuple[str, ...] = ()
        for path in varying:
            found = self._relayouts(path, readings)
            if found is None:
                relayouts, recomputed = {}, tuple(varying)
                break
            for source, several in found.items():
                relayouts[source] = (*relayouts.get(source, ()), *several)
        lost = self._without_effect(moved, varying, first) if recomputed else self._lost(moved, relayouts)
        gone = frozenset(path for path in moved if path not in first.tensors)
        problem = next((f"{path[1:]}: {why}" for path, why in lost.items() if path not in gone), "")
        return ProcessedLayout(relayouts, moved, aliases, recomputed, gone, read, problem)

    # --- running the engine's code -----------------------------------------------------------------------------------

    def _processed(self, code: _Code, others: Mapping[str, _Code] | None = None) -> _Processed:
        loaded: dict[str, torch.Tensor] = {}

        def filled(tensor: torch.Tensor) -> torch.Tensor:
            source = self._sources.get(id(tensor))
            if source is None:
                return tensor.detach().clone() if type(tensor) is torch.Tensor and not tensor.is_meta else tensor
            made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")
            units = _flat_units(made)
            for span, numbers in source.chunks():
                units[span] = (others or {}).get(source.path, code).bits(numbers, made.element_size())
            loaded[source.path] = made.detach()
            made.__class__ = tensor.__class__
            return made

        copy = StructureCopier(self._is_part, filled).copy(self._layer)
        with torch.no_grad():
            self._process(copy)
        tensors, numbers = tensors_in(copy, self._is_part), numbers_in(copy, self._is_part)
        return _Processed(tensors, loaded, numbers, opaque_in(copy, self._is_part))

    def _digits(self, first: _Processed, paths: list[str]) -> int:
        narrowest = min((first.tensors[path].element_size() for path in paths), default=8)
        return -(-self._end.bit_length() // (8 * narrowest)) if paths else 0

    def _without_effect(self, moved: frozenset[str], paths: list[str], first: _Processed) -> dict[str, str]:
        """The moved parameters on which no tensor depends: their weights are somewhere that probes cannot see."""
        lost = {}
        for source in self._sources.values():
            if source.path in moved:
                other = self._processed(_FIRST_NOISE, {source.path: _SECOND_NOISE})
                if not any(self._varies(path, first, other) for path in paths):
                    lost[source.path] = "its weights are nowhere after loading"
        return lost

    def _hidden(self, after: _Processed) -> str:
        """An object of the engine that may hold copies of weights, made by the processing. Empty if there is none."""
        before = opaque_in(self._layer, self._is_part)
        return next(
            (f"{path[1:]}: keeps weights where they cannot be reached ({kind})" for path, kind in after.opaque.items()
             if before.get(path) != kind),
            "",
        )  # fmt: skip

    def _numbers_from(self, first: _Processed, second: _Processed) -> list[str]:
        """The plain numbers that depend on the weights."""
        varying = [path for path, number in first.numbers.items() if not _is_same(number, second.numbers.get(path))]
        again = self._processed(_FIRST_NOISE).numbers if varying else {}
        return [path for path in varying if _is_same(first.numbers[path], again.get(path))]

    def _read_weights(self, first: _Processed, scalars: frozenset[str]) -> str:
        """A plain number that is computed from other weights than these scalars. Empty if there is none."""
        found = self._numbers_from(first, self._processed(_SECOND_NOISE, dict.fromkeys(scalars, _FIRST_NOISE)))
        return f"{found[0][1:]}: is a number that is computed from weights" if found else ""

    # --- reading -----------------------------------------------------------------------------------------------------

    def _stays(self, source: _Source, after: _Processed) -> bool:
        """Whether a parameter still has its place and its values."""
        now, then = after.tensors.get(source.path), after.loaded[source.path]
        if now is None or storage_of(now) != storage_of(then) or now.shape != then.shape:
            return False
        units = _flat_units(then)
        return all(
            np.array_equal(units[span], _FIRST_NOISE.bits(numbers, then.element_size()))
            for span, numbers in source.chunks()
        )

    def _varies(self, path: str, first: _Processed, second: _Processed) -> bool:
        """Whether a tensor depends on the weights."""
        one, other = first.tensors[path], second.tensors.get(path)
        return other is None or not np.array_equal(_flat_units(one), _flat_units(other))

    def _relayouts(self, path: str, readings: list[_Processed]) -> dict[str, list[Relayout]] | None:
        tensors = [one.tensors.get(path) for one in readings]
        if any(one is None for one in tensors):
            return None
        target = tensors[0]
        assert target is not None
        units = [_flat_units(one) for one in tensors if one is not None]
        if any(len(one) != len(units[0]) for one in units):
            return None
        if target.ndim > 2 and len(target) > 1 and len(units[0]) == target.numel():
            sliced = self._sliced(path, units, len(target))
            if sliced is not None:
                return sliced
        numbers = self._numbers(units, slice(None))
        return None if numbers is None else self._tables(path, numbers)

    def _sliced(self, path: str, units: list[_StorageUnits], count: int) -> dict[str, list[Relayout]] | None:
        """The tables of the first slice, if all others are laid out alike and come from one parameter."""
        size = len(units[0]) // count
        numbers = self._numbers(units, slice(0, size))
        if numbers is None or not numbers.any():
            return None
        source = next(one for one in self._sources.values() if numbers.max() < one.first + one.units)
        stride, rest = divmod(source.units, count)
        held = numbers[numbers > 0] - source.first
        if rest or held.min() < 0 or held.max() >= stride:
            return None
        for index in range(1, count):
            other = self._numbers(units, slice(index * size, (index + 1) * size))
            if other is None or not np.array_equal(other, np.where(numbers > 0, numbers + index * stride, 0)):
                return None
        tables = _tables_of(held, np.flatnonzero(numbers), stride)
        return {source.path: [Relayout(path, len(units[0]), table, count, size) for table in tables]}

    def _numbers(self, units: list[_StorageUnits], span: slice) -> Numbers | None:
        """The number in each unit, 0 for constants. None if some units are neither."""
        noise, other, *digits = (one[span] for one in units)
        width = noise.dtype.itemsize
        numbers = np.zeros(len(noise), np.int64)
        for digit, held in enumerate(digits):
            numbers |= held.astype(np.int64) << (8 * width * digit)
        inside = (numbers > 0) & (numbers < self._end)
        is_copy = inside & (_FIRST_NOISE.bits(np.where(inside, numbers, 0), width) == noise)
        if not (is_copy | (noise == other)).all():
            return None
        return np.where(is_copy, numbers, 0)

    def _tables(self, path: str, numbers: Numbers) -> dict[str, list[Relayout]]:
        found: dict[str, list[Relayout]] = {}
        for source in self._sources.values():
            at = np.flatnonzero((numbers >= source.first) & (numbers < source.first + source.units))
            if len(at):
                tables = _tables_of(numbers[at] - source.first, at, source.units)
                found[source.path] = [Relayout(path, len(numbers), table) for table in tables]
        return found

    def _lost(self, moved: frozenset[str], relayouts: Mapping[str, tuple[Relayout, ...]]) -> dict[str, str]:
        """The moved parameters with units that are nowhere after processing."""
        lost = {}
        for source in self._sources.values():
            if source.path not in moved:
                continue
            found = relayouts.get(source.path, ())
            held = np.zeros(len(found[0].table) if found else source.units, np.bool_)
            for one in found:
                held |= one.table >= 0
            if not held.all():
                missing = int((~held).sum()) * (found[0].slices if found else 1)
                lost[source.path] = f"{missing} of {source.units} weights are nowhere after loading"
        return lost


def _is_same(one: float, other: float | None) -> bool:
    """Also for NaN, which is not equal to itself."""
    return repr(one) == repr(other)


def _one_per_storage(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """A path to each storage, preferably to a tensor that covers it."""
    best: dict[int, str] = {}
    for path, tensor in tensors.items():
        held = best.get(storage_of(tensor))
        if held is None or tensor.numel() > tensors[held].numel():
            best[storage_of(tensor)] = path
    return list(best.values())


def _tables_of(sources: Numbers, targets: Numbers, size: int) -> Iterator[npt.NDArray[np.integer[Any]]]:
    """Tables from sources to targets. A source with several targets needs several."""
    dtype = np.int32 if int(targets.max()) < 1 << 31 else np.int64
    while len(sources):
        table: npt.NDArray[np.integer[Any]] = np.full(size, -1, dtype)
        table[sources] = targets  # the last one stays
        rest = table[sources] != targets
        yield table
        sources, targets = sources[rest], targets[rest]
