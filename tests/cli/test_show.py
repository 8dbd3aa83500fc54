"""`weightwire show`: the table, the totals and JSON."""

from __future__ import annotations

import json

import numpy as np

import weightwire
from support.command_files import Files, first_encoding
from support.commands import Command
from support.crafted_files import with_stack
from weightwire.delta.file import block_hash
from weightwire.weights.dtypes import DTYPES
from weightwire.weights.tensor import Tensor

FIRST = "model.embed_tokens.weight"


class TestShow:
    def test_show_writes_one_line_per_tensor_without_a_terminal(self, run: Command, files: Files) -> None:
        ran = run("show", files.delta)

        lines = [line.split() for line in ran.out.splitlines()]
        assert lines[0] == ["tensor", "dtype", "shape", "encoding", "changed", "share", "bytes", "bits"]
        assert [line[0] for line in lines[1:5]] == [
            "model.embed_tokens.weight",
            "model.layers.2.mlp.up_proj.weight",
            "model.layers.10.mlp.up_proj.weight",
            "norm",
        ]
        assert lines[2][1:6] == ["BF16", "64x128", "ulp", "85", "1.04%"]
        assert lines[4][1:6] == ["F32", "128", first_encoding(files.delta, "norm"), "128", "100%"]
        assert ran.out.isascii()
        assert ran.err == ""

    def test_show_ends_with_totals(self, run: Command, files: Files) -> None:
        totals = dict(line.split(maxsplit=1) for line in run("show", files.delta).out.partition("\n\n")[2].splitlines())

        size = files.delta.stat().st_size
        assert totals["kind"] == "delta, weightwire/1"
        assert totals["tensors"] == "3 BF16, 1 F32"
        assert totals["changed"] == "383 of 24,704 weights (1.55%)"
        assert totals["bytes"].startswith(f"{size:,} with a header of ")
        assert totals["bytes"].endswith(f", {size / 383:.3f} per change")
        assert totals["ulp"].endswith(" bytes in 1 block")  # three tensors of one shape share it
        assert totals[first_encoding(files.delta, "norm")].endswith(" bytes in 1 block")
        assert totals["before"] == weightwire.digest(files.old).hex
        assert totals["after"] == weightwire.digest(files.new).hex

    def test_show_writes_json(self, run: Command, files: Files) -> None:
        shown = json.loads(run("show", files.delta, "--json").out)

        delta = weightwire.Delta.open(files.delta)
        norm = delta.stack_of["norm"]
        assert (shown["kind"], shown["before"], shown["after"]) == ("delta", delta.before, delta.after)
        assert (shown["bytes"], shown["header_bytes"], shown["changed"]) == (
            delta.nbytes,
            len(delta.head),
            383,
        )
        assert [tensor["name"] for tensor in shown["tensors"]] == [n for n, e in delta.entries.items() if e.changed]
        assert shown["tensors"][-1] == {
            "name": "norm",
            "dtype": "F32",
            "shape": [128],
            "rows": None,
            "new": False,
            "encodings": [first_encoding(files.delta, "norm")],
            "changed": 128,
            "weights": 128,
            "bytes": norm.nbytes,
            "bits_per_change": norm.nbytes / 16,
            "stack": None,
            "digest": None,
        }
        assert [tensor["stack"] for tensor in shown["tensors"] if tensor["bytes"] is None] == [FIRST] * 3
        assert sum(total["bytes"] for total in shown["encodings"].values()) == delta.nbytes - len(delta.head)

    def test_new_and_removed_tensors_are_shown(self, run: Command, files: Files) -> None:
        weightwire.diff({"gone": np.zeros(8)}, {"came": np.zeros(()), "empty": np.zeros((0, 3))}).write(files.delta)

        ran = run("show", files.delta)

        came, empty = (line.split() for line in ran.out.splitlines()[1:3])
        assert came[:6] == ["came", "F64", "scalar", "full", "1", "new"]
        assert empty == ["empty", "F64", "0x3", "-", "0", "new", "0", "-"]
        assert "removed    gone\n" in ran.out

    def test_delta_of_some_rows_shows_the_rows(self, run: Command, files: Files) -> None:
        def shard(*values: int) -> dict[str, Tensor]:
            return {"w": Tensor(DTYPES["U8"], (10, 2), np.array(values, np.uint8), (4, 6))}

        weightwire.diff(shard(1, 2, 3, 4), shard(1, 2, 3, 5)).write(files.delta)

        ran = run("show", files.delta)

        assert ran.out.splitlines()[1].split()[:3] == ["w", "U8", "10x2[4:6]"]
        assert ran.out.splitlines()[1].split()[4:6] == ["1", "25.0%"]
        assert "before     -\nafter      -\n" in ran.out

    def test_control_characters_in_names_are_escaped(self, run: Command, files: Files) -> None:
        weightwire.diff({}, {"\x1b[31m\n": np.zeros(1)}).write(files.delta)

        assert run("show", files.delta).out.splitlines()[1].startswith("\\x1b[31m\\n  F64 ")

    def test_unknown_encoding_is_shown_as_unknown(self, run: Command, files: Files) -> None:
        delta = weightwire.Delta.open(files.delta)
        block = bytes(delta.block(delta.stack_of["norm"], 0))
        strange = bytes([block[0] & 0xFC]) + block[1:]
        files.delta.write_bytes(with_stack(delta, "norm", hashes=(block_hash(strange),)).replace(block, strange))

        assert run("show", files.delta).out.splitlines()[4].split()[3] == "unknown"
