"""`weightwire patch`, alone and after `weightwire diff`."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np

import weightwire
from support.command_files import COMMAND, Files, make_weights, step
from support.commands import Command, save_checkpoint, tree
from weightwire.weights.dtypes import DTYPES
from weightwire.weights.tensor import Tensor


class TestRoundTrip:
    def test_sharded_directory_round_trips(self, tmp_path: Path) -> None:
        weights = make_weights()
        save_checkpoint(tmp_path / "old", weights)
        save_checkpoint(tmp_path / "new", step(weights))

        diff = subprocess.run(
            [*COMMAND, "diff", "old", "new", "-o", "step.delta"], cwd=tmp_path, capture_output=True, text=True
        )
        patch = subprocess.run(
            [*COMMAND, "patch", "old", "step.delta", "-o", "out"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        show = subprocess.run([*COMMAND, "show", "step.delta"], cwd=tmp_path, capture_output=True, text=True)

        assert (diff.returncode, patch.returncode, show.returncode) == (0, 0, 0)
        assert (diff.stdout, patch.stdout, show.stderr) == ("", "", "")
        assert tree(tmp_path / "out") == tree(tmp_path / "new")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "old", "out", "step.delta"]
        assert "wrote step.delta: " in diff.stderr
        assert "verified: state " in patch.stderr
        assert "model.layers.10.mlp.up_proj.weight" in show.stdout

    def test_single_files_round_trip(self, run: Command, files: Files) -> None:
        delta, out = files.here / "again.delta", files.here / "out.safetensors"

        assert run("diff", files.old, files.new, "-o", delta).code == 0
        assert run("patch", files.old, delta, "-o", out).code == 0

        assert delta.read_bytes() == files.delta.read_bytes()
        assert out.read_bytes() == files.new.read_bytes()

    def test_coo_delta_round_trips(self, run: Command, files: Files) -> None:
        delta, out = files.here / "coo.delta", files.here / "out.safetensors"

        assert run("diff", files.old, files.new, "-o", delta, "--coo", "--threads", "1").code == 0
        assert run("patch", files.old, delta, "-o", out, "--threads", "1").code == 0

        assert out.read_bytes() == files.new.read_bytes()
        assert {tensor["encodings"][0] for tensor in json.loads(run("show", delta, "--json").out)["tensors"]} == {"coo"}

    def test_output_may_replace_the_base(self, run: Command, files: Files) -> None:
        assert run("patch", files.old, files.delta, "-o", files.old).code == 0
        assert files.old.read_bytes() == files.new.read_bytes()


class TestPatch:
    def test_patch_summary_names_the_verified_state(self, run: Command, files: Files) -> None:
        ran = run("patch", files.old, files.delta, "-o", files.here / "out.safetensors")

        before, after = weightwire.digest(files.old).hex, weightwire.digest(files.new).hex
        first, second = ran.err.splitlines()
        assert first.startswith(f"wrote {files.here / 'out.safetensors'}: 66 kB of weights, 383 changed, ")
        assert second == f"verified: state {after[:12]} (from {before[:12]})"
        assert ran.out == ""

    def test_patch_writes_json(self, run: Command, files: Files) -> None:
        out = files.here / "out.safetensors"

        figures = json.loads(run("patch", files.old, files.delta, "-o", out, "--json").out)

        assert figures.pop("seconds") >= 0
        assert figures == {
            "base": str(files.old),
            "delta": str(files.delta),
            "checkpoint": str(out),
            "before": weightwire.digest(files.old).hex,
            "after": weightwire.digest(files.new).hex,
            "changed": 383,
            "weights_bytes": 66048,
        }

    def test_anchor_can_be_applied(self, run: Command, files: Files) -> None:
        weightwire.anchor(files.new).write(files.delta)
        out = files.here / "out.safetensors"

        ran = run("patch", files.old, files.delta, "-o", out)

        assert ran.err.endswith(f"verified: state {weightwire.digest(files.new).hex[:12]}\n")
        assert out.read_bytes() == files.new.read_bytes()

    def test_delta_of_some_rows_verifies_only_these_rows(self, run: Command, files: Files) -> None:
        dtype, shape = DTYPES["F32"], (128,)
        arrays = make_weights()
        old, new = (arrays["norm"][:64].view(np.uint32), step(arrays)["norm"][:64].view(np.uint32))
        shards = [{"norm": Tensor(dtype, shape, bits, (0, 64))} for bits in (old, new)]
        weightwire.diff(*shards).write(files.delta)

        ran = run("patch", files.old, files.delta, "-o", files.here / "out.safetensors")

        assert ran.err.endswith("verified: the covered rows of 1 tensor\n")

    def test_patch_does_not_overwrite_the_delta(self, run: Command, files: Files) -> None:
        before = tree(files.here)

        ran = run("patch", files.old, files.delta, "-o", files.delta)

        assert ran.code == 1
        assert ran.err == (
            f"error: {files.delta}: is the delta itself [WW-OUTPUT]\nhint: write the result to another place\n"
        )
        assert tree(files.here) == before
