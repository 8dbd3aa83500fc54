"""Golden files pin the format byte for byte. A release that fails here cannot read the files of others."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import weightwire
from golden.make import CASES, HERE, make
from weightwire import Delta
from weightwire.codec import encoding
from weightwire.weights import DTYPES

STATES: dict[str, dict[str, str]] = json.loads((HERE / "states.json").read_text())

LANES = ("", " four", " sixteen")

each_case = pytest.mark.parametrize("name", CASES)


def golden(name: str) -> Delta:
    return Delta.open(HERE / f"{name}.safetensors")


def test_every_case_has_a_file_and_every_file_a_case() -> None:
    assert {path.stem for path in HERE.glob("*.safetensors")} == set(CASES) == set(STATES)


def test_the_files_are_small() -> None:
    sizes = [path.stat().st_size for path in HERE.glob("*.safetensors")]
    assert max(sizes) < 50_000
    assert sum(sizes) < 300_000


@each_case
def test_the_same_weights_give_the_same_bytes(name: str, implementation: str) -> None:
    assert make(name).to_bytes() == golden(name).to_bytes()


@each_case
def test_files_decode_to_the_pinned_state(name: str, implementation: str) -> None:
    old, _, _ = CASES[name]()
    assert weightwire.digest(old).hex == STATES[name]["base"]
    result = weightwire.patch(old, golden(name), copy=True)
    assert weightwire.digest(result).hex == STATES[name]["result"]


@each_case
def test_a_file_names_the_states_that_are_pinned(name: str) -> None:
    delta = golden(name)
    assert delta.before in ("", STATES[name]["base"])
    assert delta.after in ("", STATES[name]["result"])


def test_every_way_to_encode_is_pinned() -> None:
    found = set()
    for name in CASES:
        delta = golden(name)
        found.add(delta.kind)
        found |= {"removed"} if delta.removed else set()
        for stack in delta.stacks:
            found |= {what for what in ("coo", "fresh", "rows") if getattr(stack.first, what)}
            found |= {stack.first.dtype.name, "stack" if len(stack.entries) > 1 else "single"}
            for index, size in enumerate(stack.blocks):
                block = delta.block(stack, index)
                if not size:
                    found.add("empty")
                elif not stack.coo:
                    found.add(f"{encoding(block)}{LANES[block[0] >> 2 & 3]}{' lines' * (block[0] >> 4)}")
    assert found >= {"delta", "anchor", "removed", "coo", "fresh", "rows", "empty", "stack", "single", *DTYPES}
    assert found >= {"ulp", "ulp four", "ulp sixteen", "ulp lines", "ulp four lines"}
    assert found >= {"dense", "dense four", "dense sixteen lines", "full", "full four", "full sixteen"}


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("ulp")])
def test_cases_are_encoded_as_their_names_say(name: str) -> None:
    delta = golden(name)
    blocks = [delta.block(stack, index) for stack in delta.stacks for index, size in enumerate(stack.blocks) if size]
    assert {encoding(block) for block in blocks} == {"ulp"}


# The script that makes them


def run(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(HERE / "make.py"), "--directory", str(directory), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_the_script_does_not_overwrite_different_files(tmp_path: Path) -> None:
    for path in (*HERE.glob("*.safetensors"), HERE / "states.json"):
        shutil.copy(path, tmp_path)
    other, missing = tmp_path / "coo.safetensors", tmp_path / "rows.safetensors"
    other.write_bytes(b"older")
    missing.unlink()

    refused = run(tmp_path)
    assert refused.returncode == 1
    assert "coo.safetensors differs" in refused.stderr
    assert other.read_bytes() == b"older"
    assert not missing.exists()

    assert run(tmp_path, "--overwrite").returncode == 0
    assert other.read_bytes() == (HERE / other.name).read_bytes()
    assert missing.read_bytes() == (HERE / missing.name).read_bytes()
    assert run(tmp_path).stdout == ""
