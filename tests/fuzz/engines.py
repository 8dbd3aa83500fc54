"""The engines that run a target: Atheris for Python, and libFuzzer around the C kernel under ASan and UBSan."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CORPUS = HERE / "corpus"

# Targets of kernel_harness.c. They read the corpus of the block target with the same encoding.
KERNEL_TARGETS = {f"kernel-{kind}": kind for kind in ("ulp", "dense", "full")}

# trace-cmp helps with magic numbers, of which a block has none, and takes two thirds of the time. clang does not define
# __SANITIZE_ADDRESS__, which makes the kernel allocate all its memory from ASan.
_FLAGS = (
    "-std=c11 -g -fno-omit-frame-pointer -D__SANITIZE_ADDRESS__=1 -fsanitize=address,undefined,fuzzer "
    "-fno-sanitize-coverage=trace-cmp -fno-sanitize-recover=all"
)
_CLANGS = ("clang", *(f"clang-{version}" for version in range(22, 12, -1)))
_LIMITS = ("-timeout=30", "-rss_limit_mb=1024", "-print_final_stats=1")


class Unavailable(Exception):
    """An engine that is not installed."""


@dataclass(frozen=True)
class Report:
    """What came of running one target."""

    target: str
    executions: int
    per_second: int
    coverage: int
    features: int
    crashes: tuple[Path, ...]

    @staticmethod
    def of(target: str, log: str, crashes: Sequence[Path]) -> Report:
        """Reads the output of libFuzzer."""
        numbers = {name: int(value) for name, value in re.findall(r"^stat::(\w+): +(\d+)", log, re.MULTILINE)}
        progress = re.findall(r"^#(\d+)\t.*cov: (\d+) ft: (\d+)", log, re.MULTILINE)
        seen, coverage, features = map(int, progress[-1]) if progress else (0, 0, 0)
        executions = numbers.get("number_of_executed_units", seen)
        return Report(
            target, executions, numbers.get("average_exec_per_sec", 0), coverage, features, tuple(sorted(crashes))
        )


def corpus_folder(target: str) -> Path:
    """The folder in the repository. Kernel targets share those of the block targets."""
    return CORPUS / (f"block-{KERNEL_TARGETS[target]}" if target in KERNEL_TARGETS else target)


def command_of(target: str, work: Path) -> list[str]:
    """The command of a target, without its corpus."""
    if target in KERNEL_TARGETS:
        return [str(harness(work))]
    if find_spec("atheris") is None:
        raise Unavailable("Atheris is not installed: pip install -e '.[fuzz]' (it needs CPython on Linux)")
    return [sys.executable, str(HERE / "atheris_child.py"), target]


def environment_of(target: str) -> dict[str, str]:
    paths = os.pathsep.join(path for path in (str(ROOT / "src"), os.environ.get("PYTHONPATH", "")) if path)
    return os.environ | {"WEIGHTWIRE_FUZZ_KIND": KERNEL_TARGETS.get(target, ""), "PYTHONPATH": paths}


def harness(work: Path, optimization: str = "-O1") -> Path:
    """Builds the harness of the kernel, if a source is newer."""
    built = work / "kernel_harness"
    sources = [HERE / "kernel_harness.c", *(ROOT / "src" / "weightwire" / "codec" / "kernel").glob("*.h")]
    if built.exists() and built.stat().st_mtime > max(path.stat().st_mtime for path in sources):
        return built
    compiler = next(filter(None, map(shutil.which, _CLANGS)), None)
    if compiler is None:
        raise Unavailable("clang is not installed: apt-get install clang-14 libclang-rt-14-dev")
    work.mkdir(parents=True, exist_ok=True)
    subprocess.run([compiler, optimization, *_FLAGS.split(), str(sources[0]), "-o", str(built)], check=True)
    return built


def fuzz(target: str, work: Path, *, largest: int, runs: int, seconds: int, words: Sequence[str]) -> Report:
    """Runs one target. New inputs stay in `work`, and crashes too."""
    command = command_of(target, work)
    found, findings = work / target, work / "findings"
    for folder in (found, findings, corpus_folder(target)):
        folder.mkdir(parents=True, exist_ok=True)
    options = [f"-runs={runs}", f"-max_len={largest}", f"-artifact_prefix={findings}/{target}-", *_LIMITS]
    options += [f"-max_total_time={seconds}"] if seconds else []
    if words:
        lines = ("".join(f"\\x{byte:02x}" for byte in word.encode()) for word in words)
        (work / f"{target}.words").write_text("".join(f'"{line}"\n' for line in lines))
        options.append(f"-dict={work / f'{target}.words'}")
    before = set(findings.glob(f"{target}-*"))
    with (work / f"{target}.log").open("w") as log:
        folders = [str(found), str(corpus_folder(target))]
        done = subprocess.run([*command, *options, *folders], env=environment_of(target), stderr=log, stdout=log)
    text = (work / f"{target}.log").read_text(errors="replace")
    crashes = set(findings.glob(f"{target}-*")) - before
    if done.returncode and not crashes:
        raise RuntimeError(f"{target}: exit status {done.returncode}\n{text[-3000:]}")
    return Report.of(target, text, sorted(crashes))


def minimize(target: str, work: Path, largest: int) -> int:
    """Adds those inputs found to the corpus that reach code which it does not. Returns how many."""
    folder = corpus_folder(target)
    folder.mkdir(parents=True, exist_ok=True)
    before = set(folder.iterdir())
    options = ["-merge=1", "-use_counters=0", f"-max_len={largest}", *_LIMITS]
    command = [*command_of(target, work), *options, str(folder), str(work / target)]
    subprocess.run(command, env=environment_of(target), check=True, capture_output=True)
    added = set(folder.iterdir()) - before
    for path in added:
        path.rename(path.with_name(f"{path.name[:16]}.input"))
    return len(added)
