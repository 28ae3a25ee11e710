"""`ls`, `show` and `metric add`: look at checkpoints, and add metrics to them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from holdfast.backends.escape import shown
from holdfast.registry import formats
from holdfast.registry.cli import describe, options, output
from holdfast.registry.cli.columns import Column, Table, numbers, row
from holdfast.registry.cli.command import Answer, command
from holdfast.registry.cli.failures import mark
from holdfast.registry.cli.listing import Listing
from holdfast.registry.cli.opening import reads, writes
from holdfast.registry.cli.options import argument, flag
from holdfast.registry.cli.output import Note, Part
from holdfast.registry.history.replay import CheckpointRecord, RunManifest
from holdfast.registry.loading.checkpoint import Checkpoint
from holdfast.registry.loading.stored import Stored
from holdfast.registry.merging.merge import MERGE
from holdfast.registry.names.marks import checkpoint_marks
from holdfast.registry.registry import Registry
from holdfast.registry.runs.run import Run

_LS = (
    Column("phase", "record.phase"),
    *numbers("step=record.step"),
    Column("id", "record.manifest.short"),
    *numbers("size=record.size_bytes", text=output.size),
    Column("metrics", "record.metrics", output.metrics, folds=True),
    *numbers("age=record.time_ms", text=output.age),
    Column("marks", text=", ".join, folds=True),
)
#: The row of a run that cannot be read.
_DAMAGED_ROW = ("-", "-", "-", "-", "", "-")
_COMPONENTS = (
    Column("component", "name", folds=True),
    Column("digest", "digest.short"),
    *numbers("tensors"),
    *numbers("size=size_bytes", text=output.size),
)
_TENSORS = (
    Column("tensor", "path", folds=True),
    Column("dtype", lambda info: _dtype(info)),
    Column("shape"),
    *numbers("size=size_bytes", text=output.size),
)


@command(reads)
def ls(
    opened: Registry,
    *,
    run: str | None = argument(
        "RUN", "Only checkpoints of this run.", envvar="HOLDFAST_RUN", default=None
    ),
    evicted: bool = flag("--evicted", "Also evicted checkpoints."),
) -> Answer:
    """List checkpoints, newest last."""
    if run is not None:
        found = opened.run(run)
        return Answer(
            lambda: _records(found, evicted=evicted), lambda: _list_one(found, evicted=evicted)
        )
    listing = Listing(opened)
    runs = listing.runs()

    def document() -> list[dict[str, Any]]:
        described = listing.described(runs, lambda run: _records(run, evicted=evicted))
        return [shape for shapes in described.values() for shape in shapes]

    return Answer(
        document, lambda: _list_all(listing, runs, evicted=evicted), damaged=listing.damaged
    )


def _list_one(run: Run, *, evicted: bool) -> Iterator[Part]:
    rows = _rows(run, evicted=evicted)
    if rows:
        yield Table(_LS, rows)
    yield from _note_evicted([run], len(rows))


def _list_all(listing: Listing, runs: Sequence[Run], *, evicted: bool) -> Iterator[Part]:
    rows = listing.described(runs, lambda run: _rows(run, evicted=evicted))
    shown = sum(map(len, rows.values()))
    damaged = {name: [(*_DAMAGED_ROW, mark(error))] for name, error in listing.damaged.items()}
    yield from _tables({**rows, **damaged})
    yield from _note_evicted([run for run in runs if run.id in rows], shown, none=not damaged)


def _note_evicted(runs: Sequence[Run], shown: int, *, none: bool = True) -> Iterator[Part]:
    """Say that there are no checkpoints, and how many are not shown."""
    evicted = sum(run.manifest.count for run in runs) - shown
    if not shown and none:
        yield Note("no checkpoints" if evicted else "no checkpoints yet")
    if evicted:
        count = output.counted(evicted, "evicted checkpoint")
        yield Note(f"{count} not shown; --evicted shows them")


def _tables(rows: Mapping[str, Sequence[tuple[object, ...]]]) -> Iterator[Part]:
    """Return the checkpoints of several runs; a terminal is too narrow for one more column."""
    listed = [(name, rows[name]) for name in sorted(rows) if rows[name]]
    if not output.is_terminal():
        if listed:
            of_all = [(name, *row) for name, of_run in listed for row in of_run]
            yield Table((Column("run"), *_LS), of_all)
        return
    for index, (name, of_run) in enumerate(listed):
        yield f"\n{name}" if index else name
        yield Table(_LS, of_run)


def _listed(
    run: Run, *, evicted: bool
) -> tuple[RunManifest, list[tuple[CheckpointRecord, list[str]]]]:
    """Return the manifest of a run, and the records to list with their marks."""
    manifest = run.full_manifest() if evicted else run.manifest
    marks, is_dropped = checkpoint_marks(manifest), manifest.dropped is not None
    return manifest, [
        (record, marks.get(record.n, []))
        for record in manifest.checkpoints
        if evicted or not (is_dropped or record.evicted is not None)
    ]


def _records(run: Run, *, evicted: bool) -> list[dict[str, Any]]:
    manifest, records = _listed(run, evicted=evicted)
    return [describe.record_json(manifest.run_id, *record) for record in records]


def _rows(run: Run, *, evicted: bool) -> list[tuple[object, ...]]:
    records = _listed(run, evicted=evicted)[1]
    return [row(_LS, {"record": record, "marks": marks}) for record, marks in records]


@command(reads)
def show(
    opened: Registry, *, ref: options.Ref, tensors: bool = flag("--tensors", "List every tensor.")
) -> Answer:
    """Show a checkpoint, release, artifact or pool entry.

    Its components are listed below it.
    """
    stored = opened.stored(ref)
    shape = _shape(opened.run(stored.run_id), stored)
    if tensors:
        shape["tensors"] = [describe.tensor_json(info) for info in stored.tensors().values()]
    return Answer(lambda: shape, lambda: _print_stored(stored, shape))


def _shape(run: Run, stored: Stored) -> dict[str, Any]:
    if isinstance(stored, Checkpoint):
        shape = describe.checkpoint_json(run, stored)
    else:
        shape = _stored_json(run, stored)
    # It asks for the manifest alone, which every stored state has.
    return {**shape, "file": formats.opaque_name(stored)}


def _stored_json(run: Run, stored: Stored) -> dict[str, Any]:
    """Return a stored state that is no checkpoint, with its components."""
    return {
        "ref": stored.ref,
        "id": stored.digest,
        "run": run.id,
        **_origin(run, stored.ref.removeprefix(f"{run.id}/")),
        "size_bytes": stored.size_bytes,
        "components": describe.components_json(stored),
        "lossy": describe.lossy_json(stored),
    }


def _origin(run: Run, path: str) -> dict[str, Any]:
    """Return the record that a run has of a stored state under this path."""
    manifest, parts = run.manifest, path.split("/")
    match parts:
        case ["releases" | "artifacts" as kinds, name]:
            pin = manifest.pin(kinds[:-1], name)
            assert pin is not None  # it was found by that name
            origin = {"created": describe.iso(pin.time_ms), "metrics": pin.metrics}
            return {"kind": pin.kind, **origin, "source": describe.source(run, pin.checkpoint)}
        case ["pool", version]:
            (entry,) = (one for one in manifest.pool if one.version == int(version[1:]))
            ratings = {"mu": entry.mu, "sigma": entry.sigma}
            origin = {"created": describe.iso(entry.time_ms), "metrics": ratings}
            return {"kind": "pool", **origin, "source": describe.source(run, entry.checkpoint)}
    # A companion's path begins with the id of its checkpoint.
    beside = f"{run.id}/{parts[0]}"
    return {"kind": "companion", "created": None, "metrics": {}, "source": beside}


def _print_stored(stored: Stored, shape: dict[str, Any]) -> Iterator[Part]:
    created = shape["created"] and output.date(describe.time_ms_of(shape["created"]))
    size = output.size(shape["size_bytes"])
    head: dict[str, object] = {"ref": shape["ref"], "id": shape["id"].hex()}
    metrics = {"metrics": output.metrics(shape["metrics"])}
    file = {"file": shape["file"] and f"{shape['file']} (opaque: stored byte for byte, not read)"}
    lossy = {"size": size, "lossy": describe.lossy_text(shape["lossy"])}
    if isinstance(stored, Checkpoint):
        head["created"] = output.date(stored.record.time_ms)
        marks = {name: ", ".join(shape[name]) for name in ("marks", "nonfinite")}
        yield {**head, **lossy, **marks, **metrics, **file, **_meta(shape["meta"])}
    else:
        head |= {"kind": shape["kind"], "created": created, "source": shape["source"]}
        yield {**head, **lossy, **metrics, **file}
    yield ""
    yield Table(_COMPONENTS, shape["components"])
    if "tensors" in shape:
        yield ""
        yield Table(_TENSORS, shape["tensors"])


def _meta(meta: object) -> dict[str, object]:
    """Return the meta of a checkpoint by the names under which people are shown it."""
    if not isinstance(meta, dict):
        return {"meta": meta}
    fields: dict[str, object] = {}
    for key, value in meta.items():
        fields |= (key == MERGE and _merged(value)) or {f"meta.{shown(key)}": value}
    return fields


def _merged(merge: Any) -> dict[str, object] | None:
    """Return the sources of a merge; None if this is not the record of a merge."""
    try:
        sources = [one["ref"] for one in merge["sources"]]
        if "weights" in merge:
            pairs = zip(sources, merge["weights"], strict=True)
            sources = [f"{ref} (weight {weight})" for ref, weight in pairs]
        picks = [f"{name} from {one['ref']}" for name, one in merge.get("pick", {}).items()]
        fields = {"sources": sources, "average": merge.get("average", []), "pick": picks}
        return {f"meta.{MERGE}.{name}": ", ".join(some) for name, some in fields.items()}
    except (TypeError, KeyError, ValueError, AttributeError):
        return None


def _dtype(info: dict[str, Any]) -> str:
    was = info["original"]
    return info["dtype"] if was is None else f"{info['dtype']} (was {was}, lossy)"


@command(writes)
def add_metric(
    opened: Registry,
    *,
    ref: options.Ref,
    metric: list[str] = argument("NAME=NUMBER", "The metrics."),
) -> str:
    """Add metrics, or replace their values."""
    metrics = options.numbers(metric)
    checkpoint = opened.checkpoint(ref)
    checkpoint.report(metrics)
    return f"{checkpoint.ref}: {output.metrics(checkpoint.metrics)}"
