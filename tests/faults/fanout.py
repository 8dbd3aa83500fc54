"""Many followers of one run, which start and stop at random while versions are published.

    python tests/faults/fanout.py --followers 16 --versions 50

All reach the newest version with the trainer's bits. None falls far behind after it has caught up. The trainer is not
slowed down: the time of `publish()` without and with followers is printed at the end.
"""

from __future__ import annotations

import argparse
import bisect
import random
import secrets
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import safetensors

sys.path.insert(0, str(Path(__file__).parents[1]))

from faults.actors import Actor, Journal, bits_at, samples
from faults.kills import wait_for
from faults.promises import Violation, bucket_of, read_commits
from support.stores import SeaweedFS, running
from weightwire.chain.records import Commit

__all__ = ["Crowd", "play"]

MOST_BEHIND = 3
MOST_LATE = 0.05
"""Share of the samples that may be further behind: a process that stalls for seconds catches up afterwards."""


@dataclass(frozen=True)
class Lag:
    """How many versions a follower was behind at some moment after it first caught up."""

    name: str
    behind: int


class Crowd:
    def __init__(self, server: SeaweedFS, room: Path, seed: int, followers: int, versions: int, pace: float) -> None:
        self.room = room
        self.seed = seed
        self.versions = versions
        self.happened: Counter[str] = Counter()
        self._random = random.Random(seed)
        self._server = server
        self._url = server.url(f"fanout-{seed}-{secrets.token_hex(3)}")
        self.followers = [
            Actor(room, name, ["follow", self._url, str(room), "--name", name], server.env)
            for name in (f"follower-{number}" for number in range(followers))
        ]
        self.trainer = self._make_trainer(room, self._url, versions, pace, followers)

    def _make_trainer(self, room: Path, url: str, versions: int, pace: float, replicas: int) -> Actor:
        options = {"seed": self.seed, "pace": pace, "versions": versions, "replicas": replicas}
        arguments = [text for name, value in options.items() for text in (f"--{name}", str(value))]
        return Actor(room, "trainer", ["train", url, str(room), *arguments], self._server.env)

    def run(self) -> None:
        try:
            self.trainer.start()
            while len(self._journal("captured")) < self.versions:
                self._check_trainer()
                if self.followers:
                    self._start_or_stop()
                time.sleep(self._random.uniform(0.0, 1.0) if self.followers else 0.1)
            for follower in self.followers:
                if not follower.alive:
                    follower.start()
            # The trainer ends when all heartbeats report the last version.
            wait_for(lambda: not self.trainer.alive, "all followers to hold the last version", self._explain)
            self._check_trainer()
        finally:
            for one in (self.trainer, *self.followers):
                one.kill()

    def _start_or_stop(self) -> None:
        """Starts a stopped follower, or stops, kills or keeps a running one."""
        one = self._random.choice(self.followers)
        what = self._random.choice(["kill", "leave", "stay", "stay"]) if one.alive else "come"
        self.happened[what] += 1
        if what == "come":
            one.start()
        elif what == "kill":
            one.kill()
        elif what == "leave" and one.leave() not in (0, -signal.SIGTERM):  # the latter before it installed its handler
            raise Violation(f"{one.name} did not stop cleanly:\n{one.said.read_text()[-2000:]}")

    def _check_trainer(self) -> None:
        if not self.trainer.alive and self.trainer.process is not None and (code := self.trainer.process.returncode):
            raise Violation(f"the trainer failed with code {code}:\n{self.trainer.said.read_text()[-2000:]}")

    def _explain(self) -> str:
        logs = [f"{one.name}: {Journal.read(self.room / f'{one.name}.log')[-1:]}" for one in self.followers]
        return "\n".join([f"trainer: {Journal.read(self.room / 'trainer.journal')[-1:]}", *logs])

    # --- afterwards ----------------------------------------------------------------------------------------------

    def check(self) -> list[Lag]:
        """Checks that all ended with the trainer's bits. Returns their lags on the way."""
        commits = read_commits(bucket_of(self._server, self._url))
        newest = commits[max(commits)]
        if newest.step != self.versions - 1:
            raise Violation(f"the last version has step {newest.step}")
        expected = bits_at(self.seed, newest.step)
        for follower in self.followers:
            tensors = safetensors.deserialize(self._current(follower.name).read_bytes())
            if {name: bytes(tensor["data"]) for name, tensor in tensors} != expected:
                raise Violation(f"{follower.name}: has other bits than the trainer")
            wrong = [line for line in Journal.read(self.room / f"{follower.name}.log") if line["what"] == "wrong"]
            if wrong:
                raise Violation(f"the engine of {follower.name}: has other bits than version {wrong[0]['version']}")
        return [lag for follower in self.followers for lag in self._lags(follower.name, list(commits.values()))]

    def _current(self, name: str) -> Path:
        return self.room / name / "current" / "model.safetensors"

    def _lags(self, name: str, commits: Sequence[Commit]) -> list[Lag]:
        """Commits and logs of followers use the same clock."""
        times = [commit.time for commit in commits]
        found = []
        for life in samples(self.room, name):
            caught_up = False
            for line in life:
                if line["version"] is None:  # nothing held yet
                    continue
                behind = bisect.bisect_right(times, line["time"]) - 1 - line["version"]
                caught_up = caught_up or behind <= 0
                if caught_up:
                    found.append(Lag(name, behind))
        return found

    def seconds_to_publish(self) -> list[float]:
        return [line["seconds"] for line in self._journal("returned")]

    def _journal(self, what: str) -> list[dict[str, float]]:
        return [line for line in Journal.read(self.room / "trainer.journal") if line["what"] == what]


def late_share(lags: Sequence[Lag]) -> float:
    return sum(lag.behind > MOST_BEHIND for lag in lags) / len(lags)


def play(
    server: SeaweedFS,
    room: Path,
    *,
    seed: int,
    followers: int,
    versions: int,
    pace: float = 1.0,
    say: Callable[[str], None] = print,
) -> list[Lag]:
    (room / "alone").mkdir()
    (room / "crowd").mkdir()
    alone = Crowd(server, room / "alone", seed, 0, max(versions // 3, 5), 0.1)
    alone.run()
    crowd = Crowd(server, room / "crowd", seed, followers, versions, pace)
    began = time.monotonic()
    crowd.run()
    lags = crowd.check()
    medians = [1000 * statistics.median(one.seconds_to_publish()[1:]) for one in (alone, crowd)]
    counts = Counter(lag.behind for lag in lags)
    say(f"{followers} followers, {versions} versions, seed {seed}: {time.monotonic() - began:.0f} s, {crowd.happened}")
    say(f"behind, of {len(lags)} samples: {dict(sorted(counts.items()))}")
    say(f"publish() takes {medians[0]:.2f} ms without followers, {medians[1]:.2f} ms with them (medians)")
    return lags


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--followers", type=int, default=16)
    parser.add_argument("--versions", type=int, default=50)
    parser.add_argument("--pace", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=None)
    args = parser.parse_args()
    seed = secrets.randbelow(10**6) if args.seed is None else args.seed
    with tempfile.TemporaryDirectory(prefix="weightwire-fanout-") as directory:
        room = Path(directory)
        (room / "server").mkdir()
        server = SeaweedFS(room / "server")
        with running(server):
            lags = play(server, room, seed=seed, followers=args.followers, versions=args.versions, pace=args.pace)
    sys.exit(late_share(lags) > MOST_LATE)


if __name__ == "__main__":
    main()
