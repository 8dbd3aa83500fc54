"""Records and data that look like a publisher's, for stores that lie.

Without signatures, nobody can tell a well-made next version from a real one. So a `Forger` makes well-made versions,
and `FORGERIES` break exactly one rule of docs/PROTOCOL.md each.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from faults.simulated_store import Objects
from faults.simulated_world import Arrays, World, copy_of, sha256, train
from weightwire import diff, digest
from weightwire.chain.keys import PrivateKey
from weightwire.chain.record_paths import commit_path, data_path
from weightwire.chain.records import Commit, DataFile, Sealed, Shortcut, back_versions, seal, shortcut_path
from weightwire.delta import anchor

Chain = Sequence[Sealed[Commit]]  # from version 0 on


@dataclass
class Forger:
    """Makes versions. `objects` are all objects that it made."""

    world: World
    random: random.Random
    objects: Objects = field(default_factory=dict)
    key: PrivateKey | None = None
    states: dict[str, Arrays] = field(default_factory=dict)

    def sealed(self, commit: Commit) -> Sealed[Commit]:
        return seal(commit, self.key)

    def weights(self, state: str) -> Arrays:
        return self.states.get(state) or self.world.truth.states[state]

    def next_state(self, state: str) -> str:
        """A state that no trainer had."""
        weights = copy_of(self.weights(state))
        train(weights, self.random)
        weights["norm"][0] += 1 + self.random.random()
        after = digest(weights, threads=1).hex
        self.states[after] = weights
        return after

    def data(self, kind: str, version: int, epoch: int, after: str, before: str = "") -> DataFile:
        """Puts a file under the path of a `kind`. Without a state before, it is an anchor."""
        new = self.weights(after)
        made = diff(self.weights(before), new, threads=1) if before else anchor(new, threads=1)
        return self.put(kind, version, epoch, b"".join(made.chunks()))

    def put(self, kind: str, version: int, epoch: int, data: bytes) -> DataFile:
        path = data_path(kind, version, epoch, 0, sha256(data))
        self.objects[path] = data, self.world.store.now()
        return DataFile(path, len(data), sha256(data), 0)

    def following(self, chain: Chain, kind: str = "delta", version: int | None = None) -> Commit:
        """A well-made next version."""
        parent = chain[-1].record
        number = parent.version + 1 if version is None else version
        after = self.next_state(parent.after)
        before = parent.after if kind == "delta" else ""
        hashes = {one.record.version: one.sha256 for one in chain}
        return Commit(
            run=parent.run,
            version=number,
            epoch=parent.epoch,
            write_id=f"{self.random.getrandbits(128):032x}",
            kind=kind,  # type: ignore[arg-type]
            parent=chain[-1].sha256,
            back=tuple(hashes.get(one, chain[-1].sha256) for one in back_versions(number)),
            before=parent.after,
            after=after,
            files=(self.data(kind, number, parent.epoch, after, before),),
            time=parent.time + 1,
            keys_from=parent.next_keys_from,
        )

    def lineage(self, chain: Chain, count: int) -> list[Sealed[Commit]]:
        """So many well-made versions more, and an anchor beside every other one."""
        made = [*chain]
        for _ in range(count):
            made.append(self.sealed(self.following(made)))
            if made[-1].record.version % 2 == 0:
                self.shortcut(made[-1].record)
        self.commit(*made[len(chain) :])
        return made

    def shortcut(self, commit: Commit, after: str = "", data: str = "") -> None:
        """An anchor beside the chain. It says that it has the state `after`, and has the state `data`."""
        after = after or commit.after
        file = self.data("anchor", commit.version, commit.epoch, data or after)
        sealed = seal(Shortcut(run=commit.run, version=commit.version, kind="anchor", after=after, files=(file,)))
        self.objects[shortcut_path(sealed)] = sealed.data, self.world.store.now()

    def commit(self, *commits: Sealed[Commit]) -> None:
        for one in commits:
            self.objects[commit_path(one.record.version)] = one.data, self.world.store.now()


def first_anchor(forger: Forger, first: Commit, after: str, version: int = 1) -> Commit:
    """An anchor after version 0, or in its place. Its parent is that of version 0."""
    file = forger.data("anchor", version, first.epoch, after)
    keys_from = first.next_keys_from if version else None
    fields = {"version": version, "kind": "anchor", "keys": (), "keys_from": keys_from}
    return msgspec.structs.replace(first, after=after, files=(file,), **fields)


Forgery = Callable[[Forger, Chain], Commit | None]
"""Makes a version after a chain that breaks one rule; None if that is not possible here."""


def _with(**fields: object) -> Callable[[Commit], Commit]:
    return lambda commit: msgspec.structs.replace(commit, **fields)


def _other_parent(forger: Forger, chain: Chain) -> Commit:
    return _with(parent=sha256(forger.random.randbytes(8)))(forger.following(chain))


def _other_back(forger: Forger, chain: Chain) -> Commit | None:
    made = forger.following(chain)
    return _with(back=(sha256(b"back"), *made.back[1:]))(made) if made.back else None


def _in_epoch(forger: Forger, commit: Commit, epoch: int) -> Commit:
    files = []
    for file in commit.files:
        path = data_path(commit.kind, commit.version, epoch, file.rank, file.sha256)
        forger.objects[path] = forger.objects[file.path]
        files.append(msgspec.structs.replace(file, path=path))
    return _with(epoch=epoch, files=tuple(files))(commit)


def _older_epoch(forger: Forger, chain: Chain) -> Commit | None:
    made = forger.following(chain)
    return _in_epoch(forger, made, made.epoch - 1) if made.epoch > 1 else None


def _epoch_without_fence(forger: Forger, chain: Chain) -> Commit:
    made = forger.following(chain)
    return _in_epoch(forger, made, made.epoch + 1)


def _other_keys_from(forger: Forger, chain: Chain) -> Commit | None:
    """Says that its keys come from the version before, which named none."""
    parent = chain[-1].record
    return None if parent.keys else _with(keys_from=parent.version)(forger.following(chain))


def _second_fence(forger: Forger, chain: Chain) -> Commit:
    made = forger.following(chain)
    return _with(kind="fence", after=made.before, files=())(made)


def _other_run(forger: Forger, chain: Chain) -> Commit:
    return _with(run=f"{forger.random.getrandbits(128):032x}")(forger.following(chain))


def _other_before(forger: Forger, chain: Chain) -> Commit:
    return _with(before=sha256(b"before"))(forger.following(chain, "anchor"))


def _other_after(forger: Forger, chain: Chain) -> Commit:
    made = forger.following(chain)
    return _with(after=forger.next_state(made.after))(made)


def _anchor_with_other_after(forger: Forger, chain: Chain) -> Commit:
    made = forger.following(chain, "anchor")
    return _with(after=forger.next_state(made.after))(made)


def _nothing_changed(forger: Forger, chain: Chain) -> Commit:
    """A delta without files that claims another state before and after it."""
    other = forger.next_state(chain[-1].record.after)
    return _with(before=other, after=other, files=())(forger.following(chain))


def _later_version(forger: Forger, chain: Chain) -> Commit:
    made = forger.following(chain, version=chain[-1].record.version + 2)
    return _with(back=(chain[-1].record.parent, *made.back[1:]))(made)


def _anchor_as_delta(forger: Forger, chain: Chain) -> Commit:
    made = forger.following(chain)
    return _with(files=(forger.data("delta", made.version, made.epoch, made.after),))(made)


def _delta_as_anchor(forger: Forger, chain: Chain) -> Commit:
    made = forger.following(chain, "anchor")
    return _with(files=(forger.data("anchor", made.version, made.epoch, made.after, made.before),))(made)


def _delta_of_another_state(forger: Forger, chain: Chain) -> Commit:
    made = forger.following(chain)
    other = forger.next_state(made.before)
    return _with(files=(forger.data("delta", made.version, made.epoch, made.after, other),))(made)


FORGERIES: Mapping[str, Forgery] = {
    "another parent": _other_parent,
    "another back hash": _other_back,
    "an older epoch": _older_epoch,
    "a newer epoch without a fence": _epoch_without_fence,
    "a fence without a new epoch": _second_fence,
    "another run": _other_run,
    "keys of another version": _other_keys_from,
    "another state before it": _other_before,
    "another state after it": _other_after,
    "an anchor with another state after it": _anchor_with_other_after,
    "nothing changed, from another state": _nothing_changed,
    "a later version in its place": _later_version,
    "an anchor named as a delta": _anchor_as_delta,
    "a delta named as an anchor": _delta_as_anchor,
    "a delta of another state": _delta_of_another_state,
}
