"""The records of a run: their fields and their encoding. Pure. See docs/PROTOCOL.md."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

import msgspec

from weightwire.chain.keys import PrivateKey
from weightwire.chain.record_paths import ALIVE, HEAD, RUN, Folder, is_replica_name, side_path
from weightwire.chain.signature import Signature, add_signature, signature_of
from weightwire.delta import FORMAT, check_format
from weightwire.errors import BrokenChain
from weightwire.weights import DTYPES, LARGEST_SIDE_FILE, MAX_DIMS, Schema, is_side_file_name, is_weights_file

__all__ = [
    "ANCHOR",
    "BASE",
    "DAMAGED",
    "DELTA",
    "FENCE",
    "LARGEST_COMMIT",
    "MOST_VERSION",
    "RECORD_LIMITS",
    "Commit",
    "DataFile",
    "Epoch",
    "FileHead",
    "Gc",
    "HeadHint",
    "Heartbeat",
    "PassedVersion",
    "Run",
    "Sealed",
    "Shortcut",
    "SideFile",
    "SignOfLife",
    "StageTiming",
    "back_versions",
    "record_limit",
    "seal",
    "shortcut_path",
    "unseal",
]

FENCE, BASE, ANCHOR, DELTA = "fence", "base", "anchor", "delta"

_HEX64 = re.compile(r"[0-9a-f]{64}")
_TOKEN = re.compile(r"[0-9a-f]{32}")
_DATA = re.compile(
    r"(deltas|anchors)/(0|[1-9][0-9]{0,18})/e[1-9][0-9]{0,15}-r(0|[1-9][0-9]{0,15})-[0-9a-f]{16}\.safetensors"
)
_MOST = 2**53 - 1  # the largest integer that every JSON reader keeps
_MOST_KEYS = 16
MOST_VERSION = _MOST
_LATEST = 1e11  # seconds since 1970, year 5138
_LONGEST_LEASE = 24 * 3600.0  # seconds
_LARGEST_SIDE_FILES = 1 << 30  # bytes of all side files of a run: readers hold them in memory
DAMAGED = "the record was damaged or not written by weightwire: run `weightwire verify URL`"


def _check(fine: bool, what: str) -> None:
    if not fine:
        raise ValueError(what)


def _is_count(number: int) -> bool:
    return 0 <= number <= _MOST


def _is_possible(dtype: str, shape: tuple[int, ...]) -> bool:
    # The product of many large dimensions would take quadratic time.
    if dtype not in DTYPES or len(shape) > MAX_DIMS or not all(map(_is_count, shape)):
        return False
    nbytes = DTYPES[dtype].nbytes(shape)
    return nbytes is not None and nbytes <= _MOST


def _check_keys(keys: tuple[str, ...]) -> None:
    fine = all(_HEX64.fullmatch(key) for key in keys) and len({*keys}) == len(keys) <= _MOST_KEYS
    _check(fine, "a key is malformed")


# --- records -----------------------------------------------------------------------------------------------------


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of all records: the protocol version and the run."""

    format: str = FORMAT
    run: str

    def __post_init__(self) -> None:
        _check(_TOKEN.fullmatch(self.run) is not None, "its run id is malformed")


class SideFile(msgspec.Struct, frozen=True):
    """A file of a checkpoint beside its weights, such as config.json or a tokenizer."""

    name: str
    path: str
    size: int
    sha256: str

    def __post_init__(self) -> None:
        _check(is_side_file_name(self.name), f"{self.name!r:.100} is not a valid file name")
        _check(not is_weights_file(self.name), f"{self.name!r:.100} is a weights file, not a side file")
        fine = self.path == side_path(self.name, self.sha256)
        _check(fine, f"{self.path!r:.100} is not the path of this side file")
        _check(0 <= self.size <= LARGEST_SIDE_FILE, f"{self.name!r:.100} has more than {LARGEST_SIDE_FILE:,} bytes")
        _check(_HEX64.fullmatch(self.sha256) is not None, "a side file's hash is malformed")


class Run(Record, frozen=True, kw_only=True):
    """run.json: what never changes in a run."""

    time: float
    mode: Literal["strict", "single-writer"]
    tensors: dict[str, tuple[str, tuple[int, ...]]]  # name -> dtype, shape
    aliases: dict[str, str] = {}  # name -> the tensor whose memory it shares
    files: tuple[SideFile, ...] = ()
    keys: tuple[str, ...] = ()  # public keys that may sign; none if the run is not signed

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_keys(self.keys)
        bad = {kind for kind in {*self.tensors.values()} if not _is_possible(*kind)}  # thousands share a few kinds
        name = next((name for name, kind in self.tensors.items() if kind in bad), "") if bad else ""
        _check(not bad, f"tensor {name!r:.100}: its dtype or shape is invalid")
        _check(all(name in self.tensors for name in self.aliases.values()), "an alias names an unknown tensor")
        names = [file.name for file in self.files]
        folders = {"/".join(name.split("/")[:k]) for name in names for k in range(1, name.count("/") + 1)}
        _check(sum(file.size for file in self.files) <= _LARGEST_SIDE_FILES, "its side files are too large")
        _check(len({*names}) == len(names) and not folders & {*names}, "two side files have conflicting names")

    @property
    def schema(self) -> Schema:
        return {name: (DTYPES[dtype], shape) for name, (dtype, shape) in self.tensors.items()}

    @property
    def parameters(self) -> int:
        """How many weights a version has."""
        return sum(math.prod(shape) for _, shape in self.tensors.values())

    @property
    def nbytes(self) -> int:
        """The size of all weights in bytes."""
        return sum(DTYPES[dtype].nbytes(shape) or 0 for dtype, shape in self.tensors.values())


class Epoch(Record, frozen=True, kw_only=True):
    """epochs/E.json: a publisher's claim to the run."""

    epoch: int
    write_id: str
    time: float
    host: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(1 <= self.epoch <= _MOST and _TOKEN.fullmatch(self.write_id) is not None, "a number is malformed")


class FileHead(msgspec.Struct, frozen=True):
    """The head of a data file. It has the hash of each block, so parts of the file can be read and verified."""

    size: int
    sha256: str


class DataFile(msgspec.Struct, frozen=True):
    """The file of a delta or anchor, or of one rank's part."""

    path: str
    size: int
    sha256: str
    rank: int = 0
    head: FileHead | None = None

    def __post_init__(self) -> None:
        _check(_DATA.fullmatch(self.path) is not None, f"{self.path!r:.100} is not the path of a delta or anchor")
        _check(_is_count(self.size) and _is_count(self.rank), "a file's size is malformed")
        _check(_HEX64.fullmatch(self.sha256) is not None, "a file's hash is malformed")
        if self.head is not None:
            fine = 0 < self.head.size <= self.size and _HEX64.fullmatch(self.head.sha256) is not None
            _check(fine, "a file's head is malformed")
        named = self.path.endswith(f"-r{self.rank}-{self.sha256[:16]}.safetensors")
        _check(named, f"{self.path!r:.100} is not the path of this file: its rank or hash differs")

    @property
    def version(self) -> int:
        return int(self.path.split("/")[1])

    @property
    def epoch(self) -> int:
        return int(self.path.split("/")[2].partition("-")[0].removeprefix("e"))


def _check_ranks(files: Sequence[DataFile]) -> None:
    """Otherwise a small record could make readers fetch one large file any number of times."""
    _check(len({file.rank for file in files}) == len(files), "it names two files of one rank")


class StageTiming(msgspec.Struct, frozen=True):
    """How long a stage took, and when it ended (0.0 if unknown). For people."""

    seconds: float
    bytes: int = 0
    at: float = 0.0

    @classmethod
    def of(cls, seconds: float, nbytes: int, at: float) -> StageTiming:
        """Rounds to microseconds."""
        return cls(round(seconds, 6), nbytes, at)


class Commit(Record, frozen=True, kw_only=True):
    """commits/N.json: makes version N exist. `before` and `after` are states, or empty before the first weights."""

    version: int
    epoch: int
    write_id: str
    kind: Literal["fence", "base", "anchor", "delta"]
    parent: str  # of version 0: the hash of run.json
    back: tuple[str, ...] = ()  # the hashes of the commits 2, 4, 8... versions back
    before: str = ""
    after: str = ""
    files: tuple[DataFile, ...] = ()
    changed: int = 0
    source: str = ""  # where to get the base checkpoint
    step: int | None = None
    time: float = 0.0
    metrics: dict[str, float | None] = {}  # None for NaN and infinity
    stages: dict[str, StageTiming] = {}
    keys: tuple[str, ...] = ()  # of a fence: the public keys that may sign from the next commit on
    keys_from: int | None = None  # the version that named the keys in force; None: run.json

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(_is_count(self.version) and _is_count(self.changed), "a number is malformed")
        _check(self.keys_from is None or 0 <= self.keys_from < self.version, "its keys come from a later version")
        _check_keys(self.keys)
        _check(1 <= self.epoch <= _MOST, "a number is malformed")
        _check(self.step is None or abs(self.step) <= _MOST, "a number is malformed")
        _check(_TOKEN.fullmatch(self.write_id) is not None, "its write_id is malformed")
        hashes = (self.parent, self.before, self.after)
        _check(all(not text or _HEX64.fullmatch(text) for text in hashes), "a hash is malformed")
        _check(all(_HEX64.fullmatch(text) for text in self.back), "a hash is malformed")
        _check(len(self.back) == len(back_versions(self.version)), "the number of its back hashes is wrong")
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
        _check(all(file.epoch == self.epoch for file in self.files), "it names a file of another epoch")
        _check_ranks(self.files)
        _check(not self.keys or self.kind == FENCE, "only a fence may change the keys")

    @property
    def next_keys_from(self) -> int | None:
        """`keys_from` of the next commit."""
        return self.version if self.keys else self.keys_from

    @property
    def nbytes(self) -> int:
        """The size of its files in bytes."""
        return sum(file.size for file in self.files)


class Shortcut(Record, frozen=True, kw_only=True):
    """shortcuts/N/...json: an anchor of version N beside the chain."""

    version: int
    kind: Literal["anchor"]
    after: str
    files: tuple[DataFile, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(_is_count(self.version) and bool(self.files), "its version or its files are missing")
        _check(_HEX64.fullmatch(self.after) is not None, "a hash is malformed")
        for file in self.files:
            _check(
                file.version == self.version and file.path.startswith(Folder.ANCHORS), "it names a file of another kind"
            )
        _check_ranks(self.files)

    @property
    def nbytes(self) -> int:
        return sum(file.size for file in self.files)


class HeadHint(Record, frozen=True, kw_only=True):
    """HEAD.json: a hint where to look for the newest version. Never trusted."""

    version: int
    anchor: str = ""  # path of the newest shortcut
    time: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(_is_count(self.version), "its version is malformed")


class SignOfLife(Record, frozen=True, kw_only=True):
    """alive.json: what the publisher of a signed run says now and then, so that a hidden version is noticed."""

    epoch: int
    version: int  # the newest that it has committed
    commit: str  # the hash of that commit
    time: float  # by the publisher's clock

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(1 <= self.epoch <= _MOST and _is_count(self.version), "a number is malformed")
        _check(0 <= self.time <= _LATEST, "its time is malformed")
        _check(_HEX64.fullmatch(self.commit) is not None, "a hash is malformed")


class Gc(Record, frozen=True, kw_only=True):
    """gc/B.json: the data of versions below B may be deleted."""

    below: int
    time: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(_is_count(self.below), "its version is malformed")


class PassedVersion(msgspec.Struct, frozen=True):
    """The stages of one version in a follower."""

    version: int
    stages: dict[str, StageTiming]


class Heartbeat(Record, frozen=True, kw_only=True):
    """replicas/NAME.json: the position of a follower.

    The follower counts as alive for `lease` seconds after this was written, at most a day. A stopped follower writes 0.
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
    recent: tuple[PassedVersion, ...] = ()  # the latest versions, oldest first

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(-1 <= self.version <= _MOST and -1 <= self.head <= _MOST and self.lease >= 0, "a number is malformed")
        _check(self.served is None or -1 <= self.served <= _MOST, "a number is malformed")
        _check(is_replica_name(self.name), f"{self.name!r:.100} is not a valid replica name")

    @property
    def reached(self) -> int:
        """The version that clients of this replica see: the one of its engines, if it has any."""
        return self.version if self.served is None else min(self.version, self.served)

    @property
    def stopped(self) -> bool:
        """Whether it was stopped on purpose."""
        return self.lease == 0

    @property
    def lifetime(self) -> float:
        """Seconds that the follower counts as alive after this was written."""
        return min(self.lease, _LONGEST_LEASE)

    def alive_until(self, modified: float) -> float:
        """When its lease ends, if it was written at `modified`. Both by the store's clock."""
        return modified + self.lifetime


RECORD_LIMITS = {
    RUN: 64 << 20,  # 70,000 tensors take 5 MB
    HEAD: 64 << 10,
    ALIVE: 64 << 10,
    Folder.EPOCHS: 64 << 10,
    Folder.COMMITS: 1 << 20,  # grows with ranks and metrics; readers hold dozens of them before they check one
    Folder.SHORTCUTS: 1 << 20,  # grows with ranks
    Folder.GC: 64 << 10,
    Folder.REPLICAS: 1 << 20,
}
"""The most bytes of a record, by path or folder. Writers keep to it, and readers read no more."""

LARGEST_COMMIT = RECORD_LIMITS[Folder.COMMITS]


def record_limit(path: str) -> int:
    folder, slash, _ = path.partition("/")
    return RECORD_LIMITS[f"{folder}{slash}"]


# --- bytes -------------------------------------------------------------------------------------------------------

AnyRecord = TypeVar("AnyRecord", bound=Record)


@dataclass(frozen=True)
class Sealed(Generic[AnyRecord]):
    """A record and its stored bytes, which are hashed."""

    record: AnyRecord
    data: bytes

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()

    @property
    def signature(self) -> Signature | None:
        """Its signature, not verified."""
        return signature_of(self.data)

    @property
    def is_authentic(self) -> bool:
        """Whether it is signed, and the signature is that of its key. The key may be anyone's."""
        signature = self.signature
        return signature is not None and signature.is_of(_SIGNED[type(self.record)], _record_of(self.data))


_SIGNED: dict[type[Record], str] = {Commit: "commit", Shortcut: "shortcut", SignOfLife: "alive"}
"""The kinds of records that may be signed, with the names that their signatures cover."""


def _record_of(data: bytes) -> bytes:
    """The first line of a record that may be signed."""
    return data.partition(b"\n")[0]


def seal(record: AnyRecord, key: PrivateKey | None = None) -> Sealed[AnyRecord]:
    """The bytes to store for a record, signed if there is a key."""
    data = msgspec.json.encode(record)
    return Sealed(record, data if key is None else add_signature(_SIGNED[type(record)], data, key))


class _AnyFormat(msgspec.Struct):
    format: str = ""


def unseal(data: bytes, kind: type[AnyRecord], where: str) -> Sealed[AnyRecord]:
    """Decodes a record. Checks the protocol version first, then all types. Verifies no signature."""
    try:
        record = _record_of(data) if kind in _SIGNED else data
        found = msgspec.json.decode(record, type=_AnyFormat).format
        check_format(found, where, BrokenChain(f"{where}: not a weightwire record", hint=DAMAGED))
        sealed = Sealed(msgspec.json.decode(record, type=kind), data)
        if kind in _SIGNED:
            signature_of(data)  # only its form
        return sealed
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as problem:
        reason = str(problem) if isinstance(problem, msgspec.ValidationError) else "it is not JSON"
        raise BrokenChain(f"{where}: cannot be read ({reason:.200})", hint=DAMAGED) from problem


def back_versions(version: int) -> list[int]:
    """The versions 2, 4, 8... before one, as far as they exist."""
    return [version - (1 << k) for k in range(1, version.bit_length()) if version >= 1 << k]


def shortcut_path(shortcut: Sealed[Shortcut]) -> str:
    """Contains a hash of its bytes: the same shortcut written twice is the same object."""
    return f"{Folder.SHORTCUTS}{shortcut.record.version}/anchor-{shortcut.sha256[:16]}.json"
