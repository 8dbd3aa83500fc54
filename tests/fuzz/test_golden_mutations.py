"""Mutations of golden files find no failure, and are always the same."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from fuzz import golden_mutations
from fuzz.blocks import Block, golden_blocks, golden_files
from fuzz.verdicts import judge_block, judge_file
from support.samples import vector_widths
from support.sanitizers import TESTS, build_kernel, compile_watched, watched_environment


@pytest.fixture(scope="module")
def watched_kernel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernel under ASan and UBSan."""
    try:
        return build_kernel(tmp_path_factory.mktemp("kernel"))
    except (OSError, subprocess.CalledProcessError) as problem:
        pytest.skip(f"THE KERNEL IS NOT TESTED AGAINST HOSTILE INPUT: no compiler with sanitizers ({problem})")


def run(kernel: Path, *arguments: str) -> dict[str, int]:
    """The number of times that each verdict was given."""
    command = [sys.executable, golden_mutations.__file__, "--kernel", str(kernel), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-5000:]
    counts: dict[str, int] = json.loads(done.stdout)
    return counts


@pytest.mark.slow
def test_sanitizers_find_no_error_in_2000_mutations(watched_kernel: Path) -> None:
    verdicts = run(watched_kernel, "--count", "2000", "--seed", "1")
    assert sum(verdicts.values()) == 2000
    # Many reasons and enough accepted blocks: mutations reach deep code.
    assert len(verdicts) > 25
    assert verdicts["accepted"] > 200


@pytest.mark.slow
def test_numpy_gives_the_same_verdict_on_1000_mutations(watched_kernel: Path) -> None:
    verdicts = run(watched_kernel, "--count", "1000", "--seed", "2", "--spec")
    assert sum(verdicts.values()) == 1000
    assert verdicts["accepted"] > 100


@pytest.mark.slow
def test_a_kernel_that_reads_too_far_is_caught(tmp_path: Path) -> None:
    """Tests the harness with a kernel that does not check the end of the words."""
    (tmp_path / "bad.c").write_text(
        "#include <Python.h>\n"
        "static PyObject *bad(PyObject *self, PyObject *args) {\n"
        "    Py_buffer data; (void)self;\n"
        '    if (!PyArg_ParseTuple(args, "y*", &data)) return NULL;\n'
        "    return PyLong_FromLong(((volatile char *)data.buf)[data.len]);\n"
        "}\n"
        'static PyMethodDef methods[] = {{"bad", bad, METH_VARARGS, 0}, {0}};\n'
        'static PyModuleDef module = {PyModuleDef_HEAD_INIT, "bad", 0, -1, methods};\n'
        "PyMODINIT_FUNC PyInit_bad(void) { return PyModule_Create(&module); }\n"
    )
    try:
        compile_watched(tmp_path / "bad.c", tmp_path / "bad.so")
    except (OSError, subprocess.CalledProcessError) as problem:
        pytest.skip(f"THE KERNEL IS NOT TESTED AGAINST HOSTILE INPUT: no compiler with sanitizers ({problem})")
    code = "import sys, bad; from fuzz.verdicts import exact; bad.bad(exact(b'twelve bytes'))"
    environment = watched_environment(None) | {"PYTHONPATH": f"{tmp_path}:{TESTS}"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr


def test_a_mutation_is_always_the_same() -> None:
    first, second = (golden_mutations.Run(seed=5, compare=True, collect=None) for _ in range(2))
    for index in (0, 7, 400):
        assert first.mutation(index) == second.mutation(index)
    assert first.mutation(1) != first.mutation(2)
    assert first.mutation(1) != golden_mutations.Run(seed=6, compare=True, collect=None).mutation(1)


def test_mutations_cover_every_encoding() -> None:
    blocks = golden_blocks(700_000)
    assert {block.data[0] for block in blocks} >= {1, 2, 3, 5, 6, 7, 9, 11, 17, 21, 26}
    assert len({block.dtype for block in blocks}) == 22


def test_blocks_round_trip_through_json() -> None:
    for block in golden_blocks(1000)[::10]:
        assert Block.from_json(block.to_json()) == block


def test_unchanged_inputs_are_accepted() -> None:
    """Otherwise the verdicts on mutations mean nothing."""
    for block in golden_blocks(8000)[::5]:
        assert judge_block(block, vector_widths(), compare=True) == "accepted"
    for file in golden_files():
        assert judge_file(file, file.data).startswith("accepted")
