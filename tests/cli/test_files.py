"""The command line, as a user sees it: files, exit codes, what goes to stdout and what to stderr."""

from __future__ import annotations

import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import safetensors.numpy

import weightwire
from support.commands import Command, Ran
from weightwire.cli.shared import terminal
from weightwire.weights.dtypes import DTYPES
from weightwire.weights.tensor import Tensor

Arrays = dict[str, npt.NDArray[Any]]
COMMAND = [sys.executable, "-c", "from weightwire.cli import main; main()"]
INDEX = "model.safetensors.index.json"


def make_weights() -> Arrays:
    random = np.random.default_rng(7)
    names = ["model.embed_tokens.weight", *(f"model.layers.{layer}.mlp.up_proj.weight" for layer in (0, 2, 10))]
    weights: Arrays = {name: random.normal(0, 0.02, (64, 128)).astype(ml_dtypes.bfloat16) for name in names}
    return weights | {"norm": random.normal(1, 0.1, 128).astype(np.float32)}


def step(arrays: Arrays) -> Arrays:
    """A few bf16 weights move by one ulp, all of the norm moves, and layer 0 stays."""
    stepped = {name: array.copy() for name, array in arrays.items()}
    for name in stepped.keys() - {"model.layers.0.mlp.up_proj.weight", "norm"}:
        stepped[name].view(np.uint16).reshape(-1)[::97] += 1
    stepped["norm"] += np.float32(1e-3)
    return stepped


def save(path: Path, arrays: Arrays) -> Path:
    safetensors.numpy.save_file(arrays, path, metadata={"format": "pt"})
    return path


def save_sharded(directory: Path, arrays: Arrays) -> Path:
    """As transformers does, with files that are not weights."""
    names = sorted(arrays)
    shards = {"model-00001-of-00002.safetensors": names[:2], "model-00002-of-00002.safetensors": names[2:]}
    (directory / "tokenizer").mkdir(parents=True)
    for shard, members in shards.items():
        save(directory / shard, {name: arrays[name] for name in members})
    listed = {name: shard for shard, members in shards.items() for name in members}
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": listed}))
    (directory / "config.json").write_text('{"model_type": "tiny"}\n')
    (directory / "tokenizer" / "vocab.txt").write_text("hello\n")
    return directory


def first_encoding(delta: Path, name: str) -> str:
    """By the format: the lowest two bits of a block."""
    begin, _ = weightwire.Delta.open(delta).byte_range(name)
    return {1: "ulp", 2: "dense", 3: "full"}[delta.read_bytes()[begin] & 3]


def tree(directory: Path) -> dict[str, bytes]:
    files = (path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in files}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Command]:
    monkeypatch.setattr(terminal, "has_kernel", lambda: True)  # no note that it is missing
    handler, hook = signal.getsignal(signal.SIGTERM), sys.excepthook
    yield Command(monkeypatch, capsys)
    signal.signal(signal.SIGTERM, handler)
    sys.excepthook = hook


@dataclass(frozen=True)
class Files:
    """Two single-file checkpoints and the delta between them, in a directory of their own."""

    here: Path
    old: Path
    new: Path
    delta: Path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Files:
    here = tmp_path_factory.mktemp("made")
    weights = make_weights()
    old, new = save(here / "old.safetensors", weights), save(here / "new.safetensors", step(weights))
    weightwire.diff(old, new).write(here / "step.delta")
    return Files(here, old, new, here / "step.delta")


@pytest.fixture
def files(made: Files, tmp_path: Path) -> Files:
    """A copy that a test may damage."""
    here = Path(shutil.copytree(made.here, tmp_path / "files"))
    return Files(here, here / made.old.name, here / made.new.name, here / made.delta.name)


class TestRoundTrip:
    def test_of_a_sharded_directory_as_a_user_runs_it(self, tmp_path: Path) -> None:
        weights = make_weights()
        save_sharded(tmp_path / "old", weights)
        save_sharded(tmp_path / "new", step(weights))

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

    def test_of_single_files(self, run: Command, files: Files) -> None:
        delta, out = files.here / "again.delta", files.here / "out.safetensors"

        assert run("diff", files.old, files.new, "-o", delta).code == 0
        assert run("patch", files.old, delta, "-o", out).code == 0

        assert delta.read_bytes() == files.delta.read_bytes()
        assert out.read_bytes() == files.new.read_bytes()

    def test_in_coo(self, run: Command, files: Files) -> None:
        delta, out = files.here / "coo.delta", files.here / "out.safetensors"

        assert run("diff", files.old, files.new, "-o", delta, "--coo", "--threads", "1").code == 0
        assert run("patch", files.old, delta, "-o", out, "--threads", "1").code == 0

        assert out.read_bytes() == files.new.read_bytes()
        assert {tensor["encodings"][0] for tensor in json.loads(run("show", delta, "--json").out)["tensors"]} == {"coo"}

    def test_onto_the_base_itself(self, run: Command, files: Files) -> None:
        assert run("patch", files.old, files.delta, "-o", files.old).code == 0
        assert files.old.read_bytes() == files.new.read_bytes()


class TestDiff:
    def test_says_what_it_did_on_stderr(self, run: Command, files: Files) -> None:
        ran = run("diff", files.old, files.new, "-o", files.delta)

        first, second = ran.err.splitlines()
        size = terminal.byte_size(files.delta.stat().st_size)
        assert first == f"wrote {files.delta}: {size} for 383 changed of 32,896 weights (1.16%)"
        assert " bytes per change, " in second
        assert "x smaller than the weights, " in second
        assert ran.out == ""

    def test_writes_figures_as_json(self, run: Command, files: Files) -> None:
        ran = run("diff", files.old, files.new, "-o", files.delta, "--json")

        figures = json.loads(ran.out)
        assert figures["delta"] == str(files.delta)
        assert (figures["changed"], figures["weights"], figures["weights_bytes"]) == (383, 32896, 66048)
        assert figures["bytes"] == files.delta.stat().st_size
        assert figures["bytes_per_change"] == pytest.approx(figures["bytes"] / 383)
        assert (figures["tensors_changed"], figures["tensors_new"], figures["tensors_removed"]) == (4, 0, 0)
        assert figures["after"] == weightwire.digest(files.new).hex
        assert ran.err.startswith("wrote ")

    def test_of_the_same_weights(self, run: Command, files: Files) -> None:
        ran = run("diff", files.old, files.old, "-o", files.delta, "--json")

        assert "no change: the weights are identical" in ran.err
        assert "smaller" not in ran.err
        assert json.loads(ran.out)["bytes_per_change"] is None

    def test_tells_of_tensors_that_came_and_went(self, run: Command, files: Files) -> None:
        arrays = make_weights()
        arrays["a new one"] = arrays.pop("norm")
        save(files.new, arrays)

        ran = run("diff", files.old, files.new, "-o", files.delta)

        assert ", 1 tensor new, 1 tensor removed, " in ran.err

    @pytest.mark.parametrize("out", ["old.safetensors", "new.safetensors"])
    def test_does_not_overwrite_weights(self, run: Command, files: Files, out: str) -> None:
        before = tree(files.here)

        ran = run("diff", files.old, files.new, "-o", files.here / out)

        assert (ran.code, ran.out) == (1, "")
        assert ran.err.startswith(f"error: {files.here / out}: holds weights to be compared\nhint: ")
        assert tree(files.here) == before

    @pytest.mark.parametrize("out", [".", "nowhere/step.delta"])
    def test_refuses_a_bad_place_before_the_work(
        self, run: Command, files: Files, monkeypatch: pytest.MonkeyPatch, out: str
    ) -> None:
        monkeypatch.setattr(weightwire, "diff", None)

        ran = run("diff", files.old, files.new, "-o", files.here / out)

        assert ran.code == 1
        assert ran.err.startswith(f"error: {files.here / out}: ")
        assert "\nhint: " in ran.err


class TestPatch:
    def test_says_that_it_verified(self, run: Command, files: Files) -> None:
        ran = run("patch", files.old, files.delta, "-o", files.here / "out.safetensors")

        before, after = weightwire.digest(files.old).hex, weightwire.digest(files.new).hex
        first, second = ran.err.splitlines()
        assert first.startswith(f"wrote {files.here / 'out.safetensors'}: 66 kB of weights, 383 changed, ")
        assert second == f"verified: state {after[:12]} (from {before[:12]})"
        assert ran.out == ""

    def test_writes_figures_as_json(self, run: Command, files: Files) -> None:
        out = files.here / "out.safetensors"

        figures = json.loads(run("patch", files.old, files.delta, "-o", out, "--json").out)

        assert figures.pop("seconds") >= 0
        assert figures == {
            "base": str(files.old),
            "delta": str(files.delta),
            "out": str(out),
            "before": weightwire.digest(files.old).hex,
            "after": weightwire.digest(files.new).hex,
            "changed": 383,
            "weights_bytes": 66048,
        }

    def test_takes_an_anchor(self, run: Command, files: Files) -> None:
        weightwire.anchor(files.new).write(files.delta)
        out = files.here / "out.safetensors"

        ran = run("patch", files.old, files.delta, "-o", out)

        assert ran.err.endswith(f"verified: state {weightwire.digest(files.new).hex[:12]}\n")
        assert out.read_bytes() == files.new.read_bytes()

    def test_claims_no_more_than_a_shard_proves(self, run: Command, files: Files) -> None:
        dtype, shape = DTYPES["F32"], (128,)
        arrays = make_weights()
        old, new = (arrays["norm"][:64].view(np.uint32), step(arrays)["norm"][:64].view(np.uint32))
        shards = [{"norm": Tensor(dtype, shape, bits, (0, 64))} for bits in (old, new)]
        weightwire.diff(*shards).write(files.delta)

        ran = run("patch", files.old, files.delta, "-o", files.here / "out.safetensors")

        assert ran.err.endswith("verified: what it covers, 1 tensor in part or whole\n")

    def test_does_not_overwrite_the_delta(self, run: Command, files: Files) -> None:
        before = tree(files.here)

        ran = run("patch", files.old, files.delta, "-o", files.delta)

        assert ran.code == 1
        assert ran.err == (f"error: {files.delta}: is the delta itself\nhint: name another place for the result\n")
        assert tree(files.here) == before


class TestShow:
    def test_is_one_line_per_tensor_where_it_is_piped(self, run: Command, files: Files) -> None:
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

    def test_ends_with_totals(self, run: Command, files: Files) -> None:
        totals = dict(line.split(maxsplit=1) for line in run("show", files.delta).out.partition("\n\n")[2].splitlines())

        size = files.delta.stat().st_size
        assert totals["kind"] == "delta, weightwire/1"
        assert totals["tensors"] == "3 BF16, 1 F32"
        assert totals["changed"] == "383 of their 24,704 weights (1.55%)"
        assert totals["bytes"].startswith(f"{size:,} with a header of ")
        assert totals["bytes"].endswith(f", {size / 383:.3f} per change")
        assert totals["ulp"].endswith(" bytes in 3 blocks")
        assert totals[first_encoding(files.delta, "norm")].endswith(" bytes in 1 block")
        assert totals["before"] == weightwire.digest(files.old).hex
        assert totals["after"] == weightwire.digest(files.new).hex

    def test_has_everything_as_json(self, run: Command, files: Files) -> None:
        shown = json.loads(run("show", files.delta, "--json").out)

        delta = weightwire.Delta.open(files.delta)
        norm = delta.entries["norm"]
        assert (shown["kind"], shown["before"], shown["after"]) == ("delta", delta.before, delta.after)
        assert (shown["bytes"], shown["header_bytes"], shown["changed"]) == (
            delta.nbytes,
            len(delta.head),
            383,
        )
        assert [tensor["name"] for tensor in shown["tensors"]] == list(delta.entries)
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
            "blocks": [norm.nbytes],
            "digest": f"{norm.digest[0]:016x}{norm.digest[1]:016x}",
        }
        assert sum(total["bytes"] for total in shown["encodings"].values()) == delta.nbytes - len(delta.head)

    def test_of_tensors_new_and_removed(self, run: Command, files: Files) -> None:
        weightwire.diff({"gone": np.zeros(8)}, {"came": np.zeros(()), "empty": np.zeros((0, 3))}).write(files.delta)

        ran = run("show", files.delta)

        came, empty = (line.split() for line in ran.out.splitlines()[1:3])
        assert came[:6] == ["came", "F64", "scalar", "full", "1", "new"]
        assert empty == ["empty", "F64", "0x3", "-", "0", "new", "0", "-"]
        assert "removed    gone\n" in ran.out

    def test_of_a_shard(self, run: Command, files: Files) -> None:
        def shard(*values: int) -> dict[str, Tensor]:
            return {"w": Tensor(DTYPES["U8"], (10, 2), np.array(values, np.uint8), (4, 6))}

        weightwire.diff(shard(1, 2, 3, 4), shard(1, 2, 3, 5)).write(files.delta)

        ran = run("show", files.delta)

        assert ran.out.splitlines()[1].split()[:3] == ["w", "U8", "10x2[4:6]"]
        assert ran.out.splitlines()[1].split()[4:6] == ["1", "25.0%"]
        assert "before     -\nafter      -\n" in ran.out

    def test_spells_out_names_that_would_break_the_line(self, run: Command, files: Files) -> None:
        weightwire.diff({}, {"\x1b[31m\n": np.zeros(1)}).write(files.delta)

        assert run("show", files.delta).out.splitlines()[1].startswith("\\x1b[31m\\n  F64 ")

    def test_of_an_unknown_encoding(self, run: Command, files: Files) -> None:
        begin, _ = weightwire.Delta.open(files.delta).byte_range("norm")
        data = bytearray(files.delta.read_bytes())
        data[begin] &= 0xFC
        files.delta.write_bytes(data)

        assert run("show", files.delta).out.splitlines()[4].split()[3] == "unknown"


class TestErrors:
    """Each is one line of what went wrong and one of what to do, on stderr, and leaves nothing behind."""

    @staticmethod
    def check(ran: Ran, message: str, hint: str) -> None:
        assert (ran.code, ran.out) == (1, "")
        assert ran.err == f"error: {message}\nhint: {hint}\n"

    def test_as_a_user_sees_them(self, tmp_path: Path) -> None:
        ran = subprocess.run(
            [*COMMAND, "diff", "nothing", "nowhere", "-o", "x"], cwd=tmp_path, capture_output=True, text=True
        )

        expected = "error: nothing: no such file or directory\nhint: check the path\n"
        assert (ran.returncode, ran.stdout, ran.stderr) == (1, "", expected)

    def test_missing_path(self, run: Command, files: Files) -> None:
        missing = files.here / "missing"
        out = files.here / "out"

        self.check(
            run("diff", files.old, missing, "-o", out),
            f"{missing}: no such file or directory",
            "check the path",
        )
        self.check(
            run("patch", missing, files.delta, "-o", out),
            f"{missing}: no such file or directory",
            "check the path",
        )
        self.check(run("show", missing), f"{missing}: cannot be read (No such file or directory)", "check the path")

    def test_wrong_base(self, run: Command, files: Files) -> None:
        before = tree(files.here)
        made_for, these = weightwire.digest(files.old).hex[:12], weightwire.digest(files.new).hex[:12]

        self.check(
            run("patch", files.new, files.delta, "-o", files.here / "out.safetensors"),
            f"{files.delta}: was made for weights with state {made_for}, and these have {these}",
            "apply it to the weights it was made from",
        )
        assert tree(files.here) == before

    @pytest.mark.parametrize("size", [0, 4, 200, -1])
    def test_truncated_delta(self, run: Command, files: Files, size: int) -> None:
        files.delta.write_bytes(files.delta.read_bytes()[:size])
        before = tree(files.here)

        for ran in (run("show", files.delta), run("patch", files.old, files.delta, "-o", files.here / "out")):
            assert (ran.code, ran.out) == (1, "")
            assert ran.err.startswith(f"error: {files.delta}: ")
            assert "\nhint: " in ran.err
            assert len(ran.err.splitlines()) == 2
        assert tree(files.here) == before

    def test_not_a_delta(self, run: Command, files: Files) -> None:
        self.check(
            run("patch", files.old, files.new, "-o", files.here / "out"),
            f"{files.new}: is no weightwire delta",
            "pass a file that `weightwire diff` wrote",
        )

    def test_out_exists(self, run: Command, files: Files) -> None:
        base = save_sharded(files.here / "base", make_weights())
        out = files.here / "out"
        out.mkdir()
        (out / "notes.txt").write_text("mine")

        self.check(
            run("patch", base, files.delta, "-o", out),
            f"{out}: exists and is not empty",
            "write to a new directory: one that holds files cannot be replaced all at once",
        )
        assert tree(out) == {"notes.txt": b"mine"}

    @pytest.mark.parametrize(
        ("args", "message"),
        [
            (["diff", "a", "b"], "Missing option '--output' / '-o'"),
            (["diff", "a", "-o", "c"], "Missing argument 'NEW'"),
            (["diff", "a", "b", "-o", "c", "--threads", "0"], "Invalid value for '--threads'"),
            (["patch", "a", "b", "-o", "c", "--threads", "-1"], "Invalid value for '--threads'"),
            (["patch", "a", "b", "-o", "c", "--threads", "two"], "Invalid value for '--threads'"),
            (["show", "a", "--jason"], "No such option: --jason"),
            (["fetch"], "No such command 'fetch'"),
        ],
    )
    def test_called_wrongly(self, run: Command, args: list[str], message: str) -> None:
        ran = run(*args)

        assert (ran.code, ran.out) == (2, "")
        assert ran.err.startswith("Usage: weightwire ")
        assert message in ran.err

    def test_out_of_memory(self, run: Command, files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
        raise_from_diff(monkeypatch, MemoryError())

        self.check(
            run("diff", files.old, files.new, "-o", files.here / "x"),
            "out of memory",
            "try fewer --threads, or a machine with more memory",
        )

    def test_interrupt_is_quiet(self, run: Command, files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
        raise_from_diff(monkeypatch, KeyboardInterrupt())

        assert run("diff", files.old, files.new, "-o", files.here / "x") == Ran(130, "", "")

    def test_termination_cleans_up(self, run: Command, files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
        before = tree(files.here)
        # The last thing before the result appears.
        monkeypatch.setattr(os, "replace", lambda *_: os.kill(os.getpid(), signal.SIGTERM))

        assert run("patch", files.old, files.delta, "-o", files.here / "out") == Ran(143, "", "")
        assert tree(files.here) == before

    def test_a_bug_shows_a_traceback(self, run: Command, files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
        raise_from_diff(monkeypatch, ZeroDivisionError("a bug"))

        with pytest.raises(ZeroDivisionError, match="a bug"):
            run("diff", files.old, files.new, "-o", files.here / "x")

    def test_a_reader_that_leaves_is_none(self, files: Files) -> None:
        read, write = os.pipe()
        os.close(read)

        ran = subprocess.run([*COMMAND, "show", files.delta], stdout=write, stderr=subprocess.PIPE)
        os.close(write)

        assert (ran.returncode, ran.stderr) == (1, b"")


def raise_from_diff(monkeypatch: pytest.MonkeyPatch, problem: BaseException) -> None:
    def diff(*args: Any, **options: Any) -> NoReturn:
        raise problem

    monkeypatch.setattr(weightwire, "diff", diff)


def run_on_terminal(*args: str | Path) -> Ran:
    """With stdout and stderr on terminals of their own, 80 columns wide."""
    ends = [pty.openpty(), pty.openpty()]
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    env.pop("NO_COLOR", None)
    process = subprocess.Popen([*COMMAND, *args], stdout=ends[0][1], stderr=ends[1][1], env=env)
    seen = [bytearray(), bytearray()]
    readers = [
        threading.Thread(target=read_terminal, args=(main_end, into))
        for (main_end, _), into in zip(ends, seen, strict=True)
    ]
    for (_, other_end), reader in zip(ends, readers, strict=True):
        os.close(other_end)
        reader.start()
    code = process.wait(timeout=60)
    for reader in readers:
        reader.join()
    return Ran(code, *(text.decode().replace("\r\n", "\n") for text in seen))


def read_terminal(main_end: int, into: bytearray) -> None:
    with open(main_end, "rb", buffering=0) as file:
        try:
            while chunk := file.read(1 << 16):
                into += chunk
        except OSError:  # how Linux says that the other end was closed
            pass


class TestOnATerminal:
    def test_diff_shows_a_bar_and_removes_it(self, files: Files) -> None:
        ran = run_on_terminal("diff", files.old, files.new, "-o", files.delta)

        bar, _, rest = ran.err.rpartition("\x1b[2K")  # erases the line
        assert ran.code == 0
        assert "diffing" in bar
        assert "66.0 kB" in bar
        assert "wrote " in rest
        assert ran.out == ""

    def test_patch_shows_a_bar(self, files: Files) -> None:
        ran = run_on_terminal("patch", files.old, files.delta, "-o", files.here / "out.safetensors")

        assert ran.code == 0
        assert "patching" in ran.err
        assert "verified" in ran.err

    def test_show_groups_by_layer_in_80_columns(self, files: Files) -> None:
        ran = run_on_terminal("show", files.delta)

        lines = ran.out.splitlines()
        assert ran.code == 0
        assert lines[2].rstrip() == "model.layers.2"
        assert lines[3].split()[:5] == ["mlp.up_proj.weight", "BF16", "64x128", "ulp", "85"]
        assert all(len(line.rstrip()) <= 80 for line in lines[1:6])

    def test_no_bar_where_there_is_none(self, run: Command, files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("FORCE_COLOR", "1")

        ran = run("diff", files.old, files.new, "-o", files.delta)

        assert "diffing" not in ran.err
        assert len(ran.err.splitlines()) == 2


class TestHelp:
    def test_lists_the_commands(self, run: Command) -> None:
        ran = run("--help")

        assert ran.code == 0
        assert all(f"\n  {command} " in ran.out for command in ("diff", "patch", "show"))

    def test_version(self, run: Command) -> None:
        assert run("--version") == Ran(0, f"weightwire {weightwire.__version__}\n", "")

    def test_says_when_the_kernel_is_missing(self, run: Command, files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(terminal, "has_kernel", lambda: False)

        ran = run("diff", files.old, files.new, "-o", files.delta)

        assert ran.err.startswith("note: the compiled kernel is missing")


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
def test_byte_size(count: int, text: str) -> None:
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
def test_percent(part: int, whole: int, text: str) -> None:
    assert terminal.percent(part, whole) == text
