"""`ls`, `show`, `metric add` and `tag`: checkpoints looked at and annotated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, TypeVar

import typer

from registry import formats
from registry.checkpoint import Checkpoint
from registry.cli import describe, options, output
from registry.cli.columns import Column
from registry.cli.listing import Listing, mark
from registry.registry import Registry, open  # noqa: A004
from registry.run import Run
from registry.state import CheckpointRecord, RunManifest
from registry.stored import Stored

_T = TypeVar("_T")


_LS = (
    Column("phase"),
    Column("step", is_number=True),
    Column("id"),
    Column("size", is_number=True),
    Column("metrics", folds=True),
    Column("age", is_number=True),
    Column("marks", folds=True),
)
#: The row of a run that cannot be read.
_DAMAGED_ROW = ("-", "-", "-", "-", "", "-")
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
        if run is not None:
            _list_one(opened.run(run), evicted=evicted, json=json)
        else:
            _list_all(Listing(opened), evicted=evicted, json=json)


def _list_one(run: Run, *, evicted: bool, json: bool) -> None:
    manifest = _manifest(run, evicted=evicted)
    records = _listed(manifest, evicted=evicted)
    if json:
        output.document(_records(manifest, records))
        return
    if records:
        output.table(_LS, _rows(manifest, records))
    _note_gone([run], len(records))


def _list_all(listing: Listing, *, evicted: bool, json: bool) -> None:
    runs = listing.runs()
    if json:
        told = listing.told(runs, lambda run: _told(_records, run, evicted=evicted))
        output.document([shape for shapes in told.values() for shape in shapes])
    else:
        rows = listing.told(runs, lambda run: _told(_rows, run, evicted=evicted))
        shown = sum(map(len, rows.values()))
        damaged = listing.damaged.items()
        _print_all({**rows, **{name: [(*_DAMAGED_ROW, mark(error))] for name, error in damaged}})
        _note_gone([run for run in runs if run.id in rows], shown, none=not listing.damaged)
    listing.finish()


def _note_gone(runs: Sequence[Run], shown: int, *, none: bool = True) -> None:
    """Say that there are no checkpoints, and how many are not shown."""
    gone = sum(run.manifest.count for run in runs) - shown
    if not shown and none:
        output.note("no checkpoints" if gone else "no checkpoints yet")
    if gone:
        output.note(f"{output.counted(gone, 'evicted checkpoint')} not shown; --evicted shows them")


def _manifest(run: Run, *, evicted: bool) -> RunManifest:
    return run.full_manifest() if evicted else run.manifest


def _told(
    tell: Callable[[RunManifest, list[CheckpointRecord]], list[_T]], run: Run, *, evicted: bool
) -> list[_T]:
    manifest = _manifest(run, evicted=evicted)
    return tell(manifest, _listed(manifest, evicted=evicted))


def _listed(manifest: RunManifest, *, evicted: bool) -> list[CheckpointRecord]:
    gone = manifest.dropped is not None
    return [
        record
        for record in manifest.checkpoints
        if evicted or not (gone or record.evicted is not None)
    ]


def _print_all(told: Mapping[str, Sequence[Sequence[object]]]) -> None:
    """Print the checkpoints of several runs; a terminal is too narrow for one more column."""
    listed = [(name, told[name]) for name in sorted(told) if told[name]]
    if not output.is_terminal():
        rows = [(name, *row) for name, of_run in listed for row in of_run]
        if rows:
            output.table((Column("run"), *_LS), rows)
        return
    for index, (name, of_run) in enumerate(listed):
        output.line(f"\n{name}" if index else name)
        output.table(_LS, of_run)


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
            output.age(record.time_ms),
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
        "created": output.date(checkpoint.record.time_ms),
        "size": output.size(shape["size_bytes"]),
        "lossy": describe.lossy_text(shape["lossy"]),
        "marks": ", ".join(shape["marks"]),
        "nonfinite": ", ".join(checkpoint.record.nonfinite),
        "metrics": output.metrics(shape["metrics"]),
        "file": _opaque(shape),
        **describe.meta_fields(shape["meta"]),
    }


def _stored_fields(shape: dict[str, Any]) -> dict[str, object]:
    created = shape["created"] and output.date(describe.time_ms_of(shape["created"]))
    return {
        "ref": shape["ref"],
        "id": shape["id"].hex(),
        "kind": shape["kind"],
        "created": created,
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
