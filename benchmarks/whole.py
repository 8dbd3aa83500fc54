"""A benchmark from beginning to end: measures, prints, and sees to it that it was one build throughout."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from build import MIXED, fingerprint, machine
from table import Report, print_report, print_verdict

__all__ = ["run_whole"]


def run_whole(measure: Callable[[Path], Iterable[Report]], *, as_json: bool) -> None:
    build = fingerprint()
    with tempfile.TemporaryDirectory(prefix="weightwire-benchmark-") as directory:
        reports = list(measure(Path(directory)))
    if as_json:
        print(json.dumps({"machine": machine(), "sources": [report.to_json() for report in reports]}, indent=2))
    else:
        print(machine())
        for report in reports:
            print_report(report)
        print_verdict(reports)
    if fingerprint() != build:
        raise SystemExit(MIXED)
