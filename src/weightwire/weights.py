"""1 read: weights from files or from memory, as named flat arrays of bits.

Knows safetensors files, Hugging Face checkpoint directories, NumPy arrays, torch tensors and raw buffers, and
copies none of them: what it returns are views. torch is never imported; whoever hands us a torch tensor has
done that already. Writes nothing, and does not know what a delta is.
"""

from __future__ import annotations

import json
import mmap
import operator
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, Protocol, Self

import numpy as np
import numpy.typing as npt

from weightwire.container import MAX_DIMS, MAX_INT, METADATA, Header, Slot, is_unicode, read_header
from weightwire.dtypes import DTYPES, Dtype
from weightwire.errors import CheckpointError

__all__ = [
    "Bits",
    "Checkpoint",
    "HasStateDict",
    "ShardFile",
    "Tensor",
    "Weights",
    "check_name",
    "dtype_called",
    "mark_changed",
    "present",
    "read_weights",
]

Bits = npt.NDArray[np.unsignedinteger]

# What NumPy (with ml_dtypes) and torch both call the dtypes of safetensors.
_BY_ARRAY_NAME = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "complex64": "C64",
}
# torch has one dtype that packs two elements into a byte. It counts bytes where safetensors counts elements.
_TORCH_F4 = "float4_e2m1fn_x2"

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_CONVERT = "convert its pickles: load the model and save_pretrained() it, with safe_serialization=True"


@dataclass(frozen=True, eq=False)
class Tensor:
    """One tensor as bits: flat, contiguous, little-endian unsigned integers of `dtype.unit` bytes.

    `bits` is a view of memory that belongs to someone else: writable if that is, and not always aligned,
    since safetensors files need not be. A rank's shard has the whole tensor's `shape` and holds its `rows` from
    the first to before the second of them.
    """

    dtype: Dtype
    shape: tuple[int, ...]
    bits: Bits
    rows: tuple[int, int] | None = None

    @classmethod
    def at(cls, buffer: Any, offset: int, dtype: Dtype, shape: tuple[int, ...]) -> Self:
        """A view into a buffer, which is known to be large enough."""
        nbytes = dtype.nbytes(shape)
        if nbytes is None:
            raise ValueError(f"{dtype.name} {list(shape)} ends inside a byte")
        return cls(dtype, shape, np.frombuffer(buffer, _unit(dtype), nbytes // dtype.unit, offset))

    @property
    def nbytes(self) -> int:
        return self.bits.nbytes

    @property
    def count(self) -> int:
        """How many units."""
        return len(self.bits)

    @property
    def place(self) -> object:
        """Which memory this is: two names of the same one are one tensor. None where it takes none."""
        return self.bits.__array_interface__["data"][0] if self.nbytes else None

    def copy_to(self, begin: int, end: int, out: Bits) -> None:
        """Copies the units from `begin` to before `end`."""
        np.copyto(out, self.bits[begin:end])

    def part(self, begin: int, end: int, room: Callable[[], Bits]) -> Bits:
        """The units from `begin` to before `end`: a view, or a copy in the `room` if they lie nowhere as bits."""
        return self.bits[begin:end]


Weights = Mapping[str, Tensor]


class HasStateDict(Protocol):
    """A torch module, or anything else that can list its weights."""

    def state_dict(self) -> Mapping[str, Any]: ...


def read_weights(source: str | os.PathLike[str] | Mapping[str, Any] | HasStateDict) -> Weights:
    """Weights from a safetensors file, a checkpoint directory, or a mapping of names to tensors.

    A mapping's values may be NumPy arrays, torch tensors on the CPU, `Tensor`s, or
    `(dtype name, shape, buffer)`. Nothing is copied: to change the result is to change the source.
    """
    if isinstance(source, str | os.PathLike):
        return Checkpoint(source)
    if isinstance(source, Checkpoint):
        return source
    mapping = source if isinstance(source, Mapping) else _state_dict(source)
    return {check_name(name): _read_tensor(name, value) for name, value in mapping.items()}


# From memory


def _state_dict(source: Any) -> Mapping[str, Any]:
    if not callable(getattr(source, "state_dict", None)):
        raise CheckpointError(
            f"weights cannot be read from a {type(source).__name__}",
            hint="pass a path, a mapping of names to tensors, or something with a state_dict()",
        )
    mapping: Mapping[str, Any] = source.state_dict()
    return mapping


def check_name(name: Any) -> str:
    """A tensor's name, if it can be one."""
    if not isinstance(name, str) or name == METADATA or not is_unicode(name):
        raise CheckpointError(
            f"{name!r} cannot be a tensor's name",
            hint=f"safetensors takes any valid Unicode text but {METADATA}",
        )
    return name


def _read_tensor(name: str, value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return _read_shard(name, value) if value.rows else _view(name, value.dtype, value.shape, value.bits)
    if isinstance(value, np.ndarray):
        return _view(name, _known_dtype(name, value.dtype.name), value.shape, value)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return _read_torch(name, value, torch)
    if isinstance(value, tuple) and len(value) == 3:
        return _read_buffer(name, *value)
    _fail(
        name,
        f"is a {type(value).__name__}",
        "pass NumPy arrays, torch tensors or (dtype name, shape, buffer) tuples",
    )


def _read_shard(name: str, shard: Tensor) -> Tensor:
    first, last = shard.rows or (0, 0)
    if not (shard.shape and 0 <= first < last <= shard.shape[0]):
        _fail(name, f"{list(shard.shape)} has no rows {first} to {last}", "rows are (first, last + 1)")
    if shard.dtype.nbytes(shard.shape[1:]) is None:
        _fail(name, "its rows end inside a byte", "pass the whole tensor")
    covered = _view(name, shard.dtype, (last - first, *shard.shape[1:]), shard.bits)
    return Tensor(shard.dtype, shard.shape, covered.bits, shard.rows)


def _read_torch(name: str, value: Any, torch: Any) -> Tensor:
    if hasattr(value, "full_tensor"):
        _fail(name, "is sharded over several ranks", "pass its full_tensor(), or the rows of to_local()")
    if value.device.type != "cpu" or value.layout != torch.strided:
        _fail(name, f"is a {value.layout} tensor on {value.device}", "pass a dense copy: .to_dense().cpu()")
    # Conjugation and negation may be flags that the bits in memory do not show.
    if not value.is_contiguous() or value.is_conj() or value.is_neg():
        _fail(name, "is not contiguous", "pass .resolve_conj().resolve_neg().contiguous()")
    dtype_name, shape = str(value.dtype).removeprefix("torch."), tuple(value.shape)
    if dtype_name == _TORCH_F4 and shape:
        dtype, shape = DTYPES["F4"], (*shape[:-1], 2 * shape[-1])
    else:
        dtype = _known_dtype(name, dtype_name)
    # NumPy has no bfloat16 or float8: pass through an integer dtype of the same width.
    same_width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[value.element_size()]
    return _view(name, dtype, shape, value.detach().view(same_width).numpy())


def _read_buffer(name: str, dtype_name: Any, shape: Any, buffer: Any) -> Tensor:
    dtype = DTYPES.get(dtype_name) if isinstance(dtype_name, str) else None
    if dtype is None:
        _fail(name, f"unknown dtype {dtype_name!r}", f"known are {', '.join(DTYPES)}")
    try:
        sizes = tuple(map(operator.index, shape))
    except TypeError:
        _fail(name, f"{shape!r} is no shape", "pass (dtype name, shape, buffer)")
    try:
        array = np.frombuffer(buffer, np.uint8)
    except (TypeError, ValueError, BufferError) as problem:
        _fail(name, f"has no contiguous buffer ({problem})", "pass bytes, or a contiguous memoryview of them")
    return _view(name, dtype, sizes, array)


def dtype_called(array_name: str) -> Dtype | None:
    """The dtype that NumPy and torch call so."""
    return DTYPES.get(_BY_ARRAY_NAME.get(array_name, ""))


def _known_dtype(name: str, array_name: str) -> Dtype:
    dtype = dtype_called(array_name)
    if dtype is None:
        _fail(name, f"unknown dtype {array_name}", f"known are {', '.join(_BY_ARRAY_NAME)}")
    return dtype


def _view(name: str, dtype: Dtype, shape: tuple[int, ...], array: npt.NDArray[Any]) -> Tensor:
    """The bits of an array, whatever its own dtype is."""
    if not array.flags.c_contiguous:
        _fail(name, "is not contiguous", "pass numpy.ascontiguousarray(...) of it")
    if array.dtype.str.startswith(">"):
        _fail(name, "is big-endian", "pass a little-endian copy: .astype(array.dtype.newbyteorder('<'))")
    if len(shape) > MAX_DIMS or max(shape, default=0) > MAX_INT:
        _fail(name, f"{list(shape)!r:.80} is no possible shape", f"at most {MAX_DIMS} dimensions of 63 bits")
    if min(shape, default=0) < 0 or array.nbytes != dtype.nbytes(shape):
        _fail(
            name,
            f"{dtype.name} {list(shape)} does not take {array.nbytes:,} bytes",
            "its dtype, its shape or its buffer is not what it should be",
        )
    # asarray drops subclasses (masked arrays, memory maps) that behave differently from plain arrays.
    return Tensor(dtype, shape, np.asarray(array).reshape(-1).view(_unit(dtype)))


def _unit(dtype: Dtype) -> np.dtype[np.unsignedinteger]:
    return np.dtype(f"<u{dtype.unit}")


def _fail(name: str, what: str, hint: str) -> NoReturn:
    raise CheckpointError(f"tensor {name!r}: {what}", hint=hint)


def mark_changed(source: Any, name: str) -> None:
    """Tells torch that a tensor was written to behind its back: autograd must not use what it saved of it."""
    torch = sys.modules.get("torch")
    value = source.get(name) if isinstance(source, Mapping) else None
    if torch is not None and isinstance(value, torch.Tensor) and not value.is_inference():
        torch.autograd.graph.increment_version(value)


def present(tensor: Tensor, like: Any = None) -> Any:
    """A tensor as the kind of thing that `like` is: the way back from `read_weights`, and no copy either.

    Without something of the same dtype and shape to go by, it becomes a NumPy array where NumPy has its dtype.
    """
    if like is not None and not _is_same_kind(tensor, like):
        like = None
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(like, torch.Tensor):
        signed = tensor.bits.view(f"<i{tensor.dtype.unit}") if tensor.dtype.unit > 1 else tensor.bits
        return torch.from_numpy(signed).view(like.dtype).reshape(like.shape)
    if isinstance(like, np.ndarray):
        return tensor.bits.view(like.dtype).reshape(like.shape)
    if isinstance(like, tuple):
        return tensor.dtype.name, tensor.shape, tensor.bits.view(np.uint8).data
    array_name = next((array for array, name in _BY_ARRAY_NAME.items() if name == tensor.dtype.name), "")
    if like is None and tensor.rows is None and array_name in np.sctypeDict:
        return tensor.bits.view(array_name).reshape(tensor.shape)
    return tensor


def _is_same_kind(tensor: Tensor, like: Any) -> bool:
    other = _read_tensor("", like)
    return (tensor.dtype, tensor.shape, tensor.rows) == (other.dtype, other.shape, other.rows)


# From files


@dataclass(frozen=True)
class ShardFile:
    """One memory-mapped safetensors file of a checkpoint."""

    path: Path
    header: Header
    data: mmap.mmap = field(repr=False)

    @property
    def head(self) -> bytes:
        """The bytes before the data part, as they are in the file."""
        return self.data[: self.header.size]

    def tensor(self, slot: Slot) -> Tensor:
        return Tensor.at(self.data, self.header.size + slot.start, slot.dtype, slot.shape)


class Checkpoint(Mapping[str, Tensor]):
    """The weights of a safetensors file or of a Hugging Face checkpoint directory, mapped read-only.

    `files` are the safetensors files that hold the weights, by name; `index` is the file that lists them, if
    there is one; `side_files` are all others of a directory, relative to it, but for hidden ones and weights
    that are not part of this checkpoint. `metadata` is that of all `files` together.
    """

    path: Path
    files: tuple[ShardFile, ...]
    index: Path | None
    side_files: tuple[Path, ...]
    metadata: dict[str, str]

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        with _reading(self.path):
            is_dir, is_file = self.path.is_dir(), self.path.is_file()
        if not is_dir and not is_file:
            raise CheckpointError(f"{self.path}: no such file or directory", hint="check the path")
        self.index = _find_index(self.path) if is_dir else None
        self.side_files = _find_side_files(self.path) if is_dir else ()
        listed = _read_index(self.index) if self.index else {}
        paths = _find_shards(self.path, self.index, listed) if is_dir else [self.path]
        self.files = tuple(_open_shard(path) for path in paths)
        self.metadata = {key: value for file in self.files for key, value in file.header.metadata.items()}
        self._places = _place(self.files)
        self._check_listed(listed)

    def __getitem__(self, name: str) -> Tensor:
        file, slot = self._places[name]
        return file.tensor(slot)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def _check_listed(self, listed: Mapping[str, str]) -> None:
        for name, shard in listed.items():
            if name not in self._places or self._places[name][0].path.name != shard:
                raise CheckpointError(
                    f"{self.index}: tensor {name!r} is not in {shard}, where the index has it",
                    hint="index and shards are of different checkpoints: download or save both again",
                )


def _place(files: Sequence[ShardFile]) -> dict[str, tuple[ShardFile, Slot]]:
    """Where every tensor is, in the order of the files and of their bytes."""
    places: dict[str, tuple[ShardFile, Slot]] = {}
    for file in files:
        for slot in file.header.slots:
            if slot.name in places:
                raise CheckpointError(
                    f"{file.path}: tensor {slot.name!r} is also in {places[slot.name][0].path.name}",
                    hint="keep the files of one checkpoint only, or pass one of them",
                )
            places[slot.name] = file, slot
    return places


def _open_shard(path: Path) -> ShardFile:
    if path.suffix in _PICKLES:
        raise CheckpointError(f"{path}: is no safetensors file", hint=_CONVERT)
    with _reading(path), path.open("rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            raise CheckpointError(f"{path}: is empty", hint="copy or download it again")
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    header = read_header(memoryview(data), str(path))
    if header.metadata.get("format", "").startswith("weightwire/"):
        raise CheckpointError(f"{path}: is a weightwire delta, not weights", hint="patch its base with it first")
    return ShardFile(path, header, data)


def _find_index(directory: Path) -> Path | None:
    """As transformers does: a single file goes before an index, an index before whatever else there is."""
    with _reading(directory):
        index = directory / _INDEX
        return index if index.is_file() and not (directory / _SINGLE).is_file() else None


def _read_index(index: Path) -> dict[str, str]:
    """Which shard holds which tensor."""
    with _reading(index):
        raw = index.read_bytes()
    try:
        listed = json.loads(raw)["weight_map"]
        if listed and all(_is_shard_name(shard) for shard in listed.values()):
            return dict(listed)
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        pass
    raise CheckpointError(
        f"{index}: has no weight_map from tensor names to file names",
        hint="download or save it again, or delete it: all *.safetensors are read where there is no index",
    )


def _is_shard_name(shard: Any) -> bool:
    """A plain name: an index that came with a download must not lead out of its directory."""
    return isinstance(shard, str) and shard.endswith(".safetensors") and Path(shard).name == shard


def _find_shards(directory: Path, index: Path | None, listed: Mapping[str, str]) -> list[Path]:
    with _reading(directory):
        present = {path.name for path in directory.glob("[!.]*.safetensors") if path.is_file()}
        pickles = any(path.suffix in _PICKLES for path in directory.iterdir())
    wanted = set(listed.values()) if index else {_SINGLE} & present or present
    for missing in sorted(wanted - present):
        raise CheckpointError(
            f"{directory / missing}: no such file, but {_INDEX} lists it", hint="download the missing shards"
        )
    if not wanted:
        raise CheckpointError(
            f"{directory}: holds no safetensors file",
            hint=_CONVERT if pickles else "pass the directory that holds model.safetensors",
        )
    return [directory / name for name in sorted(wanted)]


def _find_side_files(directory: Path) -> tuple[Path, ...]:
    """Hidden files are left out: version control and download caches are no part of a checkpoint."""
    found: list[Path] = []
    with _reading(directory):
        for parent, directories, names in os.walk(directory, onerror=_raise):
            directories[:] = [name for name in directories if not name.startswith(".")]
            found += [Path(parent, name) for name in names if not name.startswith(".")]
        return tuple(sorted(path.relative_to(directory) for path in found if _is_side_file(path)))


def _is_side_file(path: Path) -> bool:
    return not path.name.endswith((".safetensors", ".safetensors.index.json")) and path.is_file()


def _raise(problem: OSError) -> NoReturn:
    raise problem


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        raise CheckpointError(
            f"{problem.filename or path}: cannot be read ({problem.strerror})",
            hint="check that the file exists and that you may read it",
        ) from problem
