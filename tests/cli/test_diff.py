"""`weightwire diff`: files, exit codes, stdout and stderr."""

from __future__ import annotations

import json

import pytest

import weightwire
from support.command_files import Files, make_weights, save
from support.commands import Command, tree
from weightwire.cli.shared import terminal


class TestDiff:
    def test_diff_writes_its_summary_to_stderr(self, run: Command, files: Files) -> None:
        ran = run("diff", files.old, files.new, "-o", files.delta)

        first, second = ran.err.splitlines()
        size = terminal.byte_size(files.delta.stat().st_size)
        assert first == f"wrote {files.delta}: {size} for 383 changed of 32,896 weights (1.16%)"
        assert " bytes per change, " in second
        assert "x smaller than the weights, " in second
        assert ran.out == ""

    def test_diff_writes_json(self, run: Command, files: Files) -> None:
        ran = run("diff", files.old, files.new, "-o", files.delta, "--json")

        figures = json.loads(ran.out)
        assert figures["delta"] == str(files.delta)
        assert (figures["changed"], figures["weights"], figures["weights_bytes"]) == (383, 32896, 66048)
        assert figures["bytes"] == files.delta.stat().st_size
        assert figures["bytes_per_change"] == pytest.approx(figures["bytes"] / 383)
        assert (figures["tensors_changed"], figures["tensors_new"], figures["tensors_removed"]) == (4, 0, 0)
        assert figures["after"] == weightwire.digest(files.new).hex
        assert ran.err.startswith("wrote ")

    def test_identical_weights_are_reported(self, run: Command, files: Files) -> None:
        ran = run("diff", files.old, files.old, "-o", files.delta, "--json")

        assert "no change: the weights are identical" in ran.err
        assert "smaller" not in ran.err
        assert json.loads(ran.out)["bytes_per_change"] is None

    def test_new_and_removed_tensors_are_counted(self, run: Command, files: Files) -> None:
        arrays = make_weights()
        arrays["a new one"] = arrays.pop("norm")
        save(files.new, arrays)

        ran = run("diff", files.old, files.new, "-o", files.delta)

        assert ", 1 tensor new, 1 tensor removed, " in ran.err

    @pytest.mark.parametrize("out", ["old.safetensors", "new.safetensors"])
    def test_diff_does_not_overwrite_weights(self, run: Command, files: Files, out: str) -> None:
        before = tree(files.here)

        ran = run("diff", files.old, files.new, "-o", files.here / out)

        assert (ran.code, ran.out) == (1, "")
        assert ran.err.startswith(f"error: {files.here / out}: is one of the files to compare [WW-OUTPUT]\nhint: ")
        assert tree(files.here) == before

    @pytest.mark.parametrize("out", [".", "nowhere/step.delta"])
    def test_unusable_output_is_refused_before_the_diff(
        self, run: Command, files: Files, monkeypatch: pytest.MonkeyPatch, out: str
    ) -> None:
        monkeypatch.setattr(weightwire, "diff", None)

        ran = run("diff", files.old, files.new, "-o", files.here / out)

        assert ran.code == 1
        assert ran.err.startswith(f"error: {files.here / out}: ")
        assert "\nhint: " in ran.err
