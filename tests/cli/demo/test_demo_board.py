"""The output of a demo: figures, lines and the board."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console
from rich.live import Live

from weightwire.cli.demo.demo_board import Lines, _Board, beside_bytes, changed, fifths, full_bytes, sent_bytes
from weightwire.page.run_view import AnchorView, ReplicaView, RunView, VersionView


def version(number: int, kind: str = "delta", nbytes: int = 1000, reward: float | None = None) -> VersionView:
    metrics: dict[str, float | None] = {} if reward is None else {"reward": reward}
    if number > 2:
        metrics["staleness"] = 1.5
    return VersionView(number, kind, 1, number - 1, 1.8e9, nbytes, 20 if kind == "delta" else 0, metrics)


def replica(name: str, reached: int, pause: float | None = 0.0012, trouble: str = "") -> ReplicaView:
    return ReplicaView(name, "host", reached, reached, reached, 1.8e9, 60.0, trouble, pause, (), ())


def snapshot(*rewards: float | None, replicas: tuple[ReplicaView, ...] = ()) -> RunView:
    """A fence, an anchor, and a version for each reward, of a model of 1,000 weights."""
    versions = [version(0, "fence", 0), version(1, "anchor", 1300)]
    versions += [version(2 + number, reward=reward) for number, reward in enumerate(rewards)]
    return RunView("url", 1.8e9, "run", nbytes=2000, parameters=1000, versions=tuple(versions), replicas=replicas)


class TestFigures:
    def test_reward_is_averaged_over_the_first_and_last_fifth(self) -> None:
        assert fifths(snapshot(*range(10))) == (0.5, 8.5)
        assert fifths(snapshot(1, 2, 3)) is None

    def test_step_without_reward_does_not_count(self) -> None:
        assert fifths(snapshot(None, 1, 9, 9, 9, 2)) == (1, 2)

    def test_changed_fraction_is_the_mean_over_steps(self) -> None:
        assert changed(snapshot(1, 2)) == 0.02
        assert changed(snapshot()) is None

    def test_sent_bytes_are_compared_with_a_full_sync(self) -> None:
        run = snapshot(1, 2, 3)
        assert sent_bytes(run) == 1300 + 3 * 1000
        assert full_bytes(run) == 4 * 2000

    def test_anchors_beside_the_chain_are_counted_separately(self) -> None:
        run = snapshot(1)
        with_anchor = RunView(**{**run.__dict__, "anchors": (AnchorView(2, "anchor", 1300, True),)})
        assert sent_bytes(with_anchor) == sent_bytes(run)
        assert (beside_bytes(run), beside_bytes(with_anchor)) == (0, 1300)


class TestLines:
    def test_each_version_gets_one_line(self, capsys: pytest.CaptureFixture[str]) -> None:
        lines = Lines()
        lines.show(snapshot(0.25, replicas=(replica("replica-1", 1), replica("replica-2", -1, None))))
        lines.show(snapshot(0.25, 0.5, replicas=(replica("replica-1", 3), replica("replica-2", 2))))
        assert capsys.readouterr().err.splitlines() == [
            "version 1 (step 0), 1.3 kB of 2.0 kB, anchor, replica-1 at 1 (pause 1.2 ms), replica-2 has no version yet",
            "version 2 (step 1), reward 0.25, 1.0 kB of 2.0 kB, 2.00% changed, replica-1 at 1 (pause 1.2 ms), "
            "replica-2 has no version yet",
            "version 3 (step 2), reward 0.5, staleness 1.5, 1.0 kB of 2.0 kB, 2.00% changed, "
            "replica-1 at 3 (pause 1.2 ms), replica-2 at 2 (pause 1.2 ms)",
        ]

    def test_news_is_printed(self, capsys: pytest.CaptureFixture[str]) -> None:
        Lines().say("killed replica-2")
        assert capsys.readouterr().err == "killed replica-2\n"


class TestBoard:
    def drawn(self, seen: RunView, width: int = 120, mark: str = "") -> str:
        console = Console(file=io.StringIO(), width=width, height=40, force_terminal=True, color_system=None)
        live = Live(console=console, auto_refresh=False)
        board = _Board(live, steps=4)
        board.say("started")
        board.mark("replica-1", mark)
        board.show(seen)
        with console.capture() as capture:
            console.print(live.renderable)
        return capture.get()

    def test_board_shows_progress_sizes_and_replicas(self) -> None:
        text = self.drawn(snapshot(0.25, 0.5, replicas=(replica("replica-1", 3), replica("replica-2", 1))))
        assert re.search(r"step +\S+ +2 of 4 *\n", text)
        assert re.search(r"reward +▁█ +0\.375 *\n", text)
        assert "1.0 kB, 2x smaller, 2.00% changed" in text
        assert "3.3 kB of 6.0 kB" in text
        assert "1.5 versions" in text
        assert re.search(r"trainer +version 3 *\n", text)
        assert re.search(r"replica-1 +version 3 +last pause 1\.2 ms *\n", text)
        assert re.search(r"replica-2 +version 1, 2 behind +last pause 1\.2 ms *\n", text)
        assert "0 s  started" in text

    def test_board_shows_the_first_rewards_after_ten_steps(self) -> None:
        assert "0.700, began at 0.050" in self.drawn(snapshot(0.0, 0.1, *[0.5] * 3, *[0.7] * 5))

    @pytest.mark.parametrize("width", [60, 80, 120])
    def test_board_fits_the_terminal(self, width: int) -> None:
        replicas = (replica("replica-1", 3), replica("replica-2", 1))
        lines = self.drawn(snapshot(0.25, 0.5, replicas=replicas), width).splitlines()
        assert sum("2.00% changed" in line for line in lines) == 1
        assert max(map(len, lines)) <= width

    def test_board_shows_the_mark_of_a_replica(self) -> None:
        assert re.search(
            r"replica-1 +version 2 +killed", self.drawn(snapshot(1, replicas=(replica("replica-1", 2),)), mark="killed")
        )

    def test_board_shows_a_replica_without_a_version(self) -> None:
        text = self.drawn(snapshot(1, replicas=(replica("replica-1", -1, None),)))
        assert re.search(r"replica-1 +no version yet *\n", text)

    def test_trouble_replaces_the_pause(self) -> None:
        text = self.drawn(snapshot(1, replicas=(replica("replica-1", 2, trouble="the disk is\x1b[2J full"),)))
        assert "the disk is\\x1b[2J full" in text

    def test_board_of_an_empty_run_shows_only_news(self) -> None:
        assert self.drawn(RunView("url", 1.8e9)).split() == ["0", "s", "started"]
