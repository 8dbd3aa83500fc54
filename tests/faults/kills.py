"""Processes that are killed at random moments: publisher, followers and SeaweedFS, one after the other or all at once.

    python tests/faults/kills.py --rounds 100              # with another seed each time
    python tests/faults/kills.py --rounds 100 --seed 4711  # the same victims and delays, if not the same moments

One run goes through all rounds. In each someone is killed without warning while versions are published, and started
again; then the trainer rests, and everybody must get to where it is. What must hold: whatever was acknowledged is in
the bucket, and every checkpoint that a follower shows, also right after it was killed, has the bits of one step of the
trainer.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import secrets
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import safetensors

sys.path.insert(0, str(Path(__file__).parents[1]))

from faults.actors import Actor, Journal, Line, bits_at
from support.stores import SeaweedFS, running
from weightwire.bucket.bucket import Bucket
from weightwire.bucket.registry import open_bucket
from weightwire.chain.records import Commit, commit_path, unseal
from weightwire.inspection.verify import verify_run
from weightwire.system.runtime import Runtime

__all__ = ["Rounds", "Violation", "bucket_of", "read_commits", "wait_for"]

Result = TypeVar("Result")

PATIENCE = 60.0
"""Seconds for everybody to recover: ten times what it takes on a machine that has something else to do."""


class Violation(AssertionError):
    """A promise that was broken."""


class Rounds:
    """One run, and whoever takes part in it."""

    def __init__(
        self, server: SeaweedFS, room: Path, seed: int, followers: int = 2, say: Callable[[str], None] = print
    ) -> None:
        self.room = room
        self.seed = seed
        self.say = say
        self.server = server
        url = server.url(f"kills-{seed}")
        self.trainer = Actor(
            room, "trainer", ["train", url, str(room), "--seed", str(seed), "--pace", "0.05"], server.env
        )
        self.followers = [
            Actor(room, name, ["follow", url, str(room), "--name", name], server.env)
            for name in (f"follower-{number}" for number in range(followers))
        ]
        self.bucket = bucket_of(server, url)
        self.killed: Counter[str] = Counter()
        self._random = random.Random(seed)
        self._steps: dict[str, int] = {}  # by state: all that the trainer ever captured
        self._checked = 0  # acknowledgements
        self._seen: dict[int, Commit] = {}

    @contextlib.contextmanager
    def playing(self) -> Iterator[None]:
        everybody = [self.trainer, *self.followers]
        try:
            for one in everybody:
                one.start()
            self._wait_until_published(0)
            yield
        finally:
            for one in everybody:
                one.kill()

    def round(self, number: int) -> float:
        """Somebody is killed, and comes back. Returns how long it took until all was well again."""
        self._go_on()
        victim = self._choose()
        time.sleep(self._random.uniform(0.0, 1.0))
        self._kill(victim)
        began = time.monotonic()
        self._wait_until_published(len(self._journal("acknowledged")))
        self._rest(number)
        self.check()
        self.killed[victim] += 1
        seconds = time.monotonic() - began
        self.say(f"round {number}: {victim}, {seconds:.1f} s, version {max(self._seen)}")
        return seconds

    # --- who dies ------------------------------------------------------------------------------------------------

    def _choose(self) -> str:
        return self._random.choices(["trainer", "follower", "server", "everything"], [4, 4, 1.5, 0.5])[0]

    def _kill(self, victim: str) -> None:
        if victim == "trainer":
            self._restart(self.trainer)
        elif victim == "follower":
            follower = self._random.choice(self.followers)
            self._restart(follower)
        elif victim == "server":
            self.server.kill()
            time.sleep(self._random.uniform(0.0, 1.0))
            self.server.start()
        else:
            for one in (self.trainer, *self.followers):
                one.kill()
            self.server.kill()
            self.server.start()
            for one in (self.trainer, *self.followers):
                one.start()

    def _restart(self, actor: Actor) -> None:
        """Sometimes it is killed again before it has got anywhere, and sometimes its disk is gone too."""
        for _ in range(self._random.choice([1, 1, 2])):
            actor.kill()
            self._check_killed(actor)
            if actor in self.followers and self._random.random() < 0.2:
                shutil.rmtree(self.room / actor.name, ignore_errors=True)
            actor.start()
            time.sleep(self._random.uniform(0.0, 1.5))

    # --- waiting -------------------------------------------------------------------------------------------------

    def _go_on(self) -> None:
        (self.room / "rest").unlink(missing_ok=True)

    def _rest(self, number: int) -> None:
        """Until the trainer has nothing more to publish."""
        asked = f"{number}-{secrets.token_hex(4)}"
        partial = self.room / "rest.partial"
        partial.write_text(asked)
        os.replace(partial, self.room / "rest")
        self._wait_for(lambda: any(line["asked"] == asked for line in self._journal("rests")), "the trainer to rest")

    def _wait_until_published(self, before: int) -> None:
        self._wait_for(lambda: len(self._journal("acknowledged")) > before, "the trainer to publish")

    def _wait_for(self, done: Callable[[], bool], what: str) -> None:
        def look() -> bool:
            for one in (self.trainer, *self.followers):
                if not one.alive:
                    raise Violation(f"{one.name} ended by itself:\n{one.said.read_text()[-2000:]}")
            return done()

        wait_for(look, what, self._explain)

    def _explain(self) -> str:
        said = [f"{one.name}: {_tail(one.said)}" for one in (self.trainer, *self.followers)]
        logs = [f"{one.name}: {Journal.read(self.room / f'{one.name}.log')[-1:]}" for one in self.followers]
        return "\n".join([f"trainer: {self._lines()[-3:]}", *logs, *said])

    # --- what must hold ------------------------------------------------------------------------------------------

    def check(self) -> None:
        """While the trainer rests."""
        self._learn()
        self._check_acknowledged()
        newest = self._seen[max(self._seen)]
        rested = self._journal("rests")[-1]
        if self._steps.get(newest.after) != rested["step"]:
            raise Violation(f"version {newest.version} is not what the trainer published last, step {rested['step']}")
        for follower in self.followers:
            self._check_follower(follower, newest)

    def _check_acknowledged(self) -> None:
        self._seen |= read_commits(self.bucket, max(self._seen, default=-1) + 1)
        acknowledged = self._journal("acknowledged")
        for line in acknowledged[self._checked :]:
            commit = self._seen.get(line["version"])
            if commit is None or commit.after != line["state"] or commit.step != line["step"]:
                raise Violation(f"version {line['version']} was acknowledged, and is not there")
        self._checked = len(acknowledged)

    def _check_follower(self, follower: Actor, newest: Commit) -> None:
        log = self.room / f"{follower.name}.log"
        current = self.room / follower.name / "current"
        self._wait_for(lambda: _version_of(current) == newest.version, f"{follower.name} to get to {newest.version}")
        self._check_checkpoint(current, follower.name, newest.after)
        wrong = [line["version"] for line in Journal.read(log) if line["what"] == "wrong"]
        if wrong:
            raise Violation(f"the engine of {follower.name}: has other bits than version {wrong[0]}")

    def _check_killed(self, actor: Actor) -> None:
        """Nobody repairs it here: what was shown when it died must be whole."""
        current = self.room / actor.name / "current"
        if current.exists():
            self._learn()
            self._check_checkpoint(current, f"{actor.name}, just killed", None)

    def _check_checkpoint(self, path: Path, who: str, state: str | None) -> None:
        about = _about(path)
        if about is None or about["state"] not in self._steps or about["state"] != (state or about["state"]):
            raise Violation(f"{who}: shows {about}, which is not what it should be")
        # Read by others than those who wrote it.
        tensors = safetensors.deserialize((path / "model.safetensors").read_bytes())
        held = {name: bytes(tensor["data"]) for name, tensor in tensors}
        if held != bits_at(self.seed, self._steps[about["state"]]):
            raise Violation(f"{who}: version {about['version']} has other bits than the trainer had")

    def check_end(self) -> str:
        """Everything once more, with a chain that is read from its beginning."""
        self._checked, self._seen = 0, {}
        self.check()
        for version, commit in self._seen.items():
            if commit.after and commit.after not in self._steps:
                raise Violation(f"version {version} is a state that the trainer never had")
        found = asyncio.run(verify_run(self.bucket, Runtime(), rebuild=True, threads=2))
        if not found.fine or found.whole != max(self._seen) or found.rebuilt[-1][1] != found.head:
            raise Violation(f"verify found {found}")
        return f"{len(self._seen)} versions, {self._checked} acknowledged, {found.nbytes / 1e6:.0f} MB, no problem"

    def _learn(self) -> None:
        self._steps |= {line["state"]: line["step"] for line in self._journal("captured")}

    def _journal(self, what: str) -> list[Line]:
        return [line for line in self._lines() if line["what"] == what]

    def _lines(self) -> list[Line]:
        return Journal.read(self.room / "trainer.journal")


# --- small things ----------------------------------------------------------------------------------------------------


def wait_for(done: Callable[[], Result], what: str, explain: Callable[[], str] = str) -> Result:
    until = time.monotonic() + PATIENCE
    while not (result := done()):
        if time.monotonic() > until:
            raise Violation(f"waited {PATIENCE:.0f} s for {what}\n{explain()}")
        time.sleep(0.05)
    return result


def bucket_of(server: SeaweedFS, url: str) -> Bucket:
    """Whatever the environment says."""
    before = dict(os.environ)
    os.environ.update(server.env)
    try:
        return open_bucket(url)
    finally:
        os.environ.clear()
        os.environ.update(before)


def read_commits(bucket: Bucket, first: int = 0) -> dict[int, Commit]:
    """From a version on, to where there are no more."""

    async def read() -> dict[int, Commit]:
        names = sorted(one.path for one in await bucket.list("commits/"))
        if names != [commit_path(version) for version in range(len(names))]:
            raise Violation("the chain has holes")
        found = [unseal(await bucket.get(name), Commit, name).record for name in names[first:]]
        return {commit.version: commit for commit in found}

    return asyncio.run(read())


def _about(path: Path) -> Line | None:
    try:
        about: Line = json.loads((path / "weightwire.json").read_bytes())
    except FileNotFoundError:
        return None
    return about


def _version_of(path: Path) -> int | None:
    about = _about(path)
    return about["version"] if about else None


def _tail(path: Path) -> str:
    return path.read_text()[-1000:] if path.exists() else ""


def play(rounds: int, seed: int, room: Path, say: Callable[[str], None] = print) -> None:
    """A server of its own, as it is killed too."""
    (room / "server").mkdir()
    (room / "actors").mkdir()
    server = SeaweedFS(room / "server")
    with running(server):
        game = Rounds(server, room / "actors", seed, say=say)
        with game.playing():
            seconds = [game.round(number) for number in range(rounds)]
            say(game.check_end())
    killed = ", ".join(f"{who} {count}" for who, count in sorted(game.killed.items()))
    say(
        f"{rounds} rounds, seed {seed}: killed {killed}; back after {statistics.median(seconds):.1f} s, "
        f"{max(seconds):.1f} at most"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=None)
    args = parser.parse_args()
    seed = secrets.randbelow(10**6) if args.seed is None else args.seed
    print(f"seed {seed}", flush=True)
    with tempfile.TemporaryDirectory(prefix="weightwire-kills-") as room:
        play(args.rounds, seed, Path(room), lambda line: print(line, flush=True))


if __name__ == "__main__":
    main()
