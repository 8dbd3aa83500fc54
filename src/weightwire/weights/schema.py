"""A schema: the names, dtypes and shapes of a set of weights. The schema of a run never changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from weightwire.errors import SchemaChanged
from weightwire.weights.dtypes import Dtype
from weightwire.weights.tensor import Rows, Weights

__all__ = ["Schema", "check_schema", "copy_weights", "schema_of_weights"]

Schema = Mapping[str, tuple[Dtype, tuple[int, ...]]]
_LISTED = 3  # names of tensors in an error
_Kind = tuple[Dtype, tuple[int, ...]] | tuple[Dtype, tuple[int, ...], Rows | None]


def schema_of_weights(weights: Weights) -> dict[str, tuple[Dtype, tuple[int, ...]]]:
    return {name: (tensor.dtype, tensor.shape) for name, tensor in weights.items()}


def check_schema(weights: Mapping[str, _Kind], run: Mapping[str, _Kind], *, where: str = "", url: str = "") -> None:
    """Checks that weights have the names, dtypes and shapes of a run and, if rows are given, the same rows.

    `where` names the weights and `url` the run in the error.
    """
    if weights == run:
        return
    found = f"{where}: " if where else ""
    the_run = f"the run at {url}" if url else "the run"
    if weights.keys() != run.keys():
        missing, added = sorted(run.keys() - weights.keys()), sorted(weights.keys() - run.keys())
        raise SchemaChanged(
            f"{found}{_different_names(missing, added, the_run)}",
            hint="publish the model that the run was started with, or start a new run under another URL",
        )
    changed = [name for name in sorted(run) if run[name] != weights[name]]
    if changed:
        raise SchemaChanged(
            f"{found}{_different_kinds(changed, weights, run, the_run)}",
            hint="names, dtypes and shapes of a run never change: convert the weights, or start a new run under "
            "another URL",
        )


def copy_weights(source: Weights, targets: Weights, progress: Callable[[int], None] | None = None) -> None:
    """Copies every bit. Both must have the same schema. `progress` receives the bytes of each tensor copied."""
    check_schema(schema_of_weights(source), schema_of_weights(targets))
    for name, there in source.items():
        there.copy_to(0, there.count, targets[name].bits)
        if progress:
            progress(targets[name].bits.nbytes)


def _different_names(missing: Sequence[str], added: Sequence[str], the_run: str) -> str:
    problems = []
    if missing:
        problems.append(f"{_tensors(missing)} of {the_run} {'is' if len(missing) == 1 else 'are'} missing")
    if added:
        problems.append(f"{_tensors(added)} {'is' if len(added) == 1 else 'are'} not in {the_run}")
    return "; ".join(problems)


def _different_kinds(
    changed: Sequence[str], weights: Mapping[str, _Kind], run: Mapping[str, _Kind], the_run: str
) -> str:
    """Describes the first tensor, or all tensors with the same change of dtype."""
    ours, theirs = run[changed[0]], weights[changed[0]]
    alike = [
        name
        for name in changed
        if (run[name][0], weights[name][0]) == (ours[0], theirs[0]) and run[name][1:] == weights[name][1:]
    ]
    if len(alike) > 1 and alike[0] == changed[0]:
        return f"{_tensors(alike)} are {theirs[0].name}, but {ours[0].name} in {the_run}"
    return f"tensor {changed[0]!r}: is {_describe(theirs)}, but {_describe(ours)} in {the_run}"


def _tensors(names: Sequence[str]) -> str:
    if len(names) == 1:
        return f"tensor {names[0]!r}"
    listed = ", ".join(repr(name) for name in names[:_LISTED])
    return f"{len(names)} tensors ({listed}{', ...' if len(names) > _LISTED else ''})"


def _describe(kind: _Kind) -> str:
    dtype, shape, *more = kind
    rows = f" rows {more[0][0]} to {more[0][1]}" if more and more[0] else ""
    return f"{dtype.name} {list(shape)}{rows}"
