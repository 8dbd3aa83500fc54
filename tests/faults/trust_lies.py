"""Stores in the hands of a thief, who has no key in force: what a follower with trusted keys must refuse.

The thief may write anything, show old objects, and hide new ones. The thief may also have a key that was revoked.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import ClassVar

import msgspec

from faults.forgery import Chain, Forger, first_anchor
from faults.lies import Lie, LieMaker
from faults.simulated_follower import SimFollower
from faults.simulated_keys import SimKeys, parse, signer_of
from faults.simulated_runtime import EPOCH
from faults.simulated_world import World
from weightwire.chain.keys import PrivateKey
from weightwire.chain.record_paths import ALIVE, HEAD, RUN, commit_path
from weightwire.chain.records import Commit, Run, Sealed, SignOfLife, seal, unseal

Forged = list[Sealed[Commit]]


class TrustLies:
    def __init__(self, world: World, rng: random.Random) -> None:
        self.world = world
        self.random = rng

    @property
    def _keys(self) -> SimKeys:
        assert self.world.keys is not None
        return self.world.keys

    @property
    def _revoked(self) -> PrivateKey | None:
        found = self._keys.revoked(self.world.store.objects)
        return self.random.choice(found) if found else None

    def to_holders(self, follower: SimFollower) -> list[LieMaker]:
        hides = partial(self._hide, follower)
        first: list[LieMaker] = self.random.choice([self._strangers(), [], []])
        first += self.random.choice([[hides, hides], []])
        last: list[LieMaker] = [self._forget, self._lose_data, self._other_run, self._thiefs_run_json, self._other_form]
        if follower.trust.max_age is not None:
            last += [self._hole, self._freeze, partial(self._forge_alive, follower), self._zombie]
        return [*first, *self.random.sample(last, 3)]

    def to_newcomers(self, follower: SimFollower) -> list[LieMaker]:
        several: list[LieMaker] = [] if follower.trust.pins else [self._thiefs_run]  # it would pin the thief's keys
        if (age := follower.trust.max_age) is not None:
            several += [partial(self._old_copy, age), partial(self._forge_alive, follower), self._zombie]
        self.random.shuffle(several)
        return [*several, *self._strangers()]

    def to_trainer(self, chain: Chain) -> Lie | None:
        return self._shadow(chain) if self.random.random() < 0.3 else self._next_for_trainer(chain)

    def _shadow(self, chain: Chain) -> Lie | None:
        """The newest versions are hidden, and what the trainer adds is shown to nobody else."""
        found = self.world.store.objects.get(ALIVE)
        alive = parse(found[0])["version"] if found else 0
        older = [one for one in chain if one.record.version < alive and one.record.after in self.world.truth.states]
        newest = self.random.choice(older).record.version if older else 0
        keys = [key.public.hex for key in self._keys.at(chain[: newest + 1])]
        if found is None or not older or signer_of("alive", found[0]) not in keys:
            return None  # such a trainer could not know
        hidden = ("commits/",), newest
        shown: dict[str, tuple[bytes, float] | None] = {HEAD: None, ALIVE: found}
        return Lie(self.world.store, shown, name="rolled back", newest=hidden, is_shadow=True)

    def _next_for_trainer(self, chain: Chain) -> Lie | None:
        name = self.random.choice(["unsigned", "signed by a thief", "changed after it was signed", "a revoked key"])
        forger = Forger(self.world, self.random)
        made = self.STRANGERS[name](self, forger, chain)
        if made is None or chain[-1].record.after not in self.world.truth.states:
            return None
        forger.commit(*made)
        lie = Lie(self.world.store, {**forger.objects}, name=name)
        lie.trap = commit_path(made[0].record.version) if self.random.random() < 0.6 else ""
        return lie

    def to_first_trainer(self) -> Lie:
        """A stranger's run.json is there before the run."""
        tensors = {"layer.weight": ("F16", (self.world.model, 16)), "norm": ("F32", (5,)), "empty": ("F32", (0, 3))}
        named = () if self.random.random() < 0.5 else (self._keys.honest[0].public.hex,)
        run = Run(run=f"{self.random.getrandbits(128):032x}", time=EPOCH, mode="strict", tensors=tensors, keys=named)
        return Lie(self.world.store, {RUN: (seal(run).data, EPOCH)}, name="a stranger's run.json")

    # --- the next version comes from a stranger ------------------------------------------------------------------

    def _strangers(self) -> list[LieMaker]:
        names = [*self.STRANGERS]  # those with a revoked key are possible only after a change
        self.random.shuffle(names)
        return [partial(self.stranger, name) for name in names]

    def stranger(self, name: str, chain: Chain, held: int) -> Lie | None:
        change = max((one.record.version for one in chain if one.record.keys), default=0)
        # Whoever trusts a revoked key and has not seen the change, like a newcomer, cannot know of it.
        if held < change and name in self._HIDES_CHANGE:
            return None
        known = [one.record.version for one in chain[max(held, 0) :] if one.record.after in self.world.truth.states]
        forger = Forger(self.world, self.random)
        after = self.random.choice([known[0], known[-1]]) if known else 0
        made = self.STRANGERS[name](self, forger, chain[: after + 1]) if known else None
        if made is None:
            return None
        forger.commit(*made)
        lie = Lie(dict(self.world.store.objects), {**forger.objects}, name=name, alerts=True)
        lie.hide("commits/", above=after)
        if self.random.random() < 0.5:
            lie.shown[HEAD] = None
        # A follower that has lost its weights goes to the newest version at once, past the change.
        lie.needs_restart = lie.needs_rot = name in self._HIDES_CHANGE and self.random.random() < 0.5
        return lie

    def _unsigned(self, forger: Forger, chain: Chain) -> Forged:
        return [seal(forger.following(chain))]

    def _by_thief(self, forger: Forger, chain: Chain) -> Forged:
        return [seal(forger.following(chain), self._keys.thief)]

    def _changed(self, forger: Forger, chain: Chain) -> Forged:
        """The signature of the version before, below other bytes."""
        return [self._with_line(forger.following(chain), chain[-1].data.partition(b"\n")[2])]

    def _in_anothers_name(self, forger: Forger, chain: Chain) -> Forged:
        made = forger.following(chain)
        keys = self._keys.thief, self._keys.at(chain)[-1]
        theirs, ours = (seal(made, key).data.partition(b"\n")[2] for key in keys)
        return [self._with_line(made, ours[:90] + theirs[90:])]

    def _by_revoked(self, forger: Forger, chain: Chain) -> Forged | None:
        now = self._keys.at(chain)
        old = [key for key in self._keys.honest[: self._keys.honest.index(now[-1])] if key not in now]
        return [seal(forger.following(chain), self.random.choice(old))] if old else None

    def _as_before_the_change(self, forger: Forger, chain: Chain) -> Forged | None:
        """By a revoked key, as if the keys had never been changed."""
        made = forger.following(chain)
        if made.keys_from is None:
            return None
        return [seal(msgspec.structs.replace(made, keys_from=None), self._keys.honest[0])]

    def _thiefs_fence(self, forger: Forger, chain: Chain) -> Forged:
        """A fence that names the key of the thief, and a version signed with it."""
        made, thief = forger.following(chain), self._keys.thief
        fields = {"kind": "fence", "epoch": made.epoch + 1, "files": (), "keys": (thief.public.hex,)}
        fence = seal(msgspec.structs.replace(made, after=made.before, **fields), thief)
        return [fence, seal(forger.following([*chain, fence]), thief)]

    def _brought_back(self, hides: bool, forger: Forger, chain: Chain) -> Forged | None:
        """A revoked key signs a fence that names it again."""
        made, old = forger.following(chain), self._keys.honest[0]
        if old in self._keys.at(chain):
            return None
        keys_from = None if hides else made.keys_from
        fields = {"kind": "fence", "epoch": made.epoch + 1, "files": (), "keys": (old.public.hex,)}
        fence = seal(msgspec.structs.replace(made, after=made.before, keys_from=keys_from, **fields), old)
        return [fence, seal(forger.following([*chain, fence]), old)]

    def _anchored(self, forger: Forger, chain: Chain) -> Forged | None:
        """By a revoked key, as if the keys had never been changed, and with an anchor that skips the change."""
        made = self._as_before_the_change(forger, chain) or []
        for kind in ("anchor", "delta") if made else ():
            made.append(seal(forger.following([*chain, *made], kind), self._keys.honest[0]))
        return made or None

    def _with_line(self, commit: Commit, line: bytes) -> Sealed[Commit]:
        return Sealed(commit, msgspec.json.encode(commit) + b"\n" + line)

    STRANGERS: ClassVar[dict[str, Callable[[TrustLies, Forger, Chain], Forged | None]]] = {
        "unsigned": _unsigned,
        "signed by a thief": _by_thief,
        "changed after it was signed": _changed,
        "signed in another's name": _in_anothers_name,
        "a revoked key": _by_revoked,
        "a revoked key, as if it were in force": _as_before_the_change,
        "a thief's fence": _thiefs_fence,
        "a revoked key brings itself back": lambda self, *given: self._brought_back(False, *given),
        "a revoked key comes back unseen": lambda self, *given: self._brought_back(True, *given),
        "an anchor of a revoked key": _anchored,
    }
    _HIDES_CHANGE = (
        "a revoked key, as if it were in force",
        "a revoked key comes back unseen",
        "an anchor of a revoked key",
    )

    def _other_form(self, chain: Chain, held: int) -> Lie | None:
        """All new commits have spaces in the line of their signature: the same records with other hashes."""
        if held < 0:
            return None

        def rewrite(data: bytes) -> bytes:
            record, _, line = data.partition(b"\n")
            return record + b"\n" + line.replace(b":", b": ")

        return Lie(
            self.world.store, {HEAD: None}, name="signatures in another form", rewrites=(rewrite, held), lasts=20
        )

    # --- another run ---------------------------------------------------------------------------------------------

    def _whole_run(self, key: PrivateKey, run_id: str, chain: Chain) -> Lie:
        """A complete run of other weights. All its commits are signed with one key."""
        forger = Forger(self.world, self.random, key=key)
        ours = unseal(self.world.store.objects[RUN][0], Run, RUN).record
        run = seal(msgspec.structs.replace(ours, run=run_id, keys=(key.public.hex,)))
        first = forger.sealed(msgspec.structs.replace(chain[0].record, run=run_id, parent=run.sha256, keys=()))
        known = [one.record.after for one in chain if one.record.after in self.world.truth.states]
        begun = first_anchor(forger, first.record, forger.next_state(self.random.choice(known)))
        second = forger.sealed(msgspec.structs.replace(begun, parent=first.sha256))
        forger.commit(first, second)
        forger.lineage([first, second], len(chain) + 2)
        files = {path: one for path, one in self.world.store.objects.items() if path.startswith("files/")}
        return Lie({**files, **forger.objects, RUN: (run.data, self.world.store.now())}, is_refused=True)

    def _other_run(self, chain: Chain, held: int) -> Lie | None:
        """Another run of the same trainer takes the place of this one."""
        if held < 0 or not self._has_weights(chain):
            return None
        lie = self._whole_run(self._keys.honest[0], f"{self.random.getrandbits(128):032x}", chain)
        lie.name, lie.alerts, lie.needs_restart = "another run of the same key", True, self.random.random() < 0.8
        lie.needs_rot = lie.needs_restart and self.random.random() < 0.5
        return lie

    def _thiefs_run(self, chain: Chain, held: int) -> Lie | None:
        if not self._has_weights(chain):
            return None
        run_id = self.random.choice([chain[0].record.run, f"{self.random.getrandbits(128):032x}"])
        lie = self._whole_run(self._keys.thief, run_id, chain)
        lie.name = "a thief's run"
        return lie

    def _thiefs_run_json(self, chain: Chain, held: int) -> Lie | None:
        """run.json names the key of the thief, who signs the next version."""
        made = self.stranger("signed by a thief", chain, held) if held >= 0 else None
        if made is None:
            return None
        data, modified = self.world.store.objects[RUN]
        run = unseal(data, Run, RUN).record
        changed = seal(msgspec.structs.replace(run, keys=(self._keys.thief.public.hex,))).data
        made.shown[RUN] = changed, modified
        made.name, made.needs_restart = "a thief's run.json", True
        return made

    def _has_weights(self, chain: Chain) -> bool:
        return any(one.record.after in self.world.truth.states for one in chain)

    # --- old objects ---------------------------------------------------------------------------------------------

    def _forget(self, chain: Chain, held: int) -> Lie | None:
        """The follower loses its replica, and the bucket is as it was before the version that was held."""
        older = [one for one in self.world.store.snapshots if commit_path(held) not in one and commit_path(1) in one]
        if held < 0 or not older:
            return None
        snapshot = self.random.choice(older[-3:])
        return Lie(snapshot, name="rolled back, weights lost", is_refused=True, needs_restart=True, needs_rot=True)

    def _lose_data(self, chain: Chain, held: int) -> Lie | None:
        """The follower loses its replica, and only older versions can be rebuilt."""
        if held < 0:
            return None
        data = ("deltas/", "anchors/", "shortcuts/"), held - 1
        name = "data of the version held hidden, weights lost"
        return Lie(self.world.store, name=name, newest=data, needs_restart=True, needs_rot=True)

    def _hide(self, follower: SimFollower, chain: Chain, held: int) -> Lie | None:
        """The newest versions are gone. First only their data is, so that they are seen and not held."""
        if held < 0:
            return None
        work = follower.work
        if work is None or work.head <= held:
            data = ("deltas/", "anchors/", "shortcuts/"), held
            return Lie(self.world.store, name="data of the newest versions hidden", newest=data, lasts=20.0)
        lie = Lie(self.world.store, {HEAD: None}, name="newest versions hidden", newest=(("commits/",), held))
        lie.alerts, lie.needs_restart, lie.lasts = True, self.random.random() < 0.5, 20.0
        return lie

    def _hole(self, chain: Chain, held: int) -> Lie | None:
        """The next commit is never shown, although the publisher's sign of life names it or a later one."""

        def is_due() -> bool:
            found = self.world.store.objects.get(ALIVE)
            return found is not None and parse(found[0])["version"] > held

        if held < 0:
            return None
        shown = {commit_path(held + 1): None, HEAD: None}
        lie = Lie(self.world.store, {**shown}, name="a hole after the version held", alerts=True, lasts=20.0)
        lie.is_due = is_due
        return lie

    def _freeze(self, chain: Chain, held: int) -> Lie | None:
        """The store shows a copy of itself, and nothing new."""
        shown = self.random.choice([{}, {}, {ALIVE: None}])
        return Lie(dict(self.world.store.objects), {**shown}, name="frozen", alerts=True)

    def _forge_alive(self, follower: SimFollower, chain: Chain, held: int) -> Lie | None:
        """A frozen store with signs of life of the thief."""
        key = self.random.choice([self._keys.thief, None, self._revoked])
        alive = self._signs_of_life(chain[-1], key)
        lie = Lie(dict(self.world.store.objects), name="forged signs of life", alerts=True, alive=alive)
        lie.is_refused = held < 0
        return lie

    def _zombie(self, chain: Chain, held: int) -> Lie | None:
        """A frozen store with signs of life of a publisher that has a key in force, but was replaced."""
        replaced = [one for one in chain if one.record.epoch < chain[-1].record.epoch]
        if not replaced:
            return None
        alive = self._signs_of_life(replaced[-1], self._keys.at(chain)[-1])
        lie = Lie(dict(self.world.store.objects), name="signs of life of a replaced publisher", alive=alive)
        lie.alerts, lie.is_refused = True, held < 0
        return lie

    def _signs_of_life(self, head: Sealed[Commit], key: PrivateKey | None) -> Callable[[], bytes]:
        """Makes alive.json for a commit, always as of now."""

        def make() -> bytes:
            now = EPOCH + self.world.loop.time()
            run, epoch, version = head.record.run, head.record.epoch, head.record.version
            return seal(SignOfLife(run=run, epoch=epoch, version=version, commit=head.sha256, time=now), key).data

        return make

    def _old_copy(self, age: float, chain: Chain, held: int) -> Lie | None:
        """A copy of the bucket from so long ago that its sign of life is too old."""
        now = self.world.store.now()
        old = [one for one in self.world.store.snapshots if ALIVE not in one or now - one[ALIVE][1] > age + 5]
        usable = [one for one in old if commit_path(2) in one]
        return Lie(self.random.choice(usable), name="an old copy", is_refused=True) if usable else None
