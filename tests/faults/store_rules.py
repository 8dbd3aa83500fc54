"""What a writer must never do to a bucket, by docs/PROTOCOL.md. Judged at every change, apart from the tested code."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field

from faults.simulated_keys import Json, keys_in_force, parse, signer_of
from faults.simulated_runtime import Process
from faults.simulated_store import Objects, Store, Watch, is_data
from weightwire.upkeep.retention import Retention

DAY = 86400.0


@dataclass
class SweepStart:
    """What a sweep could know when it began."""

    at: float
    leases: dict[str, tuple[int, float]]  # by path of the heartbeat: the version, and the end of the lease
    unreadable: set[str]  # heartbeats
    shortcuts: dict[str, bytes]
    may_delete: bool  # False if it is shown a hole in the chain
    keys: list[str]  # in force then
    anchors: list[int]  # those usable then, the oldest first


@dataclass
class StoreRules(Watch):
    """`violate` is called with each broken rule. `retention` is what the sweeps of this simulation keep."""

    violate: Callable[[str], None]
    retention: Retention = field(default_factory=Retention)
    sweeps: dict[Process, SweepStart] = field(default_factory=dict)
    claims: dict[int, Process] = field(default_factory=dict)  # by epoch
    refused: set[Process] = field(default_factory=set)  # publishers whose key was not in force when they started
    known: dict[Process, int] = field(default_factory=dict)  # the newest epoch when it last looked for a commit
    may_delete: bool = True  # False while a sweep sees a hole in the chain
    first: dict[str, float] = field(default_factory=dict)  # by path: when data was written; late requests repeat it

    # --- writing -------------------------------------------------------------------------------------------------

    def creates(self, store: Store, path: str, data: bytes, who: Process) -> None:
        if path in store.created and store.created[path] != data and path.startswith("commits/"):
            self.violate(f"{path}: two histories")
        if path.startswith("epochs/"):
            self.claims[int(path[7:15])] = who
            if who in self.refused:
                self.violate(f"{path}: claimed by a publisher whose key is not in force")
        elif path.startswith("commits/"):
            self._check_commit(store, path, parse(data), who)
            self._check_signed(store, path, "commit", data, None)
        elif path.startswith("shortcuts/"):
            record = parse(data)
            commit = _read(store.objects, f"commits/{record['version']:020}.json")
            if commit is None or commit["after"] != record["after"]:
                self.violate(f"{path}: is not a shortcut to its version")
            self._check_data(store, path, record)
        elif path == "run.json":
            missing = [file["path"] for file in parse(data).get("files", []) if file["path"] not in store.objects]
            if missing:
                self.violate(f"{path}: names {missing[0]}, which was not uploaded before")

    def _check_commit(self, store: Store, path: str, record: Json, who: Process) -> None:
        objects = store.objects
        version, epoch = record["version"], record["epoch"]
        if self.claims.get(epoch) is not who:
            self.violate(f"{path}: its publisher has not claimed epoch {epoch}")
        if version:
            parent = objects.get(f"commits/{version - 1:020}.json")
            if parent is None or hashlib.sha256(parent[0]).hexdigest() != record["parent"]:
                self.violate(f"{path}: does not name the commit before it")
            elif (epoch > parse(parent[0])["epoch"]) != (record["kind"] == "fence"):
                self.violate(f"{path}: a publisher must begin with one fence")
            back = [_hash(objects, version - (1 << k)) for k in range(1, version.bit_length()) if version >= 1 << k]
            if record["back"] != back:
                self.violate(f"{path}: its back hashes are not those of the commits before it")
        elif record["parent"] != hashlib.sha256(objects.get("run.json", (b"",))[0]).hexdigest():
            self.violate(f"{path}: does not name run.json")
        self._check_data(store, path, record)

    def _check_signed(self, store: Store, path: str, kind: str, data: bytes, after: int | None) -> None:
        """In a signed run, a key in force signs everything, and keys change only as the chain says."""
        keys, key = keys_in_force(store.objects, after), signer_of(kind, data)
        if (key not in keys) if keys else key:
            self.violate(f"{path}: is signed by {key[:12] or 'nobody'}, the keys in force are {keys}")
        if kind == "commit" and parse(data)["keys_from"] != _keys_from(store.objects):
            self.violate(f"{path}: names other keys than those in force")

    def _check_data(self, store: Store, path: str, record: Json) -> None:
        for file in record["files"]:
            found = store.objects.get(file["path"])
            if found is None and path.startswith("shortcuts/") and file["path"] in self.first:
                continue  # written late, or again, after upkeep deleted the data: nobody can use it, but nobody must
            if found is None or len(found[0]) != file["size"]:
                self.violate(f"{path}: names {file['path']}, which was not uploaded before")

    def puts(self, store: Store, path: str, data: bytes, who: Process, late: bool) -> None:
        if path.startswith(("commits/", "epochs/", "gc/", "run.json")):
            self.violate(f"{path}: overwritten")
        self.first.setdefault(path, store.now())
        if path == "alive.json":
            version = parse(data)["version"]
            if _hash(store.objects, version) != parse(data)["commit"]:
                self.violate(f"{path}: names a commit that does not exist")
            self._check_signed(store, path, "alive", data, version)
            if parse(data)["epoch"] < self.known.get(who, 0) and not late:
                self.violate(f"{path}: written by a publisher that has seen its successor")
        if path.startswith("probe/") and who.name.startswith("upkeep") and not late:
            self.sweeps[who] = self._begin(store)  # a sweep begins by reading the store's clock

    def looks(self, store: Store, path: str, who: Process) -> None:
        if path.startswith("commits/") and path in store.objects:
            self.known[who] = parse(store.objects[path][0])["epoch"]

    # --- deleting ------------------------------------------------------------------------------------------------

    def _begin(self, store: Store) -> SweepStart:
        now, leases, unreadable = store.now(), {}, set()
        keys, anchors = keys_in_force(store.objects), sorted(usable_anchors(store))
        for path in store.paths("replicas/"):
            beat, modified = _read(store.objects, path), store.objects[path][1]
            if beat is None:
                unreadable |= {path} if now - modified < DAY else set()
            elif beat["version"] >= 0 and beat["run"] == (_read(store.objects, "run.json") or {}).get("run"):
                leases[path] = beat["version"], modified + min(beat["lease"], DAY)
        return SweepStart(now, leases, unreadable, dict(store.latest("shortcuts/")), self.may_delete, keys, anchors)

    def wants_to_delete(self, who: Process) -> object:
        return self.sweeps.get(who)

    def deletes(self, store: Store, path: str, who: Process, ticket: object) -> None:
        if path.startswith(("commits/", "epochs/", "gc/", "run.json", "files/")):
            self.violate(f"{path}: deleted")
        if path not in store.objects or not who.name.startswith("upkeep"):
            return
        now, modified = store.now(), store.objects[path][1]
        if path.startswith("replicas/") and now - modified < max(DAY, self.retention.window):
            self.violate(f"{path}: the heartbeat of a replica that may be back was deleted")
        if not (is_data(path) or path.startswith("shortcuts/")):
            return
        # A request may take effect long after its sweep.
        if isinstance(ticket, SweepStart) and not ticket.may_delete:
            self.violate(f"{path}: deleted, although a commit is missing")
        version = int(path.split("/")[1])
        if not isinstance(ticket, SweepStart):
            self.violate(f"{path}: deleted by a sweep that did not read the clock of the store")
        elif problem := self._why_kept(store, version, ticket):
            if path.startswith("shortcuts/") or not self._is_orphan(store, path, version):
                self.violate(f"{path}: deleted, although {problem}")
        elif any(path.encode() in data and name in store.objects for name, data in ticket.shortcuts.items()):
            self.violate(f"{path}: deleted before the shortcut that names it")

    def _why_kept(self, store: Store, version: int, start: SweepStart) -> str:
        """Why data of a version must stay, or an empty string."""
        objects, now = store.objects, store.now()
        if start.unreadable & {path for path in start.unreadable if path in objects}:
            return "a heartbeat cannot be read"
        announced = [
            int(path[3:23])
            for path, (_, modified) in objects.items()
            if path.startswith("gc/") and now - modified >= self.retention.grace
        ]
        if not any(below > version for below in announced):
            return "its grace period is not over"
        # What a key vouched for when the sweep looked may be deleted when the key is revoked: that is the price of it.
        anchors = sorted(usable_anchors(store)) if keys_in_force(objects) == start.keys else start.anchors
        kept = anchors[-self.retention.anchors :]
        if not kept or version >= kept[0]:
            return f"the anchors to keep are {kept}"
        young = [
            int(path[8:28])
            for path, (_, modified) in objects.items()
            if path.startswith("commits/") and now - modified < self.retention.window
        ]
        if young and version >= max((one for one in anchors if one <= min(young)), default=0):
            return f"version {min(young)} is younger than the window"
        for path, (held, until) in start.leases.items():
            beat = _read(objects, path)
            # A heartbeat without a version, or with lease 0, has given the lease up.
            needs = beat is not None and beat["lease"] > 0 and beat["version"] >= 0
            if until > start.at and beat is not None and needs and version > max(held, beat["version"]):
                return f"{path} holds a lease at version {held}"
        return ""

    def _is_orphan(self, store: Store, path: str, version: int) -> bool:
        commit = store.objects.get(f"commits/{version:020}.json")
        shortcuts = [data for name, data in store.created.items() if name.startswith(f"shortcuts/{version}/")]
        if commit is None or any(path.encode() in data for data in (commit[0], *shortcuts)):
            return False
        patience = self.retention.grace if path.startswith("deltas/") else max(self.retention.grace, DAY)
        return store.now() - self.first[path] >= patience


def is_vouched_for(objects: Objects, shortcut: bytes) -> bool:
    """Whether readers use a shortcut: in a signed run, a key that is in force now has signed it."""
    keys = keys_in_force(objects)
    return not keys or signer_of("shortcut", shortcut) in keys


def are_all_revoked(store: Store) -> bool:
    """Whether only keys that were revoked vouch for the anchors. The next version must be an anchor."""
    return not usable_anchors(store) and bool(usable_anchors(store, lambda objects, shortcut: True))


def usable_anchors(store: Store, counts: Callable[[Objects, bytes], bool] = is_vouched_for) -> list[int]:
    """The versions with an anchor that leads to the newest version, the newest first."""
    objects, found = store.objects, []
    shortcuts: dict[int, list[Json]] = {}
    for path in store.paths("shortcuts/"):
        if counts(objects, objects[path][0]):
            shortcuts.setdefault(int(path.split("/")[1]), []).append(parse(objects[path][0]))
    for path in sorted(store.paths("commits/"), reverse=True):
        commit = parse(objects[path][0])
        starts = [one for one in shortcuts.get(commit["version"], []) if one["after"] == commit["after"]]
        starts += [commit] if commit["kind"] == "anchor" else []
        if any(_is_there(objects, one) for one in starts):
            found.append(commit["version"])
        if not _is_there(objects, commit):
            break
    return found


def _is_there(objects: Objects, record: Json) -> bool:
    return all(file["path"] in objects and len(objects[file["path"]][0]) == file["size"] for file in record["files"])


def _read(objects: Objects, path: str) -> Json | None:
    try:
        return parse(objects[path][0])
    except (KeyError, ValueError):
        return None


def _keys_from(objects: Objects) -> int | None:
    changes = [path for path in objects if path.startswith("commits/") and parse(objects[path][0])["keys"]]
    return max((int(path[8:28]) for path in changes), default=None)


def _hash(objects: Objects, version: int) -> str:
    found = objects.get(f"commits/{version:020}.json")
    return hashlib.sha256(found[0]).hexdigest() if found else ""
