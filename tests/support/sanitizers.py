"""The kernel under ASan and UBSan: how to build it, and the environment of a process that uses it."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

TESTS = Path(__file__).parent.parent

KERNEL = "weightwire.codec._kernel"


# -O0: an optimized build under sanitizers takes six times as long to compile, and runs no faster from Python.
FLAGS = "-std=c11 -O0 -g -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize-recover=all -shared -fPIC"


def compile_watched(source: Path, out: Path) -> None:
    """An extension under ASan and UBSan."""
    include = sysconfig.get_paths()["include"]
    command = ["cc", *FLAGS.split(), f"-I{include}", str(source), "-o", str(out)]
    subprocess.run(command, check=True, capture_output=True)


def build_kernel(directory: Path) -> Path:
    compile_watched(TESTS.parent / "src" / "weightwire" / "codec" / "_kernel.c", directory / "_kernel.abi3.so")
    return directory / "_kernel.abi3.so"


def watched_environment(kernel: Path | None) -> dict[str, str]:
    """Turns off Python's allocator, which hides reads past the end of small objects."""
    runtime = subprocess.check_output(["cc", "-print-file-name=libasan.so"], text=True).strip()
    environment = {
        "LD_PRELOAD": runtime,
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1:allocator_may_return_null=1:detect_stack_use_after_return=1",
        "UBSAN_OPTIONS": "print_stacktrace=1:abort_on_error=1",
        "PYTHONMALLOC": "malloc",
    }
    return os.environ | environment | ({"WEIGHTWIRE_FUZZ_KERNEL": str(kernel)} if kernel else {})


def use_kernel(path: str) -> None:
    """Installs another build of the kernel before weightwire imports it."""
    loader = importlib.machinery.ExtensionFileLoader(KERNEL, path)
    spec = importlib.util.spec_from_file_location(KERNEL, path, loader=loader)
    assert spec
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    sys.modules[KERNEL] = module
