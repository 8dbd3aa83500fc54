"""A layer whose weights an engine computes after loading: repacked in parts of a unit, quantized again, or absorbed.

Its loaded weights are kept and patched. The engine's own code then computes what it serves from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from weightwire.engines.layout_probes import PostLoad
from weightwire.engines.skeleton import IsPart, StructureCopier, same_form, tensors_in
from weightwire.errors import EngineError
from weightwire.weights import torch_integer_dtype

__all__ = ["Recomputation", "RecomputedLayer"]


@dataclass(frozen=True)
class RecomputedLayer:
    """`loaded` gives the current values of a parameter of `skeleton`. `targets` are computed, by the path to them."""

    name: str
    skeleton: torch.nn.Module
    loaded: Callable[[torch.Tensor], torch.Tensor | None]
    targets: Mapping[str, torch.Tensor]
    process: PostLoad
    is_part: IsPart

    def compute(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The storages of the running model with their new contents, as integers. Writes nothing."""
        with torch.no_grad():
            copy = StructureCopier(self.is_part, self._filled).copy(self.skeleton)
            self.process(copy)
        found = tensors_in(copy, self.is_part)
        for path, target in self.targets.items():
            if path not in found or not same_form(found[path], target) or _size(found[path]) != _size(target):
                raise EngineError(
                    f"{self.name}{path}: has another form than before when it is computed again",
                    hint="restart the engine with this version",
                )
            yield _units(target), _units(found[path])

    def _filled(self, tensor: torch.Tensor) -> torch.Tensor:
        values = self.loaded(tensor)
        if values is None:
            return tensor.detach().clone() if type(tensor) is torch.Tensor and not tensor.is_meta else tensor
        made: torch.Tensor = values.detach().clone()
        made.__class__ = tensor.__class__
        return made

    def is_current(self) -> bool:
        """Whether the running model holds what its loaded weights give."""
        return all(torch.equal(held, new) for held, new in self.compute())


@dataclass
class Recomputation:
    """A write: computes a layer again from the weights that were written before. A second `swap` undoes it."""

    layer: RecomputedLayer
    _values: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.layer.name

    def swap(self) -> None:
        values = self._values or list(self.layer.compute())
        held = [target.clone() for target, _ in values]  # the last step that can fail
        for target, new in values:
            target.copy_(new)
        self._values = [(target, old) for (target, _), old in zip(values, held, strict=True)]

    def check(self) -> None:
        """Nothing to read back: `RecomputedLayer.is_current` compares after a load."""


def _size(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().nbytes())


def _units(tensor: torch.Tensor) -> torch.Tensor:
    flat = torch.empty(0, dtype=torch_integer_dtype(tensor.element_size()), device=tensor.device)
    return flat.set_(tensor.untyped_storage())
