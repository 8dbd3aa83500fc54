"""Runs a benchmark: measures, prints each table when it is ready, and checks that the build did not change."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from build import MIXED, fingerprint, machine
from table import Report, print_report, print_verdict

__all__ = ["run_benchmark"]


def run_benchmark(measure: Callable[[Path], Iterable[Report]], *, as_json: bool) -> None:
    """`measure` receives a temporary directory and yields reports."""
    build, reports = fingerprint(), []
    if not as_json:
        print(machine(), flush=True)
    with tempfile.TemporaryDirectory(prefix="weightwire-benchmark-") as directory:
        for report in measure(Path(directory)):
            reports.append(report)
            if not as_json:
                print_report(report)
    if as_json:
        print(json.dumps({"machine": machine(), "sources": [report.to_json() for report in reports]}, indent=2))
    else:
        print_verdict(reports)
    if fingerprint() != build:
        # Scripts and commands run in new processes, which would have measured another build.
        raise SystemExit(MIXED)
