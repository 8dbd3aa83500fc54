"""Checkpoints: safetensors files and Hugging Face checkpoint directories, mapped read-only and never copied."""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from weightwire.errors import CheckpointError
from weightwire.system import open_regular, read_regular
from weightwire.weights.file_names import ADAPTER_FILE, MODEL_FILE, is_weights_file
from weightwire.weights.safetensors_file import Header, Slot, read_header
from weightwire.weights.tensor import Tensor

__all__ = ["Checkpoint", "ShardFile"]

_INDEX = "model.safetensors.index.json"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_CONVERT = "convert it: load the model and call save_pretrained(), which writes safetensors"


@dataclass(frozen=True)
class ShardFile:
    """One memory-mapped safetensors file of a checkpoint."""

    path: Path
    header: Header
    data: mmap.mmap = field(repr=False)

    @property
    def head(self) -> bytes:
        """The bytes before the data part."""
        return self.data[: self.header.size]

    def tensor(self, slot: Slot) -> Tensor:
        return Tensor.at(self.data, self.header.size + slot.start, slot.dtype, slot.shape)


class Checkpoint(Mapping[str, Tensor]):
    """The weights of a safetensors file or of a Hugging Face checkpoint directory, mapped read-only.

    - `files`: the safetensors files that hold the weights, sorted by name.
    - `index`: the file that lists them, if there is one.
    - `side_files`: all other files of the directory, as relative paths. Hidden files and weights that do not belong to
      this checkpoint are left out.
    - `metadata`: the merged metadata of all `files`.
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
                    f"{self.index}: tensor {name!r} is not in {shard}",
                    hint="index and shards belong to different checkpoints: download or save both again",
                )


def _place(files: Sequence[ShardFile]) -> dict[str, tuple[ShardFile, Slot]]:
    """The file and slot of every tensor, in file order."""
    places: dict[str, tuple[ShardFile, Slot]] = {}
    for file in files:
        for slot in file.header.slots:
            if slot.name in places:
                raise CheckpointError(
                    f"{file.path}: tensor {slot.name!r} is also in {places[slot.name][0].path.name}",
                    hint="keep the files of one checkpoint in the directory, or pass a single file",
                )
            places[slot.name] = file, slot
    return places


def _open_shard(path: Path) -> ShardFile:
    if path.suffix in _PICKLES:
        raise CheckpointError(f"{path}: not a safetensors file", hint=_CONVERT)
    with _reading(path), open(open_regular(path), "rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            raise CheckpointError(f"{path}: is empty", hint="copy or download it again")
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    header = read_header(memoryview(data), str(path))
    if header.metadata.get("format", "").startswith("weightwire/"):
        raise CheckpointError(
            f"{path}: is a weightwire delta, not weights", hint="run `weightwire patch` to apply it to its base first"
        )
    return ShardFile(path, header, data)


def _find_index(directory: Path) -> Path | None:
    """Same order as transformers: a single file first, then an index, then any safetensors files."""
    with _reading(directory):
        index = directory / _INDEX
        return index if index.is_file() and not (directory / MODEL_FILE).is_file() else None


def _read_index(index: Path) -> dict[str, str]:
    """The shard name of each tensor."""
    with _reading(index):
        raw = read_regular(index)
    try:
        listed = json.loads(raw)["weight_map"]
        if listed and all(_is_shard_name(shard) for shard in listed.values()):
            return dict(listed)
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        pass
    raise CheckpointError(
        f"{index}: no weight_map from tensor names to file names",
        hint="download or save it again, or delete it to read all *.safetensors files",
    )


def _is_shard_name(shard: Any) -> bool:
    """A plain file name. A downloaded index must not point outside its directory."""
    return isinstance(shard, str) and shard.endswith(".safetensors") and Path(shard).name == shard


def _find_shards(directory: Path, index: Path | None, listed: Mapping[str, str]) -> list[Path]:
    with _reading(directory):
        present = {path.name for path in directory.glob("[!.]*.safetensors") if path.is_file()}
        pickles = any(path.suffix in _PICKLES for path in directory.iterdir())
    wanted = set(listed.values()) if index else {MODEL_FILE} & present or {ADAPTER_FILE} & present or present
    for missing in sorted(wanted - present):
        raise CheckpointError(
            f"{directory / missing}: no such file, but {_INDEX} lists it", hint="download the missing shards"
        )
    if not wanted:
        raise CheckpointError(
            f"{directory}: no safetensors file",
            hint=_CONVERT if pickles else "pass the directory that holds model.safetensors",
        )
    return [directory / name for name in sorted(wanted)]


def _find_side_files(directory: Path) -> tuple[Path, ...]:
    """Hidden files are left out: they belong to version control or download caches."""
    found: list[Path] = []
    with _reading(directory):
        for parent, directories, names in os.walk(directory, onerror=_raise):
            directories[:] = [name for name in directories if not name.startswith(".")]
            found += [Path(parent, name) for name in names if not name.startswith(".")]
        return tuple(sorted(path.relative_to(directory) for path in found if _is_side_file(path)))


def _is_side_file(path: Path) -> bool:
    return not is_weights_file(path.name) and path.is_file()


def _raise(problem: OSError) -> NoReturn:
    raise problem


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except RecursionError as problem:
        raise CheckpointError(f"{path}: its folders are nested too deeply", hint="check the path") from problem
    except OSError as problem:
        raise CheckpointError(
            f"{problem.filename or path}: cannot be read ({problem.strerror})",
            hint="check that the file exists and is readable",
        ) from problem
