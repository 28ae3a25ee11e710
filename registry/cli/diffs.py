"""`diff`: what differs between two checkpoints."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from backends.escape import quoted
from registry.checkpoint import Checkpoint, TensorInfo
from registry.cli import describe, options, output
from registry.cli.columns import Column
from registry.cli.stats import share
from registry.content.distances import Distance
from registry.diff import KINDS, Diff, TensorDiff, ValueDiff
from registry.diff import diff as compare
from registry.plain import json_ready
from registry.registry import open  # noqa: A004

_DIFF = (
    Column("component", folds=True),
    Column("is"),
    *(Column(kind, is_number=True) for kind in KINDS),
    Column("values", is_number=True),
)
#: Lines of differences that a person is shown; `--json` has all.
_SHOWN = 40
_SIGNS = {"changed": "~", "reshaped": "~", "moved": ">", "added": "+", "removed": "-"}


def diff(
    before: Annotated[str, typer.Argument(metavar="REF", help="The first checkpoint.")],
    after: Annotated[str, typer.Argument(metavar="REF", help="The second one.")],
    registry: options.Registry,
    *,
    values: Annotated[
        bool, typer.Option("--values", help="Read changed tensors and tell how far they moved.")
    ] = False,
    json: options.Json = False,
) -> None:
    """Compare two checkpoints, without reading data unless --values is given."""
    with open(registry, read_only=True) as opened:
        old, new = opened.checkpoint(before), opened.checkpoint(after)
        found = compare(old, new, values=values)
    if json:
        output.document(_diff_json(old, new, found, values=values))
    elif found.is_same:
        output.line(f"the same state: {new.digest.short}")
    else:
        _print_diff(found)


def _print_diff(found: Diff) -> None:
    output.table(
        _DIFF,
        [
            (part.name, part.kind, *(part.tensors.get(kind, 0) for kind in KINDS), part.values)
            for part in found.components
        ],
    )
    lines = [_tensor_line(tensor) for tensor in found.tensors if tensor.kind != "same"]
    lines += [_value_line(value) for value in found.values]
    if lines:
        output.line()
    for text in lines[:_SHOWN]:
        output.line(text)
    if len(lines) > _SHOWN:
        output.line(f"... and {len(lines) - _SHOWN:,} more; --json lists all")


def _tensor_line(tensor: TensorDiff) -> str:
    old, new = tensor.before, tensor.after
    told = ""
    if tensor.kind == "reshaped" and old and new:
        told = f": {_form(old)} -> {_form(new)}"
    elif tensor.kind == "moved" and old:
        told = f": was {old.path}"
    moved = f"  {_distance(tensor.distance)}" if tensor.distance else ""
    return f"{_SIGNS[tensor.kind]} {tensor.path}{told}  {output.size(tensor.nbytes)}{moved}"


def _form(tensor: TensorInfo) -> str:
    before = "" if tensor.original is None else f" of {tensor.original}"
    return f"{tensor.dtype}{list(tensor.shape)}{before}"


def _distance(found: Distance) -> str:
    parts = [
        f"norm {output.number(found.norm)}",
        f"relative {output.number(found.relative)}",
        f"max {output.number(found.max)}",
        f"{share(found.changed_share)} changed",
    ]
    if found.nonfinite:
        parts.append(f"{found.nonfinite:,} NOT FINITE")
    return ", ".join(parts)


def _value_line(value: ValueDiff) -> str:
    told = quoted(value.after if value.kind == "added" else value.before)
    if value.kind == "changed":
        told = f"{quoted(value.before)} -> {quoted(value.after)}"
    return f"{_SIGNS[value.kind]} {value.path}: {told}"


def _diff_json(old: Checkpoint, new: Checkpoint, found: Diff, *, values: bool) -> dict[str, Any]:
    return {
        "before": {"ref": old.ref, "id": old.digest},
        "after": {"ref": new.ref, "id": new.digest},
        "same": found.is_same,
        "components": [
            {
                "name": part.name,
                "kind": part.kind,
                "tensors": {kind: part.tensors.get(kind, 0) for kind in KINDS},
                "size_bytes": {kind: part.nbytes.get(kind, 0) for kind in KINDS},
                "values": part.values,
            }
            for part in found.components
        ],
        "tensors": [
            {
                "kind": tensor.kind,
                "path": tensor.path,
                "before": tensor.before and describe.tensor_json(tensor.before),
                "after": tensor.after and describe.tensor_json(tensor.after),
                **({"distance": _distance_json(tensor.distance)} if values else {}),
            }
            for tensor in found.tensors
            if tensor.kind != "same"
        ],
        "values": [
            {
                "kind": value.kind,
                "path": value.path,
                "before": json_ready(value.before),
                "after": json_ready(value.after),
            }
            for value in found.values
        ],
    }


def _distance_json(found: Distance | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {
        "norm": found.norm,
        "relative": found.relative,
        "max": found.max,
        "elements": found.count,
        "changed": found.changed,
        "changed_share": found.changed_share,
        "nonfinite": found.nonfinite,
    }
