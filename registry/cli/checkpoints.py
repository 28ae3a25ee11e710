"""`ls`, `show`, `metric add` and `tag`: checkpoints looked at and annotated."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from registry import formats
from registry.checkpoint import Checkpoint
from registry.cli import describe, options, output
from registry.cli.columns import Column
from registry.registry import Registry, open  # noqa: A004
from registry.run import Run
from registry.state import CheckpointRecord, RunManifest
from registry.stored import Stored

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


def ls(
    registry: options.Registry,
    run: Annotated[
        str | None,
        typer.Argument(envvar="HOLDFAST_RUN", metavar="RUN", help="Only this run's."),
    ] = None,
    *,
    evicted: Annotated[
        bool, typer.Option("--evicted", help="Also those that retention let go.")
    ] = False,
    json: options.Json = False,
) -> None:
    """List checkpoints, newest last."""
    with open(registry, read_only=True) as opened:
        runs = describe.all_runs(opened) if run is None else [opened.run(run)]
        manifests = [of.full_manifest() if evicted else of.manifest for of in runs]
    listed = [(of, _listed(of, evicted=evicted)) for of in manifests]
    gone = sum(of.count - len(records) for of, records in listed)
    if json:
        output.document([shape for of, records in listed for shape in _records(of, records)])
        return
    if not any(records for _, records in listed):
        output.note("no checkpoints" if gone else "no checkpoints yet")
    elif run is not None:
        output.table(_LS, _rows(*listed[0]))
    else:
        _print_all(listed)
    if gone:
        output.note(f"{output.counted(gone, 'evicted checkpoint')} not shown; --evicted shows them")


def _listed(manifest: RunManifest, *, evicted: bool) -> list[CheckpointRecord]:
    gone = manifest.dropped is not None
    return [
        record
        for record in manifest.checkpoints
        if evicted or not (gone or record.evicted is not None)
    ]


def _print_all(listed: list[tuple[RunManifest, list[CheckpointRecord]]]) -> None:
    """Print the checkpoints of several runs; a terminal is too narrow for one more column."""
    if not output.is_terminal():
        rows = [(run.run_id, *row) for run, records in listed for row in _rows(run, records)]
        output.table((Column("run"), *_LS), rows)
        return
    for index, (run, records) in enumerate(pair for pair in listed if pair[1]):
        output.line(f"\n{run.run_id}" if index else run.run_id)
        output.table(_LS, _rows(run, records))


def _records(run: RunManifest, records: list[CheckpointRecord]) -> list[dict[str, Any]]:
    marks = describe.marks(run)
    return [describe.record_json(run.run_id, record, marks.get(record.n, [])) for record in records]


def _rows(run: RunManifest, records: list[CheckpointRecord]) -> list[tuple[object, ...]]:
    marks = describe.marks(run)
    return [
        (
            record.phase,
            record.step,
            record.manifest.short,
            output.size(record.size_bytes),
            output.metrics(record.metrics),
            output.age(describe.when(record.time_ms)),
            ", ".join(marks.get(record.n, [])),
        )
        for record in records
    ]


def show(
    ref: options.Ref,
    registry: options.Registry,
    *,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    json: options.Json = False,
) -> None:
    """Show a checkpoint, a release, an artifact or an entry of a pool, and its components."""
    with open(registry, read_only=True) as opened:
        stored = opened.stored(ref)
        shape = _shape(opened.run(stored.run_id), stored)
        if tensors:
            shape["tensors"] = [describe.tensor_json(info) for info in stored.tensors().values()]
    if json:
        output.document(shape)
        return
    if isinstance(stored, Checkpoint):
        output.fields(_checkpoint_fields(stored, shape))
    else:
        output.fields(_stored_fields(shape))
    _print_parts(shape)


def _shape(run: Run, stored: Stored) -> dict[str, Any]:
    if isinstance(stored, Checkpoint):
        pointed = describe.marks(run.manifest).get(stored.n, [])
        shape = describe.checkpoint_json(stored, pointed)
    else:
        shape = describe.stored_json(run, stored)
    # It asks for the manifest alone, which every stored state has.
    return {**shape, "file": formats.opaque_name(stored)}  # type: ignore[arg-type]


def _checkpoint_fields(checkpoint: Checkpoint, shape: dict[str, Any]) -> dict[str, object]:
    return {
        "ref": shape["ref"],
        "id": shape["id"].hex(),
        "created": f"{output.time(checkpoint.created)} ({output.age(checkpoint.created)})",
        "size": output.size(shape["size_bytes"]),
        "lossy": describe.lossy_text(shape["lossy"]),
        "marks": ", ".join(shape["marks"]),
        "nonfinite": ", ".join(checkpoint.record.nonfinite),
        "metrics": output.metrics(shape["metrics"]),
        "file": _opaque(shape),
        **describe.meta_fields(shape["meta"]),
    }


def _stored_fields(shape: dict[str, Any]) -> dict[str, object]:
    created = shape["created"] and describe.parse(shape["created"])
    return {
        "ref": shape["ref"],
        "id": shape["id"].hex(),
        "kind": shape["kind"],
        "created": created and f"{output.time(created)} ({output.age(created)})",
        "source": shape["source"],
        "size": output.size(shape["size_bytes"]),
        "lossy": describe.lossy_text(shape["lossy"]),
        "metrics": output.metrics(shape["metrics"]),
        "file": _opaque(shape),
    }


def _opaque(shape: dict[str, Any]) -> str | None:
    return shape["file"] and f"{shape['file']} (opaque: kept byte for byte, not read)"


def _print_parts(shape: dict[str, Any]) -> None:
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
                (info["path"], _dtype(info), info["shape"], output.size(info["size_bytes"]))
                for info in shape["tensors"]
            ],
        )


def _dtype(info: dict[str, Any]) -> str:
    was = info["original"]
    return info["dtype"] if was is None else f"{info['dtype']} (was {was}, lossy)"


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
