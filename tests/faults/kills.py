"""Kills publisher, followers and SeaweedFS at random moments, one by one or all at once.

    python tests/faults/kills.py --rounds 100              # with another seed each time
    python tests/faults/kills.py --rounds 100 --seed 4711  # the same victims and delays

All rounds use one run. In each round a process is killed while versions are published, and started again. Then the
trainer rests, and all followers must catch up. Every acknowledged version must be in the bucket, and every checkpoint
of a follower, also right after a kill, must have the bits of one step of the trainer.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
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

sys.path.insert(0, str(Path(__file__).parents[1]))

from faults.actors import Actor, Journal, Rest
from faults.promises import Promises, Violation, bucket_of, read_about
from support.stores import SeaweedFS, running
from weightwire.chain.records import Commit
from weightwire.inspection.verify import verify_run
from weightwire.system.runtime import Runtime

__all__ = ["Rounds", "wait_for"]

Result = TypeVar("Result")

PATIENCE = 180.0
"""Seconds for a recovery: many times the usual time on a busy machine."""


class Rounds:
    """One run with its trainer, followers and server."""

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
        self.promises = Promises(bucket_of(server, url), Journal.Reader(room / "trainer.journal"), seed)
        self.killed: Counter[str] = Counter()
        self._random = random.Random(seed)
        self._rest_file = Rest(room)

    @contextlib.contextmanager
    def playing(self) -> Iterator[None]:
        actors = [self.trainer, *self.followers]
        try:
            for one in actors:
                one.start()
            self._wait_until_published(0)
            yield
        finally:
            for one in actors:
                one.kill()

    def round(self, number: int) -> float:
        """Kills and restarts a process. Returns the seconds until everything has recovered."""
        self._rest_file.end()
        victim = self._choose()
        time.sleep(self._random.uniform(0.0, 1.0))
        self._kill(victim)
        began = time.monotonic()
        self.promises.learn()
        self._wait_until_published(len(self.promises.acknowledged))
        self._rest(number)
        self.check()
        self.killed[victim] += 1
        seconds = time.monotonic() - began
        self.say(f"round {number}: {victim}, {seconds:.1f} s, version {self.promises.newest.version}")
        return seconds

    # --- victims -------------------------------------------------------------------------------------------------

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
        """Sometimes kills it twice in a row, and sometimes deletes its replica."""
        for _ in range(self._random.choice([1, 1, 2])):
            actor.kill()
            self._check_killed(actor)
            if actor in self.followers and self._random.random() < 0.2:
                shutil.rmtree(self.room / actor.name, ignore_errors=True)
            actor.start()
            time.sleep(self._random.uniform(0.0, 1.5))

    # --- waiting -------------------------------------------------------------------------------------------------

    def _rest(self, number: int) -> None:
        """Waits until the trainer has published everything."""
        asked = self._rest_file.begin(str(number))

        def rests() -> bool:
            self.promises.learn()
            return any(line["asked"] == asked for line in self.promises.rests)

        self._wait_for(rests, "the trainer to rest")

    def _wait_until_published(self, before: int) -> None:
        def published() -> bool:
            self.promises.learn()
            return len(self.promises.acknowledged) > before

        self._wait_for(published, "the trainer to publish")

    def _wait_for(self, done: Callable[[], bool], what: str) -> None:
        def look() -> bool:
            for one in (self.trainer, *self.followers):
                if not one.alive:
                    raise Violation(f"{one.name} ended unexpectedly:\n{one.said.read_text()[-2000:]}")
            return done()

        wait_for(look, what, self._explain)

    def _explain(self) -> str:
        said = [f"{one.name}: {_tail(one.said)}" for one in (self.trainer, *self.followers)]
        logs = [f"{one.name}: {Journal.read(self.room / f'{one.name}.log')[-1:]}" for one in self.followers]
        return "\n".join([f"trainer: {Journal.read(self.room / 'trainer.journal')[-3:]}", *logs, *said])

    # --- checks --------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Checks all promises while the trainer rests."""
        self.promises.check_rested()
        for follower in self.followers:
            self._check_follower(follower, self.promises.newest)

    def _check_follower(self, follower: Actor, newest: Commit) -> None:
        log = self.room / f"{follower.name}.log"
        current = self.room / follower.name / "current"
        self._wait_for(
            lambda: (about := read_about(current)) is not None and about["version"] == newest.version,
            f"{follower.name} to reach version {newest.version}",
        )
        self.promises.check_checkpoint(current, follower.name, newest.after)
        wrong = [line["version"] for line in Journal.read(log) if line["what"] == "wrong"]
        if wrong:
            raise Violation(f"the engine of {follower.name}: has other bits than version {wrong[0]}")

    def _check_killed(self, actor: Actor) -> None:
        """Checks `current` of a killed follower before anything repairs it."""
        current = self.room / actor.name / "current"
        if current.exists():
            self.promises.check_checkpoint(current, f"{actor.name}, just killed")

    def check_end(self) -> str:
        """Checks everything again, and reads the whole chain."""
        self.promises.check_all_again()
        self.check()
        found = asyncio.run(verify_run(self.promises.bucket, Runtime(), rebuild=True, threads=2))
        newest = self.promises.newest.version
        if not found.fine or found.whole != newest or found.rebuilt[-1][1] != found.head:
            raise Violation(f"verify found {found}")
        acknowledged, size = self.promises.checked, found.nbytes / 1e6
        return f"{newest + 1} versions, {acknowledged} acknowledged, {size:.0f} MB, no problem"


# --- helpers -----------------------------------------------------------------------------------------------------


def wait_for(done: Callable[[], Result], what: str, explain: Callable[[], str] = str) -> Result:
    until = time.monotonic() + PATIENCE
    while not (result := done()):
        if time.monotonic() > until:
            raise Violation(f"waited {PATIENCE:.0f} s for {what}\n{explain()}")
        time.sleep(0.05)
    return result


def _tail(path: Path) -> str:
    return path.read_text()[-1000:] if path.exists() else ""


def play(rounds: int, seed: int, room: Path, say: Callable[[str], None] = print) -> None:
    """Plays all rounds with its own server, which is also killed."""
    (room / "server").mkdir()
    (room / "actors").mkdir()
    server = SeaweedFS(room / "server")
    with running(server):
        game = Rounds(server, room / "actors", seed, say=say)
        with game.playing():
            seconds = [game.round(number) for number in range(rounds)]
            say(game.check_end())
    killed = ", ".join(f"{name} {count}" for name, count in sorted(game.killed.items()))
    say(
        f"{rounds} rounds, seed {seed}: killed {killed}; recovered after {statistics.median(seconds):.1f} s, "
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
