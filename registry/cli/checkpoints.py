"""`ls`, `show`, `diff`, `metric add` and `tag`: checkpoints looked at and annotated."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from registry import formats
from registry.checkpoint import Checkpoint
from registry.cli import describe, options, output
from registry.cli.output import Column
from registry.diff import KINDS, Diff, TensorDiff
from registry.diff import diff as compare
from registry.plain import json_ready
from registry.registry import Registry, open  # noqa: A004
from registry.run import Run

metric_app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Metrics of checkpoints."
)

_LS = (
    Column("phase"),
    Column("step", is_number=True),
    Column("id"),
    Column("size", is_number=True),
    Column("metrics", folds=True),
    Column("age", is_number=True),
    Column("marks", folds=True),
)
_COMPONENTS = (
    Column("component", folds=True),
    Column("digest"),
    Column("tensors", is_number=True),
    Column("size", is_number=True),
)
_TENSORS = (
    Column("tensor", folds=True),
    Column("dtype"),
    Column("shape"),
    Column("size", is_number=True),
)
_DIFF = (
    Column("component", folds=True),
    Column("is"),
    *(Column(kind, is_number=True) for kind in KINDS),
    Column("values", is_number=True),
)
#: Lines of differences that a person is shown; `--json` has all.
_SHOWN = 40
_SIGNS = {"changed": "~", "reshaped": "~", "moved": ">", "added": "+", "removed": "-"}


def ls(
    registry: options.Registry,
    run: Annotated[
        str | None,
        typer.Argument(envvar="HOLDFAST_RUN", metavar="RUN", help="Only this run's."),
    ] = None,
    *,
    json: options.Json = False,
) -> None:
    """List checkpoints, newest last."""
    with open(registry, read_only=True) as opened:
        names = opened.runs() if run is None else [run]
        runs = [opened.run(name) for name in names]
    if json:
        output.document([shape for of in runs for shape in _shapes(of)])
        return
    if not any(of.manifest.checkpoints for of in runs):
        output.note("no checkpoints yet")
    elif run is not None:
        output.table(_LS, _rows(runs[0]))
    else:
        _print_all(runs)


def _print_all(runs: list[Run]) -> None:
    """Print the checkpoints of several runs; a terminal is too narrow for one more column."""
    if not output.is_terminal():
        rows = [(run.id, *row) for run in runs for row in _rows(run)]
        output.table((Column("run"), *_LS), rows)
        return
    for index, run in enumerate(run for run in runs if run.manifest.checkpoints):
        output.line(f"\n{run.id}" if index else run.id)
        output.table(_LS, _rows(run))


def _shapes(run: Run) -> list[dict[str, Any]]:
    marks = describe.marks(run.manifest)
    return [
        describe.record_json(run.id, record, marks.get(record.n, []))
        for record in run.manifest.checkpoints
    ]


def _rows(run: Run) -> list[tuple[object, ...]]:
    marks = describe.marks(run.manifest)
    return [
        (
            record.phase,
            record.step,
            record.manifest.short,
            output.size(record.size_bytes),
            output.metrics(record.metrics),
            output.age(describe.when(record.time_ms)),
            " ".join(marks.get(record.n, [])),
        )
        for record in run.manifest.checkpoints
    ]


def show(
    ref: options.Ref,
    registry: options.Registry,
    *,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    json: options.Json = False,
) -> None:
    """Show a checkpoint and its components."""
    with open(registry, read_only=True) as opened:
        checkpoint = opened.checkpoint(ref)
        run = opened.run(checkpoint.run_id)
        pointed = describe.marks(run.manifest).get(checkpoint.record.n, [])
        shape = describe.checkpoint_json(checkpoint, pointed)
        shape["file"] = formats.opaque_name(checkpoint)
        if tensors:
            shape["tensors"] = [_tensor_json(info) for info in checkpoint.tensors().values()]
    if json:
        output.document(shape)
    else:
        _print_checkpoint(checkpoint, shape)


def _tensor_json(info: Any) -> dict[str, Any]:
    return {
        "path": info.path,
        "dtype": info.dtype,
        "shape": list(info.shape),
        "size_bytes": info.nbytes,
        "content": info.content,
    }


def _print_checkpoint(checkpoint: Checkpoint, shape: dict[str, Any]) -> None:
    meta = shape["meta"]
    output.fields(
        {
            "ref": shape["ref"],
            "id": shape["id"].hex(),
            "created": f"{output.time(checkpoint.created)} ({output.age(checkpoint.created)})",
            "size": output.size(shape["size_bytes"]),
            "marks": " ".join(shape["marks"]),
            "metrics": output.metrics(shape["metrics"]),
            "file": shape["file"] and f"{shape['file']} (opaque: kept byte for byte, not read)",
            "meta": "" if meta is None or isinstance(meta, dict) else meta,
            **({f"meta.{key}": value for key, value in meta.items()} if _is_dict(meta) else {}),
        }
    )
    output.line()
    parts = shape["components"]
    rows = [
        (part["name"], part["digest"].short, part["tensors"], output.size(part["size_bytes"]))
        for part in parts
    ]
    output.table(_COMPONENTS, rows)
    if "tensors" in shape:
        output.line()
        output.table(
            _TENSORS,
            [
                (info["path"], info["dtype"], info["shape"], output.size(info["size_bytes"]))
                for info in shape["tensors"]
            ],
        )


def _is_dict(value: object) -> bool:
    return isinstance(value, dict)


def diff(
    before: Annotated[str, typer.Argument(metavar="REF", help="The first checkpoint.")],
    after: Annotated[str, typer.Argument(metavar="REF", help="The second one.")],
    registry: options.Registry,
    *,
    json: options.Json = False,
) -> None:
    """Compare two checkpoints without reading data."""
    with open(registry, read_only=True) as opened:
        old, new = opened.checkpoint(before), opened.checkpoint(after)
        found = compare(old, new)
    if json:
        output.document(_diff_json(old, new, found))
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
    for value in found.values:
        told = f"{value.before!r} -> {value.after!r}" if value.kind == "changed" else ""
        shown = repr(value.after if value.kind == "added" else value.before)
        lines.append(f"{_SIGNS[value.kind]} {value.path}: {told or shown}")
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
        told = f": {old.dtype}{list(old.shape)} -> {new.dtype}{list(new.shape)}"
    elif tensor.kind == "moved" and old:
        told = f": was {old.path}"
    return f"{_SIGNS[tensor.kind]} {tensor.path}{told}  {output.size(tensor.nbytes)}"


def _diff_json(old: Checkpoint, new: Checkpoint, found: Diff) -> dict[str, Any]:
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
                "before": tensor.before and _tensor_json(tensor.before),
                "after": tensor.after and _tensor_json(tensor.after),
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


@metric_app.command("add")
def add_metric(
    ref: options.Ref,
    metric: Annotated[list[str], typer.Argument(metavar="NAME=NUMBER", help="The metrics.")],
    registry: options.Registry,
) -> None:
    """Add metrics, or replace their values."""
    metrics = options.numbers(metric)
    with open(registry) as opened:
        checkpoint = opened.checkpoint(ref)
        checkpoint.report(metrics)
        output.line(f"{checkpoint.ref}: {output.metrics(checkpoint.metrics)}")


def tag(
    ref: options.Ref,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The tag; it moves if it exists.")],
    registry: options.Registry,
) -> None:
    """Point a name at a checkpoint.

    RUN/tags/NAME then finds it. The name moves where it exists.
    """
    with open(registry) as opened:
        checkpoint = opened.checkpoint(ref)
        _run_of(opened, checkpoint).tag(name, checkpoint)
        output.line(f"{checkpoint.run_id}/tags/{name} -> {checkpoint.ref}")


def _run_of(opened: Registry, checkpoint: Checkpoint) -> Run:
    return opened.run(checkpoint.run_id)
