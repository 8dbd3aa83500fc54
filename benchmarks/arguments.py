"""Shared command-line arguments. Paths become absolute, because servers run in other directories."""

from __future__ import annotations

import argparse
from pathlib import Path

__all__ = ["absolute_path", "benchmark_parser", "recording_path"]


def benchmark_parser(description: str) -> argparse.ArgumentParser:
    """A parser with the options of all benchmarks that print a table."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def absolute_path(text: str) -> Path:
    return Path(text).expanduser().absolute()


def recording_path(text: str) -> Path:
    """A directory that record.py wrote."""
    path = absolute_path(text)
    if not (path / "recording.json").is_file():
        raise argparse.ArgumentTypeError(f"{text}: not a recording: recording.json is missing")
    return path
