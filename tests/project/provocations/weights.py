"""Errors of weights: checkpoints that cannot be read, tensors that are refused, files that cannot be written."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from project.provocations.case import WEIGHTS, Case, Provocation
from weightwire import Tensor, diff, digest
from weightwire.weights import DTYPES, Casting, CheckpointWriter, Slot, build_header, read_header
from weightwire.weights.safetensors_file import lay_out
from weightwire.weights.torch_source import read_live

F32, F4 = DTYPES["F32"], DTYPES["F4"]
SCHEMA = {"w": (F32, (6,))}
INDEX = "model.safetensors.index.json"


def one_tensor(name: str = "w") -> bytes:
    return build_header([Slot(name, F32, (6,), 0, 24)], {}) + bytes(24)


def header(text: str | bytes) -> bytes:
    raw = text if isinstance(text, bytes) else text.encode()
    return len(raw).to_bytes(8, "little") + raw


def read(name: str, content: bytes) -> Provocation:
    return lambda case: digest(case.file(name, content))


def read_entry(**entry: Any) -> Provocation:
    """Reads a file whose only tensor has this entry in the header."""
    fields = {"dtype": "F32", "shape": [6], "data_offsets": [0, 24]} | entry
    return read("model.safetensors", header(json.dumps({"w": fields})) + bytes(24))


def tensor(value: Any, name: Any = "w") -> Provocation:
    return lambda case: digest({name: value})


# --- checkpoints -------------------------------------------------------------------------------------------------


def unreadable_file(case: Case) -> None:
    path = case.file("model.safetensors", one_tensor())
    _fail(case, os, "open", PermissionError(errno.EACCES, "Permission denied", str(path)))
    digest(path)


def delta_as_weights(case: Case) -> None:
    diff(WEIGHTS, WEIGHTS).write(case.here / "delta.safetensors")
    digest(case.here / "delta.safetensors")


def index_of_another_checkpoint(case: Case) -> None:
    case.file("model-1.safetensors", one_tensor())
    case.file(INDEX, json.dumps({"weight_map": {"v": "model-1.safetensors"}}))
    digest(case.here)


def missing_shard(case: Case) -> None:
    case.file(INDEX, json.dumps({"weight_map": {"w": "model-2.safetensors"}}))
    digest(case.here)


def malformed_index(case: Case) -> None:
    case.file(INDEX, "{}")
    digest(case.here)


def two_checkpoints_in_one_directory(case: Case) -> None:
    for name in ("a.safetensors", "b.safetensors"):
        case.file(name, one_tensor())
    digest(case.here)


def pickles_only(case: Case) -> None:
    case.file("pytorch_model.bin", b"pickle")
    digest(case.here)


# --- output ------------------------------------------------------------------------------------------------------


def _fail(case: Case, owner: Any, name: str, problem: Exception) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise problem

    case.patch.setattr(owner, name, fail)


def write(case: Case, out: str = "out", *, fill: bool = True, files: dict[str, bytes] | None = None) -> None:
    with CheckpointWriter(case.here / out, schema=SCHEMA, files=files) as writer:
        if fill:
            writer["w"].bits[:] = 1


def write_over(prepare: Callable[[Path], object], out: str = "out") -> Provocation:
    def provoke(case: Case) -> None:
        prepare(case.here / out)
        write(case, out)

    return provoke


def _directory_with_a_file(path: Path) -> None:
    path.mkdir()
    (path / "notes.txt").write_text("mine")


def small_disk(case: Case) -> None:
    case.patch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(0, 0, 10))
    write(case)


def full_disk(case: Case) -> None:
    _fail(case, os, "posix_fallocate", OSError(errno.ENOSPC, "No space left on device"))
    write(case)


def directory_without_write_permission(case: Case) -> None:
    case.patch.setattr(os, "access", lambda path, mode: False)
    write(case, "out.safetensors")


def unreadable_old_output(case: Case) -> None:
    case.file("out.safetensors", one_tensor())
    _fail(case, os, "open", PermissionError(errno.EACCES, "Permission denied"))
    write(case, "out.safetensors")


def nested_header(case: Case) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RecursionError

    case.patch.setattr(json, "loads", fail)
    text = b'{ "x": {"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'  # not as libraries write it: no fast path
    digest(case.file("model.safetensors", len(text).to_bytes(8, "little") + text + b"x"))


def too_large_header(case: Case) -> None:
    case.patch.setattr("weightwire.weights.safetensors_file._MAX_JSON", 10)
    build_header([Slot("w", F32, (6,), 0, 24)], {})


# --- torch -------------------------------------------------------------------------------------------------------


def live_weights(make: Callable[[Any], Any], **settings: Any) -> Provocation:
    """Publishes what `make` builds with torch."""

    def provoke(case: Case) -> None:
        import torch

        read_live(make(torch), Casting(), **settings)

    return provoke


def two_adapters(case: Case) -> None:
    import torch
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(torch.nn.Sequential(torch.nn.Linear(2, 2)), LoraConfig(target_modules=["0"]))
    model.add_adapter("second", LoraConfig(target_modules=["0"]))
    model.base_model.set_adapter(["default", "second"])
    read_live(model, Casting())


def adapter_layers_without_a_config(case: Case) -> None:
    import torch
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(torch.nn.Sequential(torch.nn.Linear(2, 2)), LoraConfig(target_modules=["0"]))
    read_live(torch.nn.Sequential(model.base_model.model[0]), Casting())


def prompt_adapter(case: Case) -> None:
    import torch
    from peft.tuners.tuners_utils import BaseTunerLayer

    class Prompt(BaseTunerLayer, torch.nn.Module):  # type: ignore[misc]
        pass

    class Config:
        is_prompt_learning, peft_type = True, "PROMPT_TUNING"

    model = torch.nn.Sequential(Prompt())
    model.peft_config = {"default": Config()}
    read_live(model, Casting(), merge=True)


def lazy_module(torch: Any) -> Any:
    return torch.nn.LazyLinear(2)


def quantized_tensor(torch: Any) -> Any:
    class Quantized(torch.Tensor):  # type: ignore[misc]
        @classmethod
        def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return function(*args, **(kwargs or {}))

    return {"w": torch.zeros(2).as_subclass(Quantized)}


def tensor_partitioned_by_deepspeed(torch: Any) -> Any:
    empty = torch.zeros(0)
    empty.ds_shape = (4, 4)
    return {"w": empty}


class _Mesh:
    def size(self, dim: int) -> int:
        return 2

    def get_local_rank(self, dim: int) -> int:
        return 0


def sharded_tensor(torch: Any, dim: int = 0, rows: int = 2) -> Any:
    """Imitates a DTensor of shape [4, 4] over two ranks."""
    from torch.distributed.tensor import Shard

    class Sharded(torch.Tensor):  # type: ignore[misc]
        device_mesh = _Mesh()
        placements = (Shard(dim),)

        def full_tensor(self) -> Any:
            return self

        def to_local(self) -> Any:
            return torch.zeros(rows, 4)

    return {"w": torch.zeros(4, 4).as_subclass(Sharded)}


def read_torch(make: Callable[[Any], Any]) -> Provocation:
    def provoke(case: Case) -> None:
        import torch

        digest(make(torch))

    return provoke


def sharded_fused_model(case: Case) -> None:
    import torch
    from transformers import core_model_loading, modeling_utils

    class Model(modeling_utils.PreTrainedModel):  # type: ignore[misc]
        def __init__(self) -> None:
            torch.nn.Module.__init__(self)

        def state_dict(self, **_: Any) -> Any:
            return sharded_tensor(torch)

    case.patch.setattr(core_model_loading, "revert_weight_conversion", lambda model, given: {})
    read_live(Model(), Casting())


def folders_without_end(case: Case) -> None:
    def walk(*_: Any, **__: Any) -> None:
        raise RecursionError

    case.patch.setattr(os, "walk", walk)
    digest(case.here)


PROVOCATIONS: list[Provocation] = [
    lambda case: digest(case.here / "model.safetensors"),
    unreadable_file,
    folders_without_end,
    read("model.bin", b"pickle"),
    read("model.safetensors", b""),
    delta_as_weights,
    index_of_another_checkpoint,
    missing_shard,
    malformed_index,
    two_checkpoints_in_one_directory,
    pickles_only,
    lambda case: digest(case.here),
    # The header of a file
    read("model.safetensors", b"abc"),
    read("model.safetensors", header("{}")[:8] + b"{"),
    read("model.safetensors", (1 << 60).to_bytes(8, "little") + b"{"),
    read("model.safetensors", header("[]")),
    read("model.safetensors", header("{")),
    read("model.safetensors", header(b'{"w": {}, "w": {}}')),
    read("model.safetensors", header('{"__metadata__": {"a": 1}}')),
    read("model.safetensors", header('{"__metadata__": {"a": "\\ud800"}}')),
    read("model.safetensors", header('{"\\ud800": {}}')),
    read("model.safetensors", header('{"w": {}}')),
    read("model.safetensors", one_tensor() + b"more"),
    read_entry(dtype="F99"),
    read_entry(shape=6),
    read_entry(shape=[-1]),
    read_entry(data_offsets=[0]),
    read_entry(data_offsets=[0, 8]),
    read_entry(data_offsets=[1, 25]),
    lambda case: read_header(one_tensor()[:20], "model.safetensors", total=200),
    # Tensors
    lambda case: digest(7),
    tensor(WEIGHTS["w"], name=7),
    tensor("text"),
    tensor(Tensor(F32, (4, 2), np.zeros(4, np.uint32), (3, 9))),
    tensor(Tensor(F4, (2, 3), np.zeros(2, np.uint8), (0, 1))),
    tensor(("F99", (2,), b"")),
    tensor(("F32", "x", b"")),
    tensor(("F32", (2,), "text")),
    tensor(np.array(["text"])),
    tensor(np.zeros((4, 4), np.float32)[:, ::2]),
    tensor(np.zeros(4, ">f4")),
    tensor(("U8", (1,) * 65, b"x")),
    tensor(("F32", (3,), bytes(8))),
    lambda case: lay_out([("w", F4, (3,))]),
    lambda case: Casting.of("int8", None),
    # Output
    lambda case: write(case, files={"../config.json": b""}),
    lambda case: write(case, fill=False),
    write_over(lambda path: path.write_text("mine")),
    write_over(_directory_with_a_file),
    lambda case: write(case, "missing/out.safetensors"),
    write_over(Path.mkdir, "out.safetensors"),
    write_over(lambda path: path.write_text("mine"), "out.safetensors"),
    lambda case: write(case, files={"config": b"", "config/json": b""}),
    small_disk,
    full_disk,
    directory_without_write_permission,
    unreadable_old_output,
    too_large_header,
    nested_header,
    # Torch
    live_weights(lambda torch: torch.zeros(2)),
    live_weights(lambda torch: [1, 2]),
    live_weights(lambda torch: [("module.w", torch.zeros(2)), ("module._orig_mod.w", torch.ones(2))]),
    live_weights(lambda torch: {"layer.lora_A.weight": torch.zeros(2)}),
    two_adapters,
    adapter_layers_without_a_config,
    prompt_adapter,
    live_weights(lazy_module),
    live_weights(quantized_tensor),
    live_weights(lambda torch: {"w": torch.zeros(2, device="meta")}),
    live_weights(tensor_partitioned_by_deepspeed),
    live_weights(lambda torch: {"w": torch.zeros(2, 2).to_sparse()}),
    live_weights(sharded_tensor),
    live_weights(lambda torch: sharded_tensor(torch, dim=1), sharded=True),
    live_weights(lambda torch: sharded_tensor(torch, rows=3), sharded=True),
    sharded_fused_model,
    read_torch(sharded_tensor),
    read_torch(lambda torch: {"w": torch.zeros(2, 2).to_sparse()}),
    read_torch(lambda torch: {"w": torch.zeros(4, 4)[:, ::2]}),
    read_torch(lambda torch: {"w": torch.zeros(2, dtype=torch.complex128)}),
]
