"""A schema: the names, dtypes and shapes of a set of weights. Those of a run are fixed."""

from __future__ import annotations

from collections.abc import Mapping

from weightwire.errors import SchemaChanged
from weightwire.weights.dtypes import Dtype
from weightwire.weights.tensor import Rows, Weights

__all__ = ["Schema", "check_schema", "copy_weights", "schema_of_weights"]

Schema = Mapping[str, tuple[Dtype, tuple[int, ...]]]
_Kind = tuple[Dtype, tuple[int, ...]] | tuple[Dtype, tuple[int, ...], Rows | None]


def schema_of_weights(weights: Weights) -> dict[str, tuple[Dtype, tuple[int, ...]]]:
    return {name: (tensor.dtype, tensor.shape) for name, tensor in weights.items()}


def check_schema(weights: Mapping[str, _Kind], run: Mapping[str, _Kind], *, where: str = "", url: str = "") -> None:
    """That weights have the names, dtypes and shapes of a run; where rows are named too, also the same rows.

    `where` says whose weights they are, and `url` which run it is.
    """
    for name in sorted({*run, *weights}):
        ours, theirs = run.get(name), weights.get(name)
        if ours != theirs:
            what = f"is {_describe(theirs)}, but {_describe(ours)} in the run{f' at {url}' if url else ''}"
            raise SchemaChanged(
                f"{f'{where}: ' if where else ''}tensor {name!r}: {what}",
                hint="a run's names, dtypes and shapes are fixed: start a new run under another URL",
            )


def copy_weights(source: Weights, targets: Weights) -> None:
    """Copies every bit. Both must have the same schema."""
    check_schema(schema_of_weights(source), schema_of_weights(targets))
    for name, there in source.items():
        there.copy_to(0, there.count, targets[name].bits)


def _describe(kind: _Kind | None) -> str:
    if kind is None:
        return "missing"
    dtype, shape, *more = kind
    rows = f" rows {more[0][0]} to {more[0][1]}" if more and more[0] else ""
    return f"{dtype.name} {list(shape)}{rows}"
