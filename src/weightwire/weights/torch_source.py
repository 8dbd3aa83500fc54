"""What a trainer publishes: a torch module, a state dict or an iterator -> weights, cast to the run's dtypes.

torch is never imported: whoever hands us a tensor has done that. Wrappers' prefixes are stripped from names, tied
weights are listed once, and float32 masters are cast; a tensor is cast, or fetched from its device, only while it is
copied. What is not torch's (files, NumPy arrays, raw buffers) is read as it is.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Self

from weightwire.errors import CheckpointError, WeightwireError
from weightwire.weights.checkpoint import Checkpoint
from weightwire.weights.dtypes import BY_ARRAY_NAME, DTYPES, Dtype
from weightwire.weights.peft import has_adapters, merged, names_of_adapters
from weightwire.weights.source import check_name, read_weights
from weightwire.weights.tensor import Tensor, Weights, refuse
from weightwire.weights.torch_tensor import LiveTensor, is_torch_tensor

__all__ = ["DEFAULT_DTYPE", "Casting", "as_mapping", "plain_names", "read_live", "untie", "unwrapped"]

DEFAULT_DTYPE = "bfloat16"
"""What a trainer's float32 weights are cast to, unless it says otherwise."""

# What torch puts into the names of weights: compiled modules, activation checkpointing, FSDP.
_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}
_PARALLEL = "module."  # DistributedDataParallel and DataParallel, around everything
_EXTRA = "_extra_state"  # what a module keeps beside its weights, of whatever kind
_AS_SAVED = "publish an iterator of names and full tensors, as they are in its checkpoint"
_MERGE = "publish the module with merge=True, or what merge_and_unload() makes of a copy"


# --- what is to be published -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Casting:
    """In which dtypes floats are published: float32 in `dtype` (None: as they are), unless a pattern says otherwise.

    `patterns` are of names; the first that fits counts, for floats of all widths. In a run that has begun, its own
    dtypes do.
    """

    dtype: Dtype | None = DTYPES["BF16"]
    patterns: tuple[tuple[str, Dtype], ...] = ()

    @classmethod
    def of(cls, dtype: Any, dtypes: Mapping[str, Any] | None) -> Self:
        """From names of dtypes, or torch's own."""
        patterns = tuple((pattern, _float(chosen)) for pattern, chosen in (dtypes or {}).items())
        return cls(None if dtype is None else _float(dtype), patterns)

    def choose(self, name: str, dtype: Dtype, run: Mapping[str, Dtype]) -> Dtype:
        if not dtype.is_castable:
            return dtype
        if name in run:
            return run[name] if run[name].is_castable else dtype
        for pattern, chosen in self.patterns:
            if fnmatchcase(name, pattern):
                return chosen
        return self.dtype if self.dtype is not None and dtype == DTYPES["F32"] else dtype


def _float(dtype: Any) -> Dtype:
    found = BY_ARRAY_NAME.get(str(dtype).removeprefix("torch."))
    if found is None or not found.is_castable:
        known = ", ".join(one.array_name for one in DTYPES.values() if one.is_castable)
        raise WeightwireError(f"weights cannot be cast to {dtype}", hint=f"choose one of {known}")
    return found


def read_live(
    source: Any,
    casting: Casting,
    run: Mapping[str, Dtype] | None = None,
    *,
    merge: bool = False,
    sharded: bool = False,
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Weights to be published; and of tied ones, which are listed once, the other names and whose they are.

    `source` is a torch module, a mapping of names to tensors, an iterator of names and tensors, or a checkpoint. An
    iterator is read to its end, and all that it yields is held until it has been copied: each must be memory of its
    own. `run` are the dtypes of the run, if that has begun. `merge` merges adapters into the weights. Of a tensor that
    is `sharded` over ranks which all publish it gives the rows that are here, if there are any.
    """
    run = {} if run is None else run
    if isinstance(source, str | os.PathLike | Checkpoint):
        return untie(read_weights(source), run)
    pairs = _pairs(source, merge)
    if not any(is_torch_tensor(value) for _, value in pairs):
        return untie(read_weights(as_mapping(pairs)), run)
    given = _as_saved(as_mapping(plain_names(pairs)), source)
    _check_no_adapters(given)
    kept, aliases = untie(_TorchReader(sharded).read(given), run)
    for name, tensor in kept.items():
        if isinstance(tensor, LiveTensor):
            kept[name] = tensor.cast(casting.choose(name, tensor.dtype, run))
    return kept, aliases


def untie(weights: Weights, known: Container[str] = ()) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Of tensors that are the very same memory one each; and whose memory the others share.

    It is the one whose name is `known`, else the first; and it comes where the first of them was.
    """
    groups: dict[tuple[object, ...], list[str]] = {}
    for name in weights:
        tensor = weights[name]
        place = name if tensor.place is None else tensor.place
        groups.setdefault((place, tensor.dtype, tensor.shape, tensor.rows), []).append(name)
    chosen = [(min(group, key=lambda one: one not in known), group) for group in groups.values()]
    kept = {name: weights[name] for name, _ in chosen}
    return kept, {other: name for name, group in chosen for other in group if other != name}


# --- names -------------------------------------------------------------------------------------------------------


def _pairs(source: Any, merge: bool) -> list[tuple[Any, Any]]:
    """Names and tensors, whatever lists them."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(source, torch.nn.Module):
        return _of_module(source, merge)
    if not isinstance(source, Mapping) and callable(getattr(source, "state_dict", None)):
        source = source.state_dict()
    if isinstance(source, Mapping):
        return [(name, source[name]) for name in source]
    if not isinstance(source, Iterable) or hasattr(source, "dtype"):  # a tensor is iterable, too
        raise CheckpointError(
            f"weights cannot be read from a {type(source).__name__}",
            hint="pass a module, a mapping or an iterator of names and tensors, or a path",
        )
    pairs = list(source)
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise CheckpointError("an iterator of weights must yield names and tensors", hint="such as named_parameters()")
    return pairs


def _of_module(module: Any, merge: bool) -> list[tuple[Any, Any]]:
    if not has_adapters(module):
        # The parameters themselves: views of them, detached, no longer say what kind they are.
        return list(module.state_dict(keep_vars=True).items())
    if not merge:
        raise CheckpointError("this model has adapters (PEFT), which no inference server would find", hint=_MERGE)
    return list(merged(module))


def plain_names(pairs: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Names without what wrappers add to them, and without what is no weight."""
    plain = [
        (".".join(part for part in name.split(".") if part not in _WRAPPERS), value)
        for name, value in pairs
        if check_name(name).rpartition(".")[2] != _EXTRA
    ]
    if all(name.startswith(_PARALLEL) for name, _ in plain):
        return [(name.removeprefix(_PARALLEL), value) for name, value in plain]
    return plain


def unwrapped(model: Any) -> Any:
    """The model inside of what is put around it to compile, distribute or adapt it."""
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
    """A transformers model's weights under the names, and cut as, it would save them: it may have fused its experts."""
    models, loading = sys.modules.get("transformers.modeling_utils"), sys.modules.get("transformers.core_model_loading")
    revert = getattr(loading, "revert_weight_conversion", None)
    model = unwrapped(source) if revert is not None else None
    if revert is None or models is None or not isinstance(model, models.PreTrainedModel):
        return given
    # First without the weights: most models have nothing to revert, and then theirs stay as they are.
    torch = sys.modules["torch"]
    shapes = {name: torch.empty(value.shape, dtype=value.dtype, device="meta") for name, value in given.items()}
    saved = revert(model, shapes)
    if saved.keys() == shapes.keys() and all(saved[name] is shapes[name] for name in shapes):
        return given
    for name in (name for name, value in given.items() if hasattr(value, "full_tensor")):
        refuse(name, "is sharded, in a model that saves its weights in another form", _AS_SAVED)
    with torch.no_grad():
        return dict(revert(model, given))


def as_mapping(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    """Names and tensors by name; none may be there twice."""
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise CheckpointError(f"tensor {twice!r}: is there twice", hint="names must differ, wrappers' prefixes apart")
    return mapping


def _check_no_adapters(names: Iterable[str]) -> None:
    for name in names_of_adapters(names):
        raise CheckpointError(f"tensor {name!r}: is part of an adapter (PEFT), or under one", hint=_MERGE)


# --- ranks and devices -------------------------------------------------------------------------------------------


class _TorchReader:
    """Reads the tensors of one version, and notes for each GPU at which point of its work that was."""

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
        """What this rank holds of a sharded tensor; as torch cuts it, the last ranks may hold less, or nothing."""
        local, mesh = value.detach().to_local(), value.device_mesh
        cut = [dim for dim, one in enumerate(value.placements) if not one.is_replicate() and mesh.size(dim) > 1]
        if not cut or not value.shape[0]:
            return local, None
        if len(cut) > 1 or type(one := value.placements[cut[0]]).__name__ != "Shard" or one.dim != 0:
            refuse(
                name, f"is placed as {value.placements}", "shard it by rows, in one way only, or pass its full_tensor()"
            )
        if not self._sharded:
            refuse(
                name,
                f"is sharded over {mesh.size(cut[0])} ranks",
                "make a Publisher(ranks=weightwire.trainers.torch.Ranks()) on each of them, or pass its full_tensor()",
            )
        most = -(-value.shape[0] // mesh.size(cut[0]))
        first = min(mesh.get_local_rank(cut[0]) * most, value.shape[0])
        last = min(first + most, value.shape[0])
        if tuple(local.shape) != (last - first, *value.shape[1:]):
            refuse(name, f"{list(local.shape)} is not what rows {first} to {last} should be", "pass its full_tensor()")
        return local, (first, last)

    def _ready(self, device: Any) -> Any:
        if device.type == "cuda" and device not in self._events:
            self._events[device] = sys.modules["torch"].cuda.current_stream(device).record_event()
        return self._events.get(device)


def _check(name: str, value: Any) -> None:
    torch, kind = sys.modules["torch"], type(value)
    if torch.nn.parameter.is_lazy(value):
        refuse(name, "has no shape yet", "run the model once before its weights are published")
    if kind.__module__.startswith("bitsandbytes") or kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        refuse(name, f"is a {kind.__name__}, which holds more than bits", "publish weights that are not quantised")
    if value.device.type == "meta":
        refuse(name, "is on the meta device: its weights are elsewhere", "load them first, or turn off offloading")
    if hasattr(value, "ds_shape") and not value.numel():
        refuse(name, "is spread over ranks by DeepSpeed", "publish inside deepspeed.zero.GatheredParameters")
    if value.layout != torch.strided:
        refuse(name, f"is a {value.layout} tensor", "pass a dense copy: .to_dense()")
