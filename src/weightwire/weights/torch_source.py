"""Reads the weights that a trainer publishes: a torch module, a state dict or an iterator, cast to the run's dtypes.

Never imports torch: a caller that passes a tensor has imported it. Wrapper prefixes are stripped from names, tied
weights are listed once, and float32 master weights are cast. A tensor is cast, or fetched from its device, only while
it is copied. Files, NumPy arrays and raw buffers are read unchanged.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Self

from weightwire.errors import CheckpointError
from weightwire.weights.adapter import adapter_weights
from weightwire.weights.checkpoint import Checkpoint
from weightwire.weights.dtypes import BY_ARRAY_NAME, DTYPES, Dtype
from weightwire.weights.peft import has_adapters, merged, names_of_adapters
from weightwire.weights.source import check_name, read_weights
from weightwire.weights.tensor import Tensor, Weights, places_of, refuse
from weightwire.weights.torch_tensor import LiveTensor, is_torch_tensor

__all__ = ["DEFAULT_DTYPE", "Casting", "as_mapping", "plain_names", "read_live", "untie", "unwrapped"]

DEFAULT_DTYPE = "bfloat16"
"""The dtype that float32 weights of a trainer are cast to by default."""

# Parts of names that wrappers add: compiled modules, activation checkpointing, FSDP.
_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}
_PARALLEL = "module."  # DistributedDataParallel and DataParallel, around the whole model
_EXTRA = "_extra_state"  # not weights
_AS_SAVED = "publish an iterator of names and full tensors, as they are in its checkpoint"
_MODEL = "pass the PEFT model itself: publish(model) for its adapter, publish(model, merge=True) for merged weights"


# --- sources -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Casting:
    """The dtypes in which floats are published.

    float32 tensors are cast to the dtype of the run. In a new run they are cast to `dtype`, or kept if it is None.
    `patterns` match names and apply to floats of all widths; the first match wins. Other tensors are never cast.
    """

    dtype: Dtype | None = DTYPES["BF16"]
    patterns: tuple[tuple[str, Dtype], ...] = ()

    @classmethod
    def of(cls, dtype: Any, dtypes: Mapping[str, Any] | None) -> Self:
        """From names of dtypes, or torch dtypes."""
        patterns = tuple((pattern, _float(chosen)) for pattern, chosen in (dtypes or {}).items())
        return cls(None if dtype is None else _float(dtype), patterns)

    def choose(self, name: str, dtype: Dtype, run: Mapping[str, Dtype]) -> Dtype:
        if not dtype.is_castable:
            return dtype
        is_master = dtype == DTYPES["F32"]
        if is_master and name in run:
            return run[name] if run[name].is_castable else dtype
        for pattern, chosen in self.patterns:
            if fnmatchcase(name, pattern):
                return chosen
        return self.dtype if self.dtype is not None and is_master else dtype


def _float(dtype: Any) -> Dtype:
    found = BY_ARRAY_NAME.get(str(dtype).removeprefix("torch."))
    if found is None or not found.is_castable:
        known = ", ".join(one.array_name for one in DTYPES.values() if one.is_castable)
        raise CheckpointError(f"weights cannot be cast to {dtype}", hint=f"use one of {known}")
    return found


def read_live(
    source: Any,
    casting: Casting,
    run: Mapping[str, Dtype] | None = None,
    *,
    merge: bool = False,
    sharded: bool = False,
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The weights to publish, and the aliases of tied weights, which are listed once.

    - `source`: a torch module, a mapping of names to tensors, an iterator of names and tensors, or a checkpoint. All
      tensors of an iterator are held until they are copied, so each needs separate memory.
    - `run`: the dtypes of the run, if it exists.
    - `merge`: merges adapters into the weights. Otherwise a model with adapters gives the weights of its active one.
    - `sharded`: all ranks publish, so a sharded tensor gives the rows of this rank.
    """
    run = {} if run is None else run
    if isinstance(source, str | os.PathLike | Checkpoint):
        return untie(read_weights(source), run)
    if type(source) is dict and not _has_torch(source.values()):
        return untie(read_weights(source), run)
    aliases: dict[str, str] = {}
    if not merge and _is_module(source) and has_adapters(source):
        # As PEFT saves them: a tensor that two layers share is saved twice.
        kept = _TorchReader(sharded).read(as_mapping(plain_names(adapter_weights(source))))
    else:
        pairs = _pairs(source)
        if not _has_torch(value for _, value in pairs):
            return untie(read_weights(as_mapping(pairs)), run)
        given = _as_saved(as_mapping(plain_names(pairs)), source)
        _check_no_adapters(given)
        kept, aliases = untie(_TorchReader(sharded).read(given), run)
    for name, tensor in kept.items():
        if isinstance(tensor, LiveTensor):
            kept[name] = tensor.cast(casting.choose(name, tensor.dtype, run))
    return kept, aliases


def _has_torch(values: Iterable[Any]) -> bool:
    """Whether one of them is a torch tensor. Asks once for each type."""
    return any(map(is_torch_tensor, {type(value): value for value in values}.values()))


def untie(weights: Weights, known: Container[str] = ()) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Lists tensors that share memory once. Also returns the other names, each with the name that is kept.

    Keeps the name that is in `known`, or the first, at the position of the first.
    """
    places = places_of([*weights.values()])
    if len({*places} - {None}) == len(places) - places.count(None):  # no memory is shared
        return {**weights}, {}
    groups: dict[tuple[object, ...], list[str]] = {}
    for name in weights:
        tensor = weights[name]
        place = name if tensor.place is None else tensor.place
        groups.setdefault((place, tensor.dtype, tensor.shape, tensor.rows), []).append(name)
    chosen = [(min(group, key=lambda one: one not in known), group) for group in groups.values()]
    kept = {name: weights[name] for name, _ in chosen}
    return kept, {other: name for name, group in chosen for other in group if other != name}


# --- names -------------------------------------------------------------------------------------------------------


def _is_module(source: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(source, torch.nn.Module)


def _pairs(source: Any) -> list[tuple[Any, Any]]:
    """The names and tensors of any source. Adapters of a module are merged."""
    if _is_module(source):
        # keep_vars: detached views lose the type of the parameter.
        return list(merged(source) if has_adapters(source) else source.state_dict(keep_vars=True).items())
    if not isinstance(source, Mapping) and callable(getattr(source, "state_dict", None)):
        source = source.state_dict()
    if isinstance(source, Mapping):
        return [(name, source[name]) for name in source]
    if not isinstance(source, Iterable) or hasattr(source, "dtype"):  # a tensor is iterable
        raise CheckpointError(
            f"weights cannot be read from {type(source).__name__}",
            hint="pass a module, a mapping or an iterator of names and tensors, or a path",
        )
    pairs = list(source)
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise CheckpointError(
            "the iterator of weights must yield names and tensors", hint="pass model.named_parameters()"
        )
    return pairs


def plain_names(pairs: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Strips wrapper prefixes from names and drops entries that are not weights."""
    plain = [
        (".".join(part for part in name.split(".") if part not in _WRAPPERS), value)
        for name, value in pairs
        if check_name(name).rpartition(".")[2] != _EXTRA
    ]
    if all(name.startswith(_PARALLEL) for name, _ in plain):
        return [(name.removeprefix(_PARALLEL), value) for name, value in plain]
    return plain


def unwrapped(model: Any) -> Any:
    """The model without wrappers that compile, distribute or adapt it."""
    torch = sys.modules["torch"]
    while True:
        inner = getattr(model, "_orig_mod", getattr(model, "module", None))
        if hasattr(model, "get_base_model"):
            model = model.get_base_model()
        elif isinstance(inner, torch.nn.Module):
            model = inner
        else:
            return model


def _as_saved(given: dict[str, Any], source: Any) -> dict[str, Any]:
    """A transformers model's weights as `save_pretrained` would write them: the model may have fused its experts."""
    models, loading = sys.modules.get("transformers.modeling_utils"), sys.modules.get("transformers.core_model_loading")
    revert = getattr(loading, "revert_weight_conversion", None)
    model = unwrapped(source) if revert is not None else None
    if revert is None or models is None or not isinstance(model, models.PreTrainedModel):
        return given
    # Try on the meta device first: most models have nothing to revert.
    torch = sys.modules["torch"]
    shapes = {name: torch.empty(value.shape, dtype=value.dtype, device="meta") for name, value in given.items()}
    saved = revert(model, shapes)
    if saved.keys() == shapes.keys() and all(saved[name] is shapes[name] for name in shapes):
        return given
    for name in (name for name, value in given.items() if hasattr(value, "full_tensor")):
        refuse(name, "is sharded, and this model saves its weights in another layout", _AS_SAVED)
    with torch.no_grad():
        return dict(revert(model, given))


def as_mapping(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    """Names and tensors as a mapping. Raises if a name occurs twice."""
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise CheckpointError(
            f"tensor {twice!r}: occurs twice", hint="names must differ after wrapper prefixes are stripped"
        )
    return mapping


def _check_no_adapters(names: Iterable[str]) -> None:
    for name in names_of_adapters(names):
        raise CheckpointError(f"tensor {name!r}: belongs to a PEFT adapter", hint=_MODEL)


# --- ranks and devices -------------------------------------------------------------------------------------------


class _TorchReader:
    """Reads the tensors of one version. Records an event on each GPU, after which the weights are complete."""

    def __init__(self, sharded: bool) -> None:
        self._sharded = sharded
        self._events: dict[Any, Any] = {}

    def read(self, given: Mapping[str, Any]) -> dict[str, Tensor]:
        read = {name: self._tensor(name, value) for name, value in given.items()}
        return {name: tensor for name, tensor in read.items() if tensor is not None}

    def _tensor(self, name: str, value: Any) -> Tensor | None:
        if not is_torch_tensor(value):
            return read_weights({name: value})[name]
        local, rows = self._rows(name, value) if hasattr(value, "full_tensor") else (value, None)
        if rows is not None and rows[0] == rows[1]:
            return None
        _check(name, local)
        return LiveTensor.of(name, local.detach(), tuple(value.shape), self._ready(local.device), rows)

    def _rows(self, name: str, value: Any) -> tuple[Any, tuple[int, int] | None]:
        """The rows of a sharded tensor on this rank. The last ranks may hold fewer rows or none."""
        local, mesh = value.detach().to_local(), value.device_mesh
        cut = [dim for dim, one in enumerate(value.placements) if not one.is_replicate() and mesh.size(dim) > 1]
        if not cut or not value.shape[0]:
            return local, None
        if len(cut) > 1 or type(one := value.placements[cut[0]]).__name__ != "Shard" or one.dim != 0:
            refuse(
                name,
                f"is placed as {value.placements}",
                "shard it by rows on one mesh dimension, or pass full_tensor()",
            )
        if not self._sharded:
            refuse(
                name,
                f"is sharded over {mesh.size(cut[0])} ranks",
                "create Publisher(ranks=weightwire.trainers.torch.Ranks()) on every rank, or pass full_tensor()",
            )
        most = -(-value.shape[0] // mesh.size(cut[0]))
        first = min(mesh.get_local_rank(cut[0]) * most, value.shape[0])
        last = min(first + most, value.shape[0])
        if tuple(local.shape) != (last - first, *value.shape[1:]):
            refuse(name, f"shard {list(local.shape)} does not fit rows {first} to {last}", "pass full_tensor()")
        return local, (first, last)

    def _ready(self, device: Any) -> Any:
        if device.type == "cuda" and device not in self._events:
            self._events[device] = sys.modules["torch"].cuda.current_stream(device).record_event()
        return self._events.get(device)


def _check(name: str, value: Any) -> None:
    torch, kind = sys.modules["torch"], type(value)
    if torch.nn.parameter.is_lazy(value):
        refuse(name, "has no shape yet", "run the model once before you publish its weights")
    if kind.__module__.startswith("bitsandbytes") or kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        refuse(name, f"has type {kind.__name__}, which is not plain bits", "publish weights that are not quantized")
    if value.device.type == "meta":
        refuse(name, "is on the meta device and has no weights", "load them first, or turn off offloading")
    if hasattr(value, "ds_shape") and not value.numel():
        refuse(name, "is partitioned by DeepSpeed", "publish inside deepspeed.zero.GatheredParameters")
    if value.layout != torch.strided:
        refuse(name, f"has layout {value.layout}", "pass a dense copy: .to_dense()")
