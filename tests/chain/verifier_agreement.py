"""Compares `weightwire verify` with the second verifier, on valid and on tampered chains.

    python tests/chain/verifier_agreement.py --chains 1000 --seed 0

`second_verifier.py` was written from docs/PROTOCOL.md alone. Every chain comes from real publishers. For each of them,
a tampered copy is made: bytes of one object changed, or one field of one record changed and all hashes after it
computed again, so that only the rule about that field can notice.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # to run it as a script

from chain.second_verifier import Refused, Verified, verify
from weightwire import Publisher
from weightwire.bucket.registry import open_bucket
from weightwire.chain.keys import PrivateKey
from weightwire.chain.record_paths import ALIVE, RUN, commit_path, gc_path
from weightwire.chain.records import Gc, back_versions, seal
from weightwire.chain.signature import add_signature
from weightwire.chain.trust import Trust
from weightwire.chain.writer import Signer
from weightwire.errors import WeightwireError
from weightwire.inspection.verify import verify_run
from weightwire.system.runtime import Runtime
from weightwire.upkeep.key_change import change_keys

Objects = dict[str, bytes]
Record = dict[str, Any]
NEVER = 1 << 30

KEY, NEXT_KEY, EVIL = (PrivateKey.generate() for _ in range(3))


# --- chains ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chain:
    """The objects of a run, and the key that signed each commit; None if it is not signed."""

    objects: Objects
    keys: tuple[PrivateKey | None, ...]

    @property
    def is_signed(self) -> bool:
        return self.keys[0] is not None


def make_chain(rng: random.Random, room: Path) -> Chain:
    """A run of one to three publishers. It may be signed, change its keys, and have lost old data to retention."""
    url, key = room / f"{rng.getrandbits(64):x}", rng.choice([None, KEY])
    keys: list[PrivateKey | None] = []
    weights: dict[str, Any] = {
        "w": np.frombuffer(rng.randbytes(128), np.uint16).reshape(8, 8).copy(),
        "b": np.zeros(3, np.float32),
    }
    files = {"config.json": b"{}", "tokenizer/vocab.txt": rng.randbytes(9)} if rng.random() < 0.5 else {}
    for _ in range(rng.randint(1, 3)):
        settings: dict[str, Any] = {"anchor_every": NEVER, "blocking": True, "threads": 1, "on_event": _ignore}
        settings |= {"key": key, "trust": [str(KEY.public)] if key else None}
        with Publisher(url, files=files, **settings) as publisher:
            for step in range(rng.randint(1, 4)):
                weights["w"][step % 8] ^= np.uint16(rng.randrange(4))  # sometimes nothing changes
                version = publisher.publish(weights, step=step, metrics={"reward": rng.random()}).wait()
        keys += [key] * (version + 1 - len(keys))
        if key is KEY and rng.random() < 0.4:
            add, revoke = frozenset({NEXT_KEY.public.hex}), frozenset({KEY.public.hex})
            asyncio.run(change_keys(open_bucket(url), Runtime(), Signer(KEY), add, revoke, _ignore))
            keys.append(KEY)
            key = NEXT_KEY
    objects = {str(path.relative_to(url)): path.read_bytes() for path in sorted(url.rglob("*")) if path.is_file()}
    shutil.rmtree(url)
    chain = Chain(_read_by_both(objects), tuple(keys))
    return _swept(chain, rng) if rng.random() < 0.2 else chain


def _read_by_both(objects: Objects) -> Objects:
    """Without shortcuts and the sign of life, which the second verifier does not read."""
    shortcuts = {path: _record(data) for path, data in objects.items() if path.startswith("shortcuts/")}
    dropped = {ALIVE, *shortcuts, *(file["path"] for record in shortcuts.values() for file in record["files"])}
    return {path: data for path, data in objects.items() if path not in dropped}


def _swept(chain: Chain, rng: random.Random) -> Chain:
    """The same after retention: data below a version is gone, and a record says so."""
    anchors = [int(path.split("/")[1]) for path in chain.objects if path.startswith("anchors/")]
    below = rng.choice([0, *anchors])
    run = json.loads(chain.objects[RUN])["run"]
    kept = {
        path: data
        for path, data in chain.objects.items()
        if not path.startswith(("deltas/", "anchors/")) or int(path.split("/")[1]) >= below
    }
    return Chain(kept | {gc_path(below): seal(Gc(run=run, below=below)).data}, chain.keys)


def _ignore(_: object) -> None:
    pass


# --- tampering ---------------------------------------------------------------------------------------------------

Tampering = Callable[[Chain, random.Random], Objects]


def flip_a_bit(chain: Chain, rng: random.Random) -> Objects:
    path = _any_of(chain, rng)
    data = bytearray(chain.objects[path])
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    return chain.objects | {path: bytes(data)}


def cut(chain: Chain, rng: random.Random) -> Objects:
    path = _any_of(chain, rng)
    return chain.objects | {path: chain.objects[path][: rng.randrange(len(chain.objects[path]))]}


def append(chain: Chain, rng: random.Random) -> Objects:
    path = _any_of(chain, rng)
    return chain.objects | {path: chain.objects[path] + rng.choice([b"\0", b" ", b"\n", b"{}", b"\n{}"])}


def delete(chain: Chain, rng: random.Random) -> Objects:
    path = _any_of(chain, rng)
    return {one: data for one, data in chain.objects.items() if one != path}


def swap(chain: Chain, rng: random.Random) -> Objects:
    first = _any_of(chain, rng)
    second = rng.choice([path for path in chain.objects if path.split("/")[0] == first.split("/")[0]])
    return chain.objects | {first: chain.objects[second], second: chain.objects[first]}


def roll_back(chain: Chain, rng: random.Random) -> Objects:
    """Without its newest commits a run is valid, as far as a reader can tell that has not seen them."""
    kept = rng.randrange(len(chain.keys))
    gone = {commit_path(version) for version in range(kept, len(chain.keys))}
    return {path: data for path, data in chain.objects.items() if path not in gone}


def repeat_a_commit(chain: Chain, rng: random.Random) -> Objects:
    return chain.objects | {commit_path(len(chain.keys)): chain.objects[commit_path(rng.randrange(len(chain.keys)))]}


def add_junk(chain: Chain, rng: random.Random) -> Objects:
    """Objects that no rule names change nothing."""
    names = ["replicas/gpu-0.json", "HEAD.json", "alive.json", "commits/notes.txt", "probe/x", "gc/x", "junk"]
    return chain.objects | {rng.choice(names): rng.randbytes(20)}


def change_a_field(chain: Chain, rng: random.Random) -> Objects:
    """Changes one field of a record, and everything that follows from it by rule."""
    version = rng.randrange(-1, len(chain.keys))
    path = RUN if version < 0 else commit_path(version)
    record = _record(chain.objects[path])
    _change(record, rng)
    return _relinked(chain, version, record, rng)


def sign_again(chain: Chain, rng: random.Random) -> Objects:
    """Replaces or removes signatures of the newest commits."""
    first = rng.randrange(len(chain.keys))
    return _relinked(chain, first, _record(chain.objects[commit_path(first)]), rng)


def bring_a_key_back(chain: Chain, rng: random.Random) -> Objects:
    """Two fences more, signed by the first key of the run, or a stranger's, which the first of them names."""
    key = rng.choice([KEY, EVIL])
    objects, version = dict(chain.objects), len(chain.keys)
    for one in (version, version + 1):
        last = _record(objects[commit_path(one - 1)])
        hashes = [hashlib.sha256(objects[commit_path(number)]).hexdigest() for number in range(one)]
        record = last | {"version": one, "epoch": last["epoch"] + 1, "kind": "fence", "files": [], "changed": 0}
        record |= {"before": last["after"], "parent": hashes[-1], "back": [hashes[v] for v in back_versions(one)]}
        record |= {"keys_from": one - 1 if last["keys"] else last["keys_from"]}
        record |= {"keys": [key.public.hex] if one == version else []}
        data = json.dumps(record, separators=(",", ":")).encode()
        objects[commit_path(one)] = add_signature("commit", data, key)
    return objects


TAMPERINGS: Sequence[Tampering] = (
    *(flip_a_bit, cut, append, delete, swap, roll_back, repeat_a_commit, add_junk, sign_again, bring_a_key_back),
    *[change_a_field] * 11,  # about half: there are many fields
)


def _any_of(chain: Chain, rng: random.Random) -> str:
    return rng.choice([path for path in chain.objects if not path.startswith(("epochs/", "HEAD", "alive"))])


def _record(data: bytes) -> Record:
    found: Record = json.loads(data.partition(b"\n")[0])
    return found


def _change(record: Record, rng: random.Random) -> None:
    """Changes, drops or adds one field, here or in one of the objects inside."""
    inside = [value for value in record.values() if isinstance(value, dict) and value]
    inside += [one for one in record.get("files", []) if isinstance(one, dict)]
    if inside and rng.random() < 0.3:
        return _change(rng.choice(inside), rng)
    if rng.random() < 0.05:
        record[rng.choice(["unknown", "keys", "source"])] = _other(None, rng)
        return None
    name = rng.choice([*record])
    if rng.random() < 0.1:
        del record[name]
    else:
        record[name] = _other(record[name], rng)
    return None


def _other(value: Any, rng: random.Random) -> Any:
    """Another value of any type, or one that is near."""
    values: list[Any] = [
        None,
        True,
        0,
        1,
        -1,
        2,
        2**53 - 1,
        2**53,
        2**63,
        1.5,
        1e308,
        "",
        "x",
        "anchor",
        "fence",
        [],
        {},
    ]
    values += ["0" * 64, "f" * 32, ["0" * 64], "BF16", "../x", "a\u0000", "ü", [None], {"a": 1}, {"a": None}]
    if isinstance(value, bool) or value is None:
        return rng.choice(values)
    if isinstance(value, int | float) and rng.random() < 0.5:
        return value + rng.choice([-1, 1, 0.0])
    if isinstance(value, str) and value and rng.random() < 0.5:
        at = rng.randrange(len(value))
        return rng.choice(
            [value[:at] + value[at + 1 :], value.upper(), f"{value[:at]}0{value[at + 1 :]}", f"{value}\n"]
        )
    if isinstance(value, list) and value and rng.random() < 0.6:
        return rng.choice([value[1:], value[::-1], [*value, value[-1]], [_other(value[0], rng), *value[1:]]])
    return rng.choice(values)


def _relinked(chain: Chain, version: int, record: Record, rng: random.Random) -> Objects:
    """The chain with another record, run.json if the version is -1. Later commits name its hash, as rules say.

    The new commits are signed by the keys of the old ones, by a stranger, or not.
    """
    by = rng.choice(["same", "same", "stranger", "nobody"])
    objects, hashes = dict(chain.objects), dict[int, str]()
    for one in range(-1, len(chain.keys)):
        path = RUN if one < 0 else commit_path(one)
        if one >= version:
            found = record if one == version else _record(objects[path])
            if one > version:
                found |= {"parent": hashes[one - 1], "back": [hashes[before] for before in back_versions(one)]}
            data = json.dumps(found, separators=(",", ":"), ensure_ascii=rng.random() < 0.5).encode()
            key = {"same": chain.keys[one], "stranger": EVIL, "nobody": None}[by] if one >= 0 else None
            objects[path] = data if key is None else add_signature("commit", data, key)
        hashes[one] = hashlib.sha256(objects[path]).hexdigest()
    return objects


# --- verdicts ----------------------------------------------------------------------------------------------------


def verdict_here(directory: Path, trusted: Collection[str]) -> Verified | str:
    """The verdict of `weightwire verify`, or why it refuses."""
    trust = Trust(frozenset(trusted)) if trusted else None
    try:
        found = asyncio.run(verify_run(open_bucket(directory), Runtime(), trust=trust, threads=1))
    except WeightwireError as problem:
        return problem.message
    problems = [one for one in found.problems if not one.path.startswith("gc/")]  # by PROTOCOL, readers ignore these
    if problems or found.head < 0:
        return str(problems[:1] or "no version")
    newest = (directory / commit_path(found.head)).read_bytes()
    return Verified(found.run, found.head, hashlib.sha256(newest).hexdigest(), _record(newest).get("after", ""))


def verdict_there(directory: Path, trusted: Collection[str]) -> Verified | str:
    """The verdict of the second verifier, or why it refuses."""
    try:
        return verify(directory, trusted)
    except Refused as problem:
        return str(problem)


@dataclass(frozen=True)
class Comparison:
    """One chain and what both say about it."""

    name: str
    here: Verified | str
    there: Verified | str

    @property
    def outcome(self) -> str:
        here, there = isinstance(self.here, Verified), isinstance(self.there, Verified)
        if here != there or (here and self.here != self.there):
            return "disagree"
        return "accepted" if here else "refused"


def compare(name: str, objects: Objects, trusted: Collection[str], room: Path) -> Comparison:
    directory = room / "run"
    shutil.rmtree(directory, ignore_errors=True)
    for path, data in objects.items():
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_bytes(data)
    directory.mkdir(exist_ok=True)
    return Comparison(name, verdict_here(directory, trusted), verdict_there(directory, trusted))


def comparisons(seed: int, room: Path) -> list[Comparison]:
    """A valid chain and a tampered one."""
    rng = random.Random(seed)
    chain = make_chain(rng, room)
    trusted = {KEY.public.hex} if chain.is_signed and rng.random() < 0.8 else set[str]()
    tamper = rng.choice(TAMPERINGS)
    return [
        compare("valid", chain.objects, trusted, room),
        compare(f"{tamper.__name__} (seed {seed})", tamper(chain, rng), trusted, room),
    ]


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--chains", type=int, default=1000, help="valid chains; as many tampered ones are made")
    options.add_argument("--seed", type=int, default=0, help="of the first chain")
    given = options.parse_args()
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as room:
        for seed in range(given.seed, given.seed + given.chains):
            for one in comparisons(seed, Path(room)):
                counts[f"{'valid' if one.name == 'valid' else 'tampered'}, {one.outcome}"] += 1
                if one.outcome == "disagree" or (one.name == "valid" and one.outcome != "accepted"):
                    print(f"{one.name}:\n  here:  {one.here}\n  there: {one.there}")
    print("; ".join(f"{count:,} {name}" for name, count in sorted(counts.items(), reverse=True)))
    return int(any("disagree" in name or name == "valid, refused" for name in counts))


if __name__ == "__main__":
    sys.exit(main())
