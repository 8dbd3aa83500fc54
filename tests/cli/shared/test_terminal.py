"""Progress bars and tables on a terminal, and readable numbers."""

from __future__ import annotations

import pytest

from support.command_files import Files, run_on_terminal
from support.commands import Command
from weightwire.cli.shared import terminal


class TestOnATerminal:
    def test_diff_shows_a_bar_and_removes_it(self, files: Files) -> None:
        ran = run_on_terminal("diff", files.old, files.new, "-o", files.delta)

        bar, _, rest = ran.err.rpartition("\x1b[2K")  # erases the line
        assert ran.code == 0
        assert "diffing" in bar
        assert " of 66 kB " in bar
        assert "wrote " in rest
        assert ran.out == ""

    def test_patch_shows_a_bar(self, files: Files) -> None:
        ran = run_on_terminal("patch", files.old, files.delta, "-o", files.here / "out.safetensors")

        assert ran.code == 0
        assert "patching" in ran.err
        assert "verified" in ran.err

    def test_publish_and_follow_show_a_bar(self, files: Files) -> None:
        bucket = files.here / "bucket"
        published = run_on_terminal("publish", files.new, bucket)
        followed = run_on_terminal("follow", bucket, "--into", files.here / "replica", "--once")

        assert (published.code, followed.code) == (0, 0)
        assert "publishing" in published.err
        assert "catching up" in followed.err

    def test_show_groups_by_layer_in_80_columns(self, files: Files) -> None:
        ran = run_on_terminal("show", files.delta)

        lines = ran.out.splitlines()
        assert ran.code == 0
        assert lines[2].rstrip() == "model.layers.2"
        assert lines[3].split()[:5] == ["mlp.up_proj.weight", "BF16", "64x128", "ulp", "85"]
        assert all(len(line.rstrip()) <= 80 for line in lines[1:6])

    def test_diff_shows_no_bar_without_a_terminal(
        self, run: Command, files: Files, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("FORCE_COLOR", "1")

        ran = run("diff", files.old, files.new, "-o", files.delta)

        assert "diffing" not in ran.err
        assert len(ran.err.splitlines()) == 2


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (9_949, "9.9 kB"),
        (9_950, "10 kB"),
        (999_499, "999 kB"),
        (999_500, "1.0 MB"),
        (3_860_566, "3.9 MB"),
        (1_192_099_840, "1.2 GB"),
        (5_000_000_000_000_000, "5000 TB"),
    ],
)
def test_byte_size_has_a_readable_unit(count: int, text: str) -> None:
    assert terminal.byte_size(count) == text


@pytest.mark.parametrize(
    ("part", "whole", "text"),
    [
        (0, 0, "0%"),
        (0, 5, "0%"),
        (5, 5, "100%"),
        (1, 10**9, "<0.01%"),
        (93, 10_000, "0.93%"),
        (1, 4, "25.0%"),
        (999_999, 10**6, "99.9%"),
    ],
)
def test_percent_has_readable_precision(part: int, whole: int, text: str) -> None:
    assert terminal.percent(part, whole) == text
