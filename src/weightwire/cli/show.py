"""`weightwire show`: the tensors of a delta or an anchor.

Reads the header and the first byte of each block. On a terminal, tensors are grouped by layer to fit the line.
Elsewhere each tensor is one line with its full name and exact numbers, for grep, sort and awk.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from weightwire import Delta
from weightwire.chain import ANCHOR
from weightwire.cli.shared.file_output import EncodingOutput, ShowOutput, TensorOutput
from weightwire.cli.shared.json_output import write_json
from weightwire.cli.shared.terminal import (
    AsJson,
    byte_size,
    counted,
    percent,
    print_facts,
    print_lines,
)
from weightwire.codec import encoding
from weightwire.delta import FORMAT, EncodedStack, Entry
from weightwire.errors import printable

__all__ = ["show"]

_HEADINGS = ("dtype", "shape", "encoding", "changed", "share", "bytes", "bits")
_WORDS = _HEADINGS[:3]
_LAYER = re.compile(r"(?:.*?\.)?\d+\.(?=.)")


def show(
    delta: Annotated[Path, typer.Argument(metavar="DELTA", help="Delta or anchor.")],
    as_json: AsJson = False,
) -> None:
    """Show the tensors in DELTA: encoding, changed weights and size.

    `share` is the share of weights that changed. `bits` is the size in bits per changed weight.
    """
    opened = Delta.open(delta)
    rows = [row for stack in opened.stacks for row in _TensorRow.of(opened, stack) if row.is_change]
    if as_json:
        write_json(_everything(opened, rows))
        return
    rows.sort(key=lambda row: _natural(row.entry.name))
    console = Console(highlight=False)
    if console.file.isatty() and console.width >= 70:
        console.print(_table(rows))
    else:
        cells = [[row.entry.name, *_cells(row, str, str)] for row in rows]
        print_lines(("tensor", *_HEADINGS), cells, ("tensor", *_WORDS))
    console.print()
    print_facts(_totals(opened, rows))


@dataclass(frozen=True)
class _TensorRow:
    """One tensor. `blocks` has the encoding and size of each block that is not empty.

    `stack` is the first tensor of its stack if it shares its blocks with others.
    """

    entry: Entry
    blocks: tuple[tuple[str, int], ...]
    stack: str | None = None

    @classmethod
    def of(cls, delta: Delta, stack: EncodedStack) -> Iterator[_TensorRow]:
        if stack.coo:
            yield cls(stack.first, (("coo", stack.nbytes),))
            return
        sizes = [(index, size) for index, size in enumerate(stack.blocks) if size]
        found = [(encoding(delta.block(stack, index)), size) for index, size in sizes]
        if len(stack.entries) == 1:
            yield cls(stack.first, tuple(found))
            return
        for (index, _), block in zip(sizes, found, strict=True):
            yield from (cls(entry, (block,), stack.first.name) for entry in stack.members(index))

    @property
    def bytes(self) -> int | None:
        """None if it shares its blocks with other tensors."""
        return None if self.stack else sum(size for _, size in self.blocks)

    @property
    def is_change(self) -> bool:
        """False for a tensor of a stack that did not change."""
        return self.entry.fresh or self.entry.changed > 0

    @property
    def weights(self) -> int:
        return self.entry.layout.count

    @property
    def encodings(self) -> list[str]:
        """The most frequent first."""
        return [name for name, _ in Counter(name for name, _ in self.blocks).most_common()]

    @property
    def bits_per_change(self) -> float | None:
        return None if self.bytes is None or not self.entry.changed else 8 * self.bytes / self.entry.changed


# --- per tensor ---------------------------------------------------------------------------------------------


def _cells(row: _TensorRow, count: Callable[[int], str], size: Callable[[int], str]) -> list[str]:
    """In the order of _HEADINGS. `count` and `size` format the numbers."""
    entry = row.entry
    return [
        entry.dtype.name,
        _shape(entry),
        "+".join(row.encodings) or "-",
        count(entry.changed),
        "new" if entry.fresh else percent(entry.changed, row.weights),
        "-" if row.bytes is None else size(row.bytes),
        _bits(row.bits_per_change),
    ]


def _bits(each: float | None) -> str:
    """One digit fewer for large values: a tensor with few changes may take a hundred bits per change."""
    return "-" if each is None else f"{each:.2f}" if each < 10 else f"{each:.1f}"


def _shape(entry: Entry) -> str:
    """With the rows if it is a shard."""
    whole = "x".join(map(str, entry.shape)) or "scalar"
    return f"{whole}[{entry.rows[0]}:{entry.rows[1]}]" if entry.rows else whole


def _table(rows: Sequence[_TensorRow]) -> Table:
    """Fits 80 columns. A dtype that all tensors share appears only in the totals."""
    first = 1 if len({row.entry.dtype for row in rows}) == 1 else 0
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    table.add_column("tensor", overflow="fold")
    for heading in _HEADINGS[first:]:
        table.add_column(heading, justify="left" if heading in _WORDS else "right", no_wrap=True)
    for layer, members in groupby(rows, lambda row: _layer(row.entry.name)):
        if layer:
            table.add_row(Text(printable(layer.rstrip("."))))
        for row in members:
            name = ("  " if layer else "") + printable(row.entry.name.removeprefix(layer))
            table.add_row(Text(name), *map(Text, _cells(row, "{:,}".format, byte_size)[first:]))
    return table


def _layer(name: str) -> str:
    """The prefix that all tensors of a layer share: everything up to the first number."""
    found = _LAYER.match(name)
    return found[0] if found else ""


def _natural(name: str) -> str:
    """Sorts layer 2 before layer 10."""
    return re.sub(r"\d+", lambda number: number[0].zfill(12), name)


# --- totals -------------------------------------------------------------------------------------------------


def _totals(delta: Delta, rows: Sequence[_TensorRow]) -> Iterator[tuple[str, str]]:
    weights, changed = sum(row.weights for row in rows), delta.changed
    yield "kind", f"{delta.kind}, {FORMAT}"
    dtypes = Counter(row.entry.dtype.name for row in rows)
    yield "tensors", ", ".join(f"{count:,} {name}" for name, count in dtypes.most_common()) or "0"
    yield "changed", f"{changed:,} of {weights:,} weights ({percent(changed, weights)})"
    each = f", {delta.nbytes / changed:.3f} per change" if changed else ""
    yield "bytes", f"{delta.nbytes:,} with a header of {len(delta.head):,}{each}"
    for name, total in _by_encoding(delta).items():
        yield name, f"{total.bytes:,} bytes in {counted(total.blocks, 'block')}"
    yield "before", delta.before or "-"
    yield "after", delta.after or "-"
    for name in delta.removed:
        yield "removed", name


def _by_encoding(delta: Delta) -> dict[str, EncodingOutput]:
    sizes: dict[str, list[int]] = {}
    for stack in delta.stacks:
        for index, size in enumerate(stack.blocks):
            if size:
                name = "coo" if stack.coo else encoding(delta.block(stack, index))
                sizes.setdefault(name, []).append(size)
    return {name: EncodingOutput(blocks=len(found), bytes=sum(found)) for name, found in sizes.items()}


def _everything(delta: Delta, rows: Sequence[_TensorRow]) -> ShowOutput:
    changed = None if delta.kind == ANCHOR else delta.changed
    return ShowOutput(
        delta=delta.where,
        format=FORMAT,
        kind=delta.kind,
        before=delta.before or None,
        after=delta.after or None,
        changed=changed,
        weights=sum(row.weights for row in rows),
        bytes=delta.nbytes,
        header_bytes=len(delta.head),
        bytes_per_change=delta.nbytes / changed if changed else None,
        encodings=_by_encoding(delta),
        removed=list(delta.removed),
        tensors=[_everything_of(row) for row in rows],
    )


def _everything_of(row: _TensorRow) -> TensorOutput:
    entry = row.entry
    return TensorOutput(
        name=entry.name,
        dtype=entry.dtype.name,
        shape=list(entry.shape),
        rows=list(entry.rows) if entry.rows else None,
        new=entry.fresh,
        encodings=row.encodings,
        changed=None if entry.fresh else entry.changed,
        weights=row.weights,
        bytes=row.bytes,
        stack=row.stack,
        bits_per_change=None if entry.fresh else row.bits_per_change,
        digest="".join(f"{one:016x}" for one in entry.digest) if entry.digest else None,
    )
