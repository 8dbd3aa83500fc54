"""The first line of every table: which build was measured, and on which machine."""

from __future__ import annotations

import hashlib
import os
import platform
from pathlib import Path

import numpy as np

import weightwire
from weightwire.codec.block_codec import KERNEL

MIXED = "weightwire was changed or rebuilt during the run: these figures mix two builds"


def fingerprint() -> str:
    """A hash of the measured code, including the compiled kernel."""
    root = Path(weightwire.__file__).parent
    files = sorted(path for path in root.rglob("*") if path.suffix in {".py", ".so"})
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:12]


def machine() -> str:
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    processor = models[0].partition(": ")[2] if models else platform.machine()
    kernel = KERNEL.__name__.rpartition(".")[2]  # type: ignore[attr-defined]
    cores = f"{len(os.sched_getaffinity(0))} cores of {processor}"
    versions = f"Python {platform.python_version()}, NumPy {np.__version__}"
    return f"weightwire {weightwire.__version__}, build {fingerprint()} with {kernel}, {versions}, {cores}"
