"""Run, epoch and commit records, and the rules of the chain.

Pure: what the records hold, where they lie, what may follow what, who is fenced, what a reader accepts. Reads and
writes nothing. docs/PROTOCOL.md says the same in words.
"""

from __future__ import annotations

import hashlib
import math
import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, Literal, TypeVar

import msgspec

from weightwire.bucket import PROBE_FOLDER
from weightwire.delta import FORMAT, check_format
from weightwire.errors import BrokenChain
from weightwire.weights import DTYPES, Schema, is_side_file_name, is_weights_file

__all__ = [
    "ANCHOR",
    "BASE",
    "DAMAGED",
    "DELTA",
    "FENCE",
    "HEAD",
    "RUN",
    "Commit",
    "DataFile",
    "Epoch",
    "Folder",
    "Gc",
    "HeadHint",
    "Heartbeat",
    "PassedVersion",
    "Run",
    "Sealed",
    "Shortcut",
    "SideFile",
    "StageTiming",
    "back_versions",
    "commit_path",
    "data_path",
    "epoch_path",
    "gc_path",
    "heartbeat_path",
    "is_replica_name",
    "number_of",
    "replica_name_of",
    "seal",
    "shortcut_path",
    "shortcut_version",
    "side_path",
    "unseal",
    "version_of",
]

FENCE, BASE, ANCHOR, DELTA = "fence", "base", "anchor", "delta"
RUN, HEAD = "run.json", "HEAD.json"

_HEX64 = re.compile(r"[0-9a-f]{64}")
_TOKEN = re.compile(r"[0-9a-f]{32}")
_DATA = re.compile(r"(deltas|anchors)/(0|[1-9][0-9]{0,18})/e[0-9]+-r[0-9]+-[0-9a-f]{16}\.safetensors")
_SIDE = re.compile(r"files/[0-9a-f]{16}/[^/\\.][^/\\]*")
_NUMBERED = re.compile(r"(?:commits|epochs|gc)/([0-9]{8,20})\.json")
_VERSIONED = re.compile(r"(?:deltas|anchors|shortcuts)/([0-9]{1,19})/.+")
_SHORTCUT = re.compile(r"shortcuts/([0-9]{1,19})/anchor-[0-9a-f]{16}\.json")
_HEARTBEAT = re.compile(r"replicas/([^/]+)\.json")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_MOST = 2**53 - 1  # the largest integer that every JSON reader keeps
_LONGEST_LEASE = 24 * 3600.0  # seconds
DAMAGED = "it was damaged or not written by weightwire: `weightwire verify` finds out how far the chain is whole"


def _check(fine: bool, what: str) -> None:
    if not fine:
        raise ValueError(what)


def _is_count(number: int) -> bool:
    return 0 <= number <= _MOST


# --- records -----------------------------------------------------------------------------------------------------


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """What all records say: the protocol's version, and which run they belong to."""

    format: str = FORMAT
    run: str

    def __post_init__(self) -> None:
        _check(_TOKEN.fullmatch(self.run) is not None, "its run is no run id")


class SideFile(msgspec.Struct, frozen=True):
    """A file that a checkpoint has beside its weights: config.json, a tokenizer."""

    name: str
    path: str
    size: int
    sha256: str

    def __post_init__(self) -> None:
        _check(is_side_file_name(self.name), f"{self.name!r:.100} is no file name")
        _check(not is_weights_file(self.name), f"{self.name!r:.100}: weights are no side file")
        fine = _SIDE.fullmatch(self.path) is not None and self.path.isprintable()
        _check(fine, f"{self.path!r:.100} is no path of a side file")
        _check(_is_count(self.size) and _HEX64.fullmatch(self.sha256) is not None, "a side file's hash is malformed")


class Run(Record, frozen=True, kw_only=True):
    """run.json: what stays the same as long as the run lives."""

    time: float
    mode: Literal["strict", "single-writer"]
    tensors: dict[str, tuple[str, tuple[int, ...]]]  # name -> dtype, shape
    aliases: dict[str, str] = {}  # name -> the tensor whose memory it shares
    files: tuple[SideFile, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, (dtype, shape) in self.tensors.items():
            nbytes = DTYPES[dtype].nbytes(shape) if dtype in DTYPES and all(map(_is_count, shape)) else None
            _check(nbytes is not None and nbytes <= _MOST, f"tensor {name!r:.100}: no possible dtype or shape")
        _check(all(name in self.tensors for name in self.aliases.values()), "an alias leads nowhere")
        names = [file.name for file in self.files]
        folders = {"/".join(name.split("/")[:k]) for name in names for k in range(1, name.count("/") + 1)}
        _check(len({*names}) == len(names) and not folders & {*names}, "two side files are in each other's way")

    @property
    def schema(self) -> Schema:
        return {name: (DTYPES[dtype], shape) for name, (dtype, shape) in self.tensors.items()}

    @property
    def parameters(self) -> int:
        """How many weights a version has."""
        return sum(math.prod(shape) for _, shape in self.tensors.values())

    @property
    def nbytes(self) -> int:
        """How much all weights are."""
        return sum(DTYPES[dtype].nbytes(shape) or 0 for dtype, shape in self.tensors.values())


class Epoch(Record, frozen=True, kw_only=True):
    """epochs/E.json: who publishes from now on."""

    epoch: int
    write_id: str
    time: float
    host: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(1 <= self.epoch <= _MOST and _TOKEN.fullmatch(self.write_id) is not None, "a number is malformed")


class DataFile(msgspec.Struct, frozen=True):
    """A delta or anchor, or one rank's part of it."""

    path: str
    size: int
    sha256: str
    rank: int = 0

    def __post_init__(self) -> None:
        _check(_DATA.fullmatch(self.path) is not None, f"{self.path!r:.100} is no path of a delta or anchor")
        _check(_is_count(self.size) and _is_count(self.rank), "a file's size is malformed")
        _check(_HEX64.fullmatch(self.sha256) is not None, "a file's hash is malformed")

    @property
    def version(self) -> int:
        return int(self.path.split("/")[1])


class StageTiming(msgspec.Struct, frozen=True):
    """How long a stage took, for people, and when it ended: 0.0 where nobody looked at a clock."""

    seconds: float
    bytes: int = 0
    at: float = 0.0

    @classmethod
    def of(cls, seconds: float, nbytes: int, at: float) -> StageTiming:
        """As measured, to the microsecond."""
        return cls(round(seconds, 6), nbytes, at)


class Commit(Record, frozen=True, kw_only=True):
    """commits/N.json: the commit point of version N. `before` and `after` name the state, or are empty before any."""

    version: int
    epoch: int
    write_id: str
    kind: Literal["fence", "base", "anchor", "delta"]
    parent: str
    back: tuple[str, ...] = ()  # the hashes of the commits 2, 4, 8... versions back
    before: str = ""
    after: str = ""
    files: tuple[DataFile, ...] = ()
    changed: int = 0
    source: str = ""  # of a base: where to get it
    step: int | None = None
    time: float = 0.0
    metrics: dict[str, float | None] = {}  # None: not a number
    stages: dict[str, StageTiming] = {}

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(_is_count(self.version) and _is_count(self.changed), "a number is malformed")
        _check(1 <= self.epoch <= _MOST, "a number is malformed")
        _check(self.step is None or abs(self.step) <= _MOST, "a number is malformed")
        _check(_TOKEN.fullmatch(self.write_id) is not None, "its write_id is malformed")
        hashes = (self.parent, self.before, self.after)
        _check(all(not text or _HEX64.fullmatch(text) for text in hashes), "a hash is malformed")
        _check(all(_HEX64.fullmatch(text) for text in self.back), "a hash is malformed")
        _check(len(self.back) == len(back_versions(self.version)), "it names too few or too many commits further back")
        _check(all(file.version == self.version for file in self.files), "it names a file of another version")
        self._check_kind()

    def _check_kind(self) -> None:
        if self.kind == FENCE:
            _check(self.before == self.after and not self.files, "a fence must not change anything")
        elif self.kind == BASE:
            _check(not self.before and bool(self.after) and not self.files, "a base must be the first state")
        elif self.kind == ANCHOR:
            _check(bool(self.after) and bool(self.files), "an anchor must have files")
        else:
            _check(bool(self.before) and bool(self.after), "a delta must have a state to start from")
            _check(bool(self.files) or self.before == self.after, "a delta without files must not change anything")
        folder = f"{self.kind}s/"
        _check(all(file.path.startswith(folder) for file in self.files), "it names a file of another kind")

    @property
    def nbytes(self) -> int:
        """How much there is to fetch for it."""
        return sum(file.size for file in self.files)


class Shortcut(Record, frozen=True, kw_only=True):
    """shortcuts/N/...json: another way to version N, which the commit chain has: an anchor."""

    version: int
    kind: Literal["anchor"]
    after: str
    files: tuple[DataFile, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(_is_count(self.version) and bool(self.files), "it leads nowhere")
        _check(_HEX64.fullmatch(self.after) is not None, "a hash is malformed")
        for file in self.files:
            _check(
                file.version == self.version and file.path.startswith(Folder.ANCHORS), "it names a file of another kind"
            )

    @property
    def nbytes(self) -> int:
        return sum(file.size for file in self.files)


class HeadHint(Record, frozen=True, kw_only=True):
    """HEAD.json: where to begin to look. A hint, and never trusted."""

    version: int
    anchor: str = ""  # path of the newest shortcut
    time: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(_is_count(self.version), "its version is malformed")


class Gc(Record, frozen=True, kw_only=True):
    """gc/B.json: the data of versions below B may be gone."""

    below: int
    time: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(_is_count(self.below), "its version is malformed")


class PassedVersion(msgspec.Struct, frozen=True):
    """A version on its way through a follower."""

    version: int
    stages: dict[str, StageTiming]


class Heartbeat(Record, frozen=True, kw_only=True):
    """replicas/NAME.json: what a follower has reached.

    It is alive for `lease` seconds after it was written, a day at most. One that was stopped ends its lease: 0.
    """

    name: str
    version: int
    head: int
    lease: float
    time: float = 0.0
    host: str = ""
    trouble: str = ""
    stages: dict[str, StageTiming] = {}  # of the last version applied
    served: int | None = None  # the lowest version that its engines serve, where it has engines; -1: one serves none
    recent: tuple[PassedVersion, ...] = ()  # the last versions that it went through, the oldest first

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(-1 <= self.version <= _MOST and -1 <= self.head <= _MOST and self.lease >= 0, "a number is malformed")
        _check(self.served is None or -1 <= self.served <= _MOST, "a number is malformed")
        _check(is_replica_name(self.name), f"{self.name!r:.100} is no name of a replica")

    @property
    def reached(self) -> int:
        """What whoever asks this replica gets to see: of its engines, where it has some."""
        return self.version if self.served is None else min(self.version, self.served)

    @property
    def stopped(self) -> bool:
        """It was stopped on purpose, and needs nothing any more."""
        return self.lease == 0

    @property
    def lifetime(self) -> float:
        """Seconds that it is alive after it was written."""
        return min(self.lease, _LONGEST_LEASE)

    def alive_until(self, modified: float) -> float:
        """Until when it is alive, if it was written at `modified`: both by the store's clock."""
        return modified + self.lifetime


# --- where they lie ----------------------------------------------------------------------------------------------


class Folder(StrEnum):
    """The folders of a run, as prefixes of paths. Beside them there are only run.json and HEAD.json."""

    ANCHORS = "anchors/"
    COMMITS = "commits/"
    DELTAS = "deltas/"
    EPOCHS = "epochs/"
    FILES = "files/"
    GC = "gc/"
    PROBE = PROBE_FOLDER
    REPLICAS = "replicas/"
    SHORTCUTS = "shortcuts/"


def commit_path(version: int) -> str:
    return f"{Folder.COMMITS}{version:020d}.json"


def epoch_path(epoch: int) -> str:
    return f"{Folder.EPOCHS}{epoch:08d}.json"


def shortcut_path(shortcut: Sealed[Shortcut]) -> str:
    """Named by its bytes: the same shortcut made twice is the same object."""
    return f"{Folder.SHORTCUTS}{shortcut.record.version}/anchor-{shortcut.sha256[:16]}.json"


def shortcut_version(path: str) -> int | None:
    """The version that a shortcut leads to, by its path; None for any other path."""
    matched = _SHORTCUT.fullmatch(path)
    return int(matched[1]) if matched else None


def data_path(kind: str, version: int, epoch: int, rank: int, sha256: str) -> str:
    return f"{kind}s/{version}/e{epoch}-r{rank}-{sha256[:16]}.safetensors"


def side_path(name: str, sha256: str) -> str:
    return f"{Folder.FILES}{sha256[:16]}/{name.rsplit('/', 1)[-1]}"


def gc_path(below: int) -> str:
    return f"{Folder.GC}{below:020d}.json"


def number_of(path: str) -> int | None:
    """The number in the path of a commit (its version), an epoch or a gc record; None for any other path."""
    matched = _NUMBERED.fullmatch(path)
    number = int(matched[1]) if matched else -1
    return number if path in (commit_path(number), epoch_path(number), gc_path(number)) else None


def version_of(path: str) -> int | None:
    """The version that a delta, an anchor or a shortcut belongs to, by its path; None for any other path."""
    matched = _VERSIONED.fullmatch(path)
    return int(matched[1]) if matched else None


def is_replica_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def heartbeat_path(name: str) -> str:
    return f"{Folder.REPLICAS}{name}.json"


def replica_name_of(path: str) -> str | None:
    """The replica's name in the path of a heartbeat; None for any other path."""
    matched = _HEARTBEAT.fullmatch(path)
    return matched[1] if matched else None


# --- bytes -------------------------------------------------------------------------------------------------------

AnyRecord = TypeVar("AnyRecord", bound=Record)


@dataclass(frozen=True)
class Sealed(Generic[AnyRecord]):
    """A record and the bytes it is made of, which its hash is taken over."""

    record: AnyRecord
    data: bytes

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()


def seal(record: AnyRecord) -> Sealed[AnyRecord]:
    return Sealed(record, msgspec.json.encode(record))


class _AnyFormat(msgspec.Struct):
    format: str = ""


def unseal(data: bytes, kind: type[AnyRecord], where: str) -> Sealed[AnyRecord]:
    """Strict about types, and about the protocol's version before anything else."""
    try:
        found = msgspec.json.decode(data, type=_AnyFormat).format
        check_format(found, where, BrokenChain(f"{where}: is no record of weightwire", hint=DAMAGED))
        return Sealed(msgspec.json.decode(data, type=kind), data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as problem:
        reason = str(problem) if isinstance(problem, msgspec.ValidationError) else "it is no JSON"
        raise BrokenChain(f"{where}: cannot be read ({reason:.200})", hint=DAMAGED) from problem


def back_versions(version: int) -> list[int]:
    """The versions 2, 4, 8... before one, as far as there are any."""
    return [version - (1 << k) for k in range(1, version.bit_length()) if version >= 1 << k]
