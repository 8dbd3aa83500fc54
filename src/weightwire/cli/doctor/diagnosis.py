"""The rules of `weightwire doctor`: what the measured facts mean for publishing and following. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from weightwire.chain import AccessRole, Folder, Verb, access_of
from weightwire.cli.doctor.machine import Disk, EngineAnswer, MissingDirectory
from weightwire.cli.shared.bucket_command import short, span
from weightwire.cli.shared.terminal import byte_size, counted
from weightwire.errors import DataGone, NotFound, PermissionDenied, WeightwireError
from weightwire.inspection import Readiness
from weightwire.upkeep import Operation, StoreTrial

__all__ = [
    "Check",
    "Role",
    "check_disk",
    "check_engine",
    "check_kernel",
    "check_memory",
    "check_missing_directory",
    "check_roles",
    "check_run",
    "check_store",
]

CheckState = Literal["ok", "warning", "problem"]
Role = Literal["follow", "publish"]

_SLOW = 1.0  # seconds for a small request
_SKEW = 5.0  # seconds: stores round their times, and a request takes a moment
_VECTORS = {512: "AVX-512", 256: "AVX2"}


@dataclass(frozen=True)
class Check:
    """One line of the report. `stops` are the roles that cannot work here."""

    name: str
    state: CheckState
    message: str
    hint: str | None = None
    stops: tuple[Role, ...] = ()

    @classmethod
    def failed(cls, name: str, problem: WeightwireError, *stops: Role) -> Check:
        return cls(name, "problem", problem.message, problem.hint, stops)


def check_store(trial: StoreTrial) -> Iterator[Check]:
    if trial.unreachable:
        yield Check.failed("store", trial.unreachable, "follow", "publish")
        return
    yield Check("store", "ok", f"{trial.url} is reachable")
    for rule in (_LIST, _READ, _WRITE, _create, _DELETE, _latency, _bandwidth, _clock):
        check = rule(trial)
        if check is not None:
            yield check


@dataclass(frozen=True)
class _OperationRule:
    """How one operation is judged. `denied` says what a key without the permission cannot do."""

    name: Operation
    works: str
    stops: tuple[Role, ...] = ()
    denied: str = ""
    hint: str = ""

    def __call__(self, trial: StoreTrial) -> Check | None:
        if self.name not in trial.results:
            return None
        problem = trial.results[self.name]
        if problem is None:
            return Check(self.name, "ok", self.works)
        if self.denied and isinstance(problem, PermissionDenied):
            return Check(self.name, "warning", self.denied, self.hint, self.stops)
        return Check.failed(self.name, problem, *self.stops)


_LIST = _OperationRule(
    "list",
    "objects can be listed",
    ("publish",),
    "listing is denied: following works, but publish, status, log, verify, restore, page and gc do not",
    "give the key list permission (s3:ListBucket); `weightwire policy ROLE URL` prints what each role needs",
)
_READ = _OperationRule("read", "objects can be read", ("follow", "publish"))
_WRITE = _OperationRule(
    "write",
    "objects can be written",
    ("publish",),
    "writing is denied: this key can follow, but cannot publish",
    "`weightwire policy publisher URL` prints what a publisher needs; a follower writes only its heartbeat",
)
_DELETE = _OperationRule(
    "delete",
    "objects can be deleted",
    (),
    "deleting is denied, as it should be for all keys but that of gc: small probe objects stay in probe/",
    "run `weightwire gc URL` with its own key: it removes them after a day",
)


def _create(trial: StoreTrial) -> Check | None:
    if "create" not in trial.results:
        return None
    problem = trial.results["create"]
    if problem is not None:
        return Check.failed("create", problem, "publish")
    if trial.strict:
        return Check("create", "ok", "create-if-absent is atomic: two publishers cannot both commit a version")
    return Check(
        "create",
        "warning",
        "create-if-absent is not atomic: nothing stops a second publisher",
        "run only one publisher, or use the S3 gateway of the store",
    )


def _latency(trial: StoreTrial) -> Check | None:
    if trial.latency is None:
        return None
    message = f"{short(trial.latency)} for a small request"
    if trial.latency < _SLOW:
        return Check("latency", "ok", message)
    return Check(
        "latency",
        "warning",
        f"{message}: every update takes several of them",
        "use a bucket in the region of this machine",
    )


def _bandwidth(trial: StoreTrial) -> Check | None:
    both = (("upload", trial.upload), ("download", trial.download))
    rates = [f"{way} {byte_size(round(one.rate))}/s" for way, one in both if one]
    return Check("bandwidth", "ok", ", ".join(rates)) if rates else None


def _clock(trial: StoreTrial) -> Check | None:
    offset = trial.clock_offset
    if offset is None:
        return None
    if abs(offset) <= _SKEW:
        return Check("clock", "ok", "agrees with the clock of the store")
    where = "behind" if offset > 0 else "ahead of"
    return Check(
        "clock",
        "warning",
        f"this machine's clock is {span(abs(offset))} {where} the store's: status, page and metrics show wrong ages, "
        "and S3 rejects requests from 15 min on",
        "synchronize the clock of this machine (NTP)",
    )


def check_missing_directory(missing: MissingDirectory) -> Check:
    """Nothing else is tried: the doctor does not create the directory of a run."""
    if missing.parent == missing.path:
        return Check(
            "store", "problem", f"{missing.path}: not a directory", "name a directory", stops=("follow", "publish")
        )
    if not missing.can_be_created:
        return Check(
            "store",
            "problem",
            f"{missing.path}: does not exist, and a publisher cannot create it in {missing.parent}",
            f"check the path, or make {missing.parent} a writable directory",
            stops=("publish",),
        )
    return Check(
        "store",
        "warning",
        f"{missing.path}: does not exist; a publisher would create it, and a follower would wait for it",
        "check the path; to test the file system, create the directory and run this command again",
    )


def check_roles(trial: StoreTrial, found: Readiness | None) -> Check | None:
    """Which roles this key has the permissions for. Directories and Hugging Face buckets have no roles."""
    if "://" not in trial.url or not trial.strict or trial.unreachable:
        return None
    lacking = {role: _lacking(trial, found, role) for role in AccessRole}
    enough = [role for role, what in lacking.items() if not what]
    rest = [f"{role} ({what})" for role, what in lacking.items() if what]
    verdicts = ((enough, "enough for"), (rest, "not enough for"))
    message = "; ".join(f"{verdict} {', '.join(roles)}" for roles, verdict in verdicts if roles)
    stops: tuple[Role, ...] = ("publish",) if AccessRole.PUBLISHER not in enough else ()
    return Check("roles", "ok", f"this key is {message}", stops=stops)


def _lacking(trial: StoreTrial, found: Readiness | None, role: AccessRole) -> str:
    """The first permission that a key for this role lacks, or an empty string."""
    if not trial.works("read"):
        return "get run.json"
    for one in access_of(role):
        for verb in one.verbs:
            if one.path == Folder.PROBE and verb is Verb.PUT and not trial.works("write"):
                return f"{verb} {one.path}"
            is_optional = role is AccessRole.FOLLOWER and verb is Verb.LIST
            if (verb, one.path) in trial.denied and not is_optional:
                return f"{verb} {one.path}"
    reads_data = role in (AccessRole.FOLLOWER, AccessRole.READER)
    return "get data" if reads_data and found and isinstance(found.problem, PermissionDenied) else ""


def check_run(found: Readiness) -> Check:
    if isinstance(found.problem, PermissionDenied):
        return Check("run", "warning", found.problem.message, found.problem.hint, ("follow",))
    if isinstance(found.problem, DataGone | NotFound):  # a publisher can still publish an anchor
        return Check.failed("run", found.problem, "follow")
    if found.problem is not None:
        return Check.failed("run", found.problem, "follow", "publish")
    if found.run is None:
        return Check("run", "ok", "no run here yet: the first publish starts one")
    run = f"run {found.run.run[:12]}"
    if found.version is None:
        return Check("run", "ok", f"{run} has no version yet")
    newest = f"{run}, version {found.version}: {counted(len(found.files), 'file')}, {byte_size(found.nbytes)}"
    if found.lost:
        message = f"{newest}; {counted(len(found.lost), 'file')} missing or truncated, but another path exists"
        return Check("run", "warning", message, "run `weightwire verify URL` to list the damage")
    if found.base is not None:
        return Check("run", "ok", f"{newest} on top of the base checkpoint {found.base or 'of unknown origin'}")
    return Check("run", "ok", f"{newest} to download for a new replica")


def check_kernel(vector_bits: int | None) -> Check:
    if vector_bits is None:
        return Check(
            "kernel",
            "warning",
            "the compiled kernel is missing: encoding and decoding are many times slower",
            "install a C compiler, then install weightwire again",
        )
    using = f", using {_VECTORS[vector_bits]}" if vector_bits in _VECTORS else ""
    return Check("kernel", "ok", f"compiled{using}")


def check_disk(disk: Disk, weights: int | None) -> Check:
    """A replica holds its weights and a checkpoint of them, and for a moment the next checkpoint as well."""
    if disk.problem:
        return Check(
            "disk",
            "problem",
            f"{disk.directory}: cannot be written ({disk.problem})",
            "choose another --into",
            stops=("follow",),
        )
    free = f"{disk.directory}: {byte_size(disk.free)} available"
    copies = 1 if disk.shares_blocks else 2
    if weights is None:
        return Check("disk", "ok", f"{free}; a replica needs up to {copies + 1} times the size of the weights")
    least, most = copies * weights, (copies + 1) * weights
    needs = f"a replica of this run needs {byte_size(least)}, for a moment {byte_size(most)}"
    if disk.free < least:
        return Check(
            "disk", "problem", f"{free}, but {needs}", "free space there, or choose another --into", ("follow",)
        )
    if disk.free < most:
        return Check("disk", "warning", f"{free}, but {needs}", "free space there, or choose another --into")
    return Check("disk", "ok", f"{free}; {needs}")


def check_memory(free: int | None, weights: int | None) -> Check | None:
    """Patches for an engine go through shared memory. They are small, unless most weights change."""
    if free is None:
        return None
    message = f"{byte_size(free)} of shared memory free"
    if weights is None or free >= weights // 10:
        return Check("memory", "ok", message)
    return Check(
        "memory",
        "warning",
        f"{message}: an update that changes many of the {byte_size(weights)} of weights does not fit",
        "enlarge /dev/shm (docker run --shm-size)",
    )


def check_engine(answer: EngineAnswer) -> Check:
    if answer.problem is not None:
        return Check.failed("engine", answer.problem, "follow")
    if not answer.software:
        return Check("engine", "ok", f"{answer.kind}: not contacted, since this kind of engine has no check")
    serves = "weights of unknown version" if answer.version is None else f"version {answer.version}"
    return Check("engine", "ok", f"{answer.software} with the weightwire plugin, serves {serves}")
