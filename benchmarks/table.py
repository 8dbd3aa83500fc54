"""The tables of the benchmarks: figures, their bars, and the verdicts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

BUSY = "cores busy with other processes"
"""The measure that says whether timings can be trusted."""

_QUIET = 0.3  # cores


@dataclass(frozen=True)
class Bar:
    """The most that a figure may be, or with `at_least` the least. `aim` is the desired value."""

    value: float
    at_least: bool = False
    aim: float | None = None

    def holds(self, figure: float) -> bool:
        return figure >= self.value if self.at_least else figure <= self.value


@dataclass(frozen=True)
class Row:
    """One figure, formatted with `form`. Without a bar it has no verdict."""

    measure: str
    figure: float
    form: str
    bar: Bar | None
    note: str = ""

    @property
    def verdict(self) -> str:
        if self.bar is None:
            return "-"
        return "pass" if self.bar.holds(self.figure) else "MISS"

    @property
    def bar_text(self) -> str:
        if self.bar is None:
            return "-"
        sign = ">=" if self.bar.at_least else "<="
        aim = f" (aim {self.form.format(self.bar.aim)})" if self.bar.aim else ""
        return f"{sign} {self.form.format(self.bar.value)}{aim}"

    def to_json(self) -> dict[str, Any]:
        bar = self.bar and {"value": self.bar.value, "at_least": self.bar.at_least, "aim": self.bar.aim}
        figures = {"measure": self.measure, "figure": self.figure, "text": self.form.format(self.figure)}
        return figures | {"bar": bar, "verdict": self.verdict, "note": self.note}


@dataclass(frozen=True)
class Payload:
    """The size of one change in one format."""

    format: str
    size: int


@dataclass(frozen=True)
class Report:
    """All figures of one source. Payloads are compared with `changed` and `limit`."""

    title: str
    facts: dict[str, Any]
    changed: int
    limit: int
    payloads: list[Payload]
    rows: list[Row]

    def to_json(self) -> dict[str, Any]:
        payloads = [{"format": payload.format, "bytes": payload.size} for payload in self.payloads]
        rows = [row.to_json() for row in self.rows]
        return {"source": self.title, "facts": self.facts, "payloads": payloads, "rows": rows}


def print_report(report: Report) -> None:
    print(f"\n{report.title}")
    if report.payloads:
        print(f"\n  {'payload':<64} {'MB':>9} {'B/change':>9} {'x limit':>8}")
    for one in report.payloads:
        per_change, to_limit = one.size / report.changed, one.size / report.limit
        print(f"  {one.format:<64} {one.size / 1e6:9.3f} {per_change:9.3f} {to_limit:8.3f}")
    print(f"\n  {'measure':<64} {'figure':>9} {'bar':>20}  verdict")
    for row in report.rows:
        figure = row.form.format(row.figure)
        print(f"  {row.measure:<64} {figure:>9} {row.bar_text:>20}  {row.verdict:<7} {row.note}".rstrip())


def print_verdict(reports: Sequence[Report]) -> None:
    judged = [row for report in reports for row in report.rows if row.bar]
    missed = sum(row.verdict == "MISS" for row in judged)
    print(f"\n{len(judged) - missed} of {len(judged)} bars passed, {missed} missed")
    busy = max((row.figure for report in reports for row in report.rows if row.measure == BUSY), default=0.0)
    if missed and busy > _QUIET:
        print(f"{busy:.1f} cores were busy with other processes, so timings are not reliable")
