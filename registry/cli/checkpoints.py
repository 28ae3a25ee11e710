"""`ls` and `show`: the checkpoints of runs, and what else a run holds.

What only some calls need is imported by them: each command waits for its imports.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import typer

from holdfast.backends.escape import shown
from holdfast.registry.cli import completing, describe, options, output
from holdfast.registry.cli.columns import Column, Table, metrics, numbers
from holdfast.registry.cli.command import Answer, command
from holdfast.registry.cli.failures import mark
from holdfast.registry.cli.listing import Listing, log_of, sparkline, there
from holdfast.registry.cli.opening import DASK, reads
from holdfast.registry.cli.options import argument, flag
from holdfast.registry.cli.output import Note, Part
from holdfast.registry.curation import checkpoint_marks
from holdfast.registry.errors import InvalidInput, NotFound, RegistryError
from holdfast.registry.face import Registry, pull_command, python_lines
from holdfast.registry.history import MERGE, RunLog, merged_from
from holdfast.registry.history.replay import RunManifest
from holdfast.registry.loading import OPAQUE, Checkpoint, Stored
from holdfast.registry.upkeep import Damage

if TYPE_CHECKING:
    from holdfast.registry.face import Run

_COMPONENTS = (
    Column("component", "name"),
    Column("digest", text=describe.short, drop=1),
    *numbers("tensors", drop=2),
    *numbers("size=size_bytes", text=output.size),
)
_TENSORS = (
    Column("tensor", "path"),
    Column("dtype", "stored_as", drop=2),
    Column("shape", drop=3),
    *numbers("size=size_bytes", text=output.size, drop=1),
)
_LS = (
    Column("phase", none="-"),
    *numbers("step", none="-"),
    Column("id", text=describe.short, none="-", drop=6),
    *numbers("size=size_bytes", text=output.size, none="-", drop=7),
    metrics(drop=8),
    *numbers("age=created", text=describe.age, none="-", drop=5),
    Column("marks", text=", ".join, folds=True),
)
_TRENDS = (
    Column("run"),
    Column("metric"),
    Column("trend", text=sparkline, is_picture=True),
    *numbers("first", "last", text=output.number, drop=1),
)
#: The most trends below a list of checkpoints.
_MOST_TRENDS = 12


@command(reads, table=True)
def ls(
    opened: Registry,
    *,
    run: str | None = argument(
        "RUN[/KIND]",
        "Only this run, or runs by a pattern; or its KIND: pins (tags, gates, releases and "
        "artifacts), one of these four, pool or streams; '*/best': the best of each run.",
        envvar="HOLDFAST_RUN",
        autocompletion=completing.RUNS,
        default=None,
    ),
    evicted: bool = flag("--evicted", "Also evicted checkpoints, or entries of the pool."),
    names: bool = flag("--names", "The latest release, tags and labels: who set them, and when."),
) -> Answer:
    """List checkpoints, newest last, or what else a run holds.

    With --names also of all runs: the latest release is what is in production.
    """
    listing = Listing(opened)
    if names:
        from holdfast.registry.cli import pins

        if run is not None and not options.is_pattern(run):
            return pins.named(listing, [opened.run(run)])
        return pins.named(listing, _read(listing, opened, run))
    if run is not None:
        run, slash, kind = run.partition("/")
        if kind == "best" and options.is_pattern(run):
            from holdfast.registry.cli.run_listing import bests

            return bests(opened, run)
        if slash and options.is_pattern(run):
            raise NotFound(
                "no list for a pattern of runs", where=kind, expected=f"{run}/best or {run}"
            )
        if slash:
            return _of_kind(opened.run(run), kind, evicted=evicted)
    if run is not None and not options.is_pattern(run):
        one = log_of(opened, run)
        return Answer(
            lambda: _records(opened, one, evicted=evicted),
            lambda: _text([one.run], {run: _records(opened, one, evicted=evicted)}, {}, _LS),
        )
    runs = _read(listing, opened, run)

    def described() -> dict[str, list[dict[str, Any]]]:
        return listing.described(
            runs, lambda run: _records(opened, run.handle.log, evicted=evicted)
        )

    return Answer(
        lambda: [record for records in described().values() for record in records],
        lambda: _text(
            [one.manifest for one in runs], described(), listing.damaged, (Column("run"), *_LS)
        ),
        damaged=listing.damaged,
    )


def _read(listing: Listing, opened: Registry, pattern: str | None) -> list[Run]:
    names = None if pattern is None else options.matching([pattern], opened.run_names)
    return listing.runs(names)


def _of_kind(run: Run, kind: str, *, evicted: bool) -> Answer:
    from holdfast.registry.cli import pins, pool, streams

    match kind:
        case "pool":
            return pool.listing(run, evicted=evicted)
        case "streams":
            return streams.listing(run)
        case "pins" | "tags" | "gates" | "releases" | "artifacts":
            return pins.listing(run, kind)
    raise NotFound(
        "a run has no such list",
        where=f"{run.id}/{kind}",
        expected=f"pins, {', '.join(pins.KINDS)}, pool or streams",
        hint=f"`holdfast show {run.id}/{kind}` shows a checkpoint or what a pin keeps."
        if kind
        else f"`holdfast ls {run.id}` lists its checkpoints.",
    )


def _records(opened: Registry, log: RunLog, *, evicted: bool) -> list[dict[str, Any]]:
    run, name = log.history() if evicted else log.run, log.run_id
    marks, is_dropped = checkpoint_marks(run), run.dropped is not None
    damage = Damage.of(opened.handle.store)
    return [
        describe.record_json(name, record, [*marks.get(record.n, []), *damage.marks(name, record)])
        for record in run.checkpoints
        if evicted or not (is_dropped or record.evicted is not None)
    ]


def _text(
    runs: Sequence[RunManifest],
    described: Mapping[str, list[dict[str, Any]]],
    damaged: Mapping[str, RegistryError],
    columns: Sequence[Column],
) -> Iterator[Part]:
    """Return the checkpoints of runs, their trends, and how many are not shown."""
    unreadable = {name: [{"run": name, "marks": [mark(error)]}] for name, error in damaged.items()}
    rows = [row for _, some in sorted({**described, **unreadable}.items()) for row in some]
    runs = [run for run in runs if run.run_id in described]
    monitored = {run.run_id: describe.monitored(run) for run in runs}
    hidden = sum(run.count for run in runs) - sum(map(len, described.values()))
    first = list(dict.fromkeys(name for names in monitored.values() for name in names))
    none = "no checkpoints" if hidden else "no checkpoints yet"
    yield Table(columns, rows, none=none, first=first)
    if output.is_terminal():
        yield from _trends(described, monitored)
    if hidden:
        count = output.counted(hidden, "evicted checkpoint")
        yield Note(f"{count} not shown; --evicted shows them")


def _trends(
    described: Mapping[str, list[dict[str, Any]]], monitored: Mapping[str, list[str]]
) -> Iterator[Part]:
    """Return how each metric of one run changed, or of several each metric that decides best."""
    is_one = len(described) == 1
    rows = []
    for run, records in described.items():
        names = dict.fromkeys(name for one in records for name in one["metrics"])
        for name in names if is_one else monitored[run]:
            values = there(one["metrics"].get(name) for one in records)
            if len(values) > 1:
                ends = {"first": values[0], "last": values[-1]}
                rows.append({"run": run, "metric": name, "trend": values, **ends})
    if rows:
        yield ""
        yield Table(_TRENDS[is_one:], rows[:_MOST_TRENDS], is_main=False)
        if len(rows) > _MOST_TRENDS:
            yield f"... and {len(rows) - _MOST_TRENDS:,} more"


@command(reads, table=True)
def show(
    opened: Registry,
    *,
    ref: options.Ref,
    patterns: list[str] | None = argument(
        "[PATTERN]...", "With --stats: only tensors whose paths match: 'model/*'.", default=None
    ),
    tensors: bool = flag("--tensors", "List every tensor."),
    stats: bool = flag("--stats", "Read the tensors: extremes, mean, norm, zeros and NaN."),
    files: bool = flag("--files", "List the files of a pushed folder, as sha256sum does."),
    dask: str | None = DASK,
) -> Answer:
    """Show a checkpoint, release, artifact or pool entry.

    Its components are listed below it, or the model card of a release, and how to get it. The text
    of --files can be given to `sha256sum -c` in a folder that `pull` has written.
    """
    stored = opened.stored(ref)
    if stats:
        from holdfast.registry.cli import comparing

        return comparing.stats(stored, patterns or (), dask)
    if patterns or dask:
        raise typer.BadParameter("a PATTERN and --dask are for --stats")
    if files:
        return _files(stored)
    shape = _shape(opened, stored)
    if tensors:
        shape["tensors"] = [describe.tensor_json(info) for info in stored.tensors().values()]
    return Answer(lambda: shape, lambda: _print_stored(stored, shape))


def _files(stored: Stored) -> Answer:
    found = stored.files()
    if not found:
        raise InvalidInput(
            "not a folder that was pushed",
            where=stored.ref,
            found=f"a state of {', '.join(stored.components)}",
            hint="`holdfast show` lists its tensors.",
        )
    return Answer(
        lambda: [
            {"name": name, **describe.picked(one, "size_bytes sha256 format executable")}
            for name, one in found.items()
        ],
        lambda: [f"{one.sha256}  {name}" for name, one in found.items()],
    )


def _shape(opened: Registry, stored: Stored) -> dict[str, Any]:
    if isinstance(stored, Checkpoint):
        handle = stored.handle
        shape = describe.checkpoint_json(handle.store, handle.log.run, stored)
    else:
        shape = _stored_json(opened.run(stored.run_id), stored)
    # It asks for the manifest alone, which every stored state has.
    how = {"pull": pull_command(opened.url, stored), "load": python_lines(opened.url, stored)}
    return {**shape, "file": _opaque_name(stored), **how}


def _opaque_name(stored: Stored) -> str | None:
    if OPAQUE not in stored.components:
        return None
    from holdfast.registry import formats

    return formats.opaque_name(stored)


def _stored_json(run: Run, stored: Stored) -> dict[str, Any]:
    """Return a stored state that is no checkpoint, with its components."""
    from holdfast.registry.curation import Release

    return {
        "ref": stored.ref,
        "id": stored.digest,
        "run": run.id,
        **_origin(run, stored.ref.removeprefix(f"{run.id}/")),
        "size_bytes": stored.size_bytes,
        "components": describe.components_json(stored),
        "lossy": describe.lossy_json(stored),
        "card": stored.card if isinstance(stored, Release) else {},
        "marks": ["latest"] * (isinstance(stored, Release) and stored.is_latest),
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
    values = {"metrics": output.metrics(shape["metrics"])}
    file = {"file": shape["file"] and f"{shape['file']} (opaque: stored byte for byte, not read)"}
    lossy = {"size": size, "lossy": describe.lossy_text(shape["lossy"])}
    if isinstance(stored, Checkpoint):
        head["created"] = output.date(stored.handle.newest_record().time_ms)
        marks = {name: ", ".join(shape[name]) for name in ("marks", "nonfinite")}
        yield {**head, **lossy, **marks, **values, **file, **_meta(shape["meta"])}
    else:
        head |= {"kind": shape["kind"], "created": created, "source": shape["source"]}
        yield {**head, **lossy, "marks": ", ".join(shape["marks"]), **values, **file}
        if shape["card"]:
            from holdfast.registry.curation import write_card

            yield f"\n{write_card(shape['card'])}".rstrip("\n")
    yield ""
    yield Table(_COMPONENTS, shape["components"], is_main="tensors" not in shape)
    if "tensors" in shape:
        yield ""
        yield Table(_TENSORS, [{**one, "stored_as": _dtype(one)} for one in shape["tensors"]])
    yield f"\nget it, as a file or in Python:\n\n{shape['pull']}\n\n{shape['load']}"


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
    sources = merged_from({MERGE: merge})
    if not sources:
        return None
    try:
        picks = [f"{name} from {one['ref']}" for name, one in merge.get("pick", {}).items()]
        fields = {"sources": sources, "average": merge.get("average", []), "pick": picks}
        return {f"meta.{MERGE}.{name}": ", ".join(some) for name, some in fields.items()}
    except (TypeError, KeyError, ValueError, AttributeError):
        return None


def _dtype(info: dict[str, Any]) -> str:
    was = info["original"]
    return info["dtype"] if was is None else f"{info['dtype']} (was {was}, lossy)"
