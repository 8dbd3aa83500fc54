"""The command that fuzzes: what it reports, and that both engines read the same inputs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fuzz import engines
from fuzz import run as command
from fuzz.block_targets import KINDS
from fuzz.blocks import block_in, golden_blocks, input_of, replaced_name
from fuzz.engines import KERNEL_TARGETS, Report, Unavailable, harness
from fuzz.targets import corpus_of
from fuzz.verdicts import decode_with
from support.samples import LAYOUTS
from weightwire.codec import _kernel

LOG = """\
#2\tINITED cov: 26 ft: 38 corp: 1/1b exec/s: 0 rss: 71Mb
#1000\tREDUCE cov: 30 ft: 44 corp: 8/341b lim: 4096 exec/s: 500 rss: 71Mb L: 20/30 MS: 1 Custom-
stat::number_of_executed_units: 20000
stat::average_exec_per_sec:     1333
"""


def test_a_report_has_the_numbers_of_libfuzzer() -> None:
    report = Report.of("delta", LOG, [Path("delta-crash-1")])
    assert report == Report("delta", 20000, 1333, 30, 44, (Path("delta-crash-1"),))
    assert command.row(report).split() == ["delta", "20,000", "1,333", "30", "44", "1"]


def test_a_run_that_crashed_has_the_last_numbers() -> None:
    assert Report.of("delta", LOG.partition("stat::")[0], []).executions == 1000


def test_a_missing_engine_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(engines, "find_spec", lambda name: None)
    assert command.run(["record-gc"], tmp_path, 1, 0) == []
    assert "record-gc         skipped: Atheris is not installed" in capsys.readouterr().out


def test_an_input_can_be_run_again() -> None:
    path = corpus_of("record-gc")[0]
    line = [sys.executable, command.__file__, "record-gc", "--again", str(path)]
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"{path}: ")


def test_an_unknown_target_is_refused() -> None:
    done = subprocess.run([sys.executable, command.__file__, "x"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "unknown target: x" in done.stderr


def test_a_block_survives_being_an_input() -> None:
    made = [(block, input_of(block)) for block in golden_blocks(600)]
    fitting = [(block, data) for block, data in made if data]
    assert len(fitting) > 10
    for block, data in fitting:
        found = block_in(data, block.data[0] & 3)
        assert found
        assert replaced_name(found, block.name) == block


@pytest.mark.slow
def test_the_harness_of_the_kernel_comes_to_the_same_verdicts(tmp_path: Path) -> None:
    """Both read an input into the same block. Otherwise what one finds would not be a finding of the other."""
    try:
        built = harness(tmp_path, "-O0")  # builds six times as fast
    except Unavailable as problem:
        pytest.skip(str(problem))
    for target, kind in KERNEL_TARGETS.items():
        paths = corpus_of(f"block-{kind}")
        blocks = [block_in(path.read_bytes(), KINDS[kind]) for path in paths]
        verdicts = [decode_with(_kernel, block) if block else "too short" for block in blocks]
        expected = [verdict if isinstance(verdict, str) else "accepted" for verdict in verdicts]
        environment = engines.environment_of(target) | {"WEIGHTWIRE_FUZZ_TELL": "1"}
        # Looking for leaks runs some inputs twice.
        command = [str(built), "-detect_leaks=0", *map(str, paths)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.splitlines() == expected
        assert "accepted" in expected


def test_layouts_of_the_harness_are_those_of_the_samples() -> None:
    source = Path(engines.HERE, "kernel_harness.c").read_text()
    table = source.split("LAYOUTS[] = {")[1].split("};")[0]
    listed = ", ".join(f"{{{one.unit}, {one.exponent}, {one.mantissa}, 0, 0}}" for one in LAYOUTS)
    assert "".join(table.split()).rstrip(",") == "".join(listed.split())
