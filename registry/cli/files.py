"""`push`, `pull` and `file`: files as checkpoints, and checkpoints as files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import typer

from holdfast.backends.escape import shown
from holdfast.registry import formats, layouts
from holdfast.registry.cli import completing, describe, folders, options, output
from holdfast.registry.cli.columns import Column, Table
from holdfast.registry.cli.command import Answer, answer_of, command
from holdfast.registry.cli.describe import picked
from holdfast.registry.cli.folders import LAYOUTS
from holdfast.registry.cli.opening import moves
from holdfast.registry.cli.options import argument, flag, option
from holdfast.registry.cli.output import Bar, Note, Part
from holdfast.registry.cli.streams import read_entries
from holdfast.registry.errors import InvalidInput, NotFound
from holdfast.registry.face import Registry, Run
from holdfast.registry.formats import (
    GENERIC_EXTENSIONS,
    GENERIC_NAMES,
    MAIN_EXTENSIONS,
    OF_SYSTEMS,
    OPAQUE_FORMAT,
    TREE,
    by_extension,
    limited,
    named,
    thalia,
)
from holdfast.registry.layouts import hub_folder
from holdfast.registry.loading import Checkpoint
from holdfast.registry.upkeep import damaged_keys
from holdfast.registry.writing import Storing

#: The exit status of a check of a file whose format nobody knows.
_UNKNOWN = 9
_TENSORS = (Column("tensor", "path"), Column("dtype", drop=1), Column("shape"))
FORMAT = option(
    "--format",
    "NAME",
    f"Its format: {GENERIC_NAMES}, or one of those below. By default the content tells it.",
)
#: The end of the help of each command that takes files.
SYSTEMS = f"Formats of single systems: {OF_SYSTEMS}; layouts: {folders.OF_SYSTEMS}."
#: Printed if a file or a folder was stored unread, by format.
_UNREAD = {
    OPAQUE_FORMAT.name: "stored as an opaque file; nothing in it was read",
    TREE.name: "stored as a folder of files; nothing in them was read. A file of a state is "
    "pushed by its own name",
}


@command(moves, bar="pushing", epilog=SYSTEMS, metrics=True)
def push(
    opened: Registry,
    *,
    file: Path = argument(
        "FILE",
        f"The file or folder to store; {GENERIC_EXTENSIONS} are taken apart, and so are the "
        "formats below. Other files are stored unread.",
    ),
    run: str | None = argument(
        "RUN",
        "Name of a run; with --layout by default that of the folder.",
        autocompletion=completing.RUNS,
        envvar="HOLDFAST_RUN",
        default=None,
    ),
    step: int | None = option("--step", "N", "Training step, update or epoch."),
    artifact: str | None = option(
        "--artifact", "NAME", "Store it beside the checkpoints instead, for ever, by this name."
    ),
    layout: str | None = option("--layout", "NAME", f"Take a folder into a run: {LAYOUTS}."),
    phase: str | None = options.PHASE,
    after: str | None = option(
        "--after",
        "STEP",
        "For a program that trains: fail if the newest checkpoint is not that of STEP; none: if "
        "there is one.",
    ),
    metric: list[str] | None = options.METRICS,
    stream: list[str] | None = option(
        "--stream", "NAME=FILE", "Entries of a stream, a line of JSON each; repeatable."
    ),
    meta: list[str] | None = option("--meta", "NAME=TEXT", "A text to store with it; repeatable."),
    format_name: str | None = FORMAT,
    precision: list[str] | None = option(
        "--precision",
        "[PATTERN=]POLICY",
        "bf16, fp16, auto, auto-fp16 or keep, for tensors whose paths match, or for all; "
        "repeatable: the first match counts.",
    ),
    allow_lossy_optimizer: bool = flag(
        "--allow-lossy-optimizer", "Let optimizer state lose precision too."
    ),
    max_bytes: int | None = options.MAX_BYTES,
    create: bool = options.CREATE,
    table: Path | None = option(
        "--table", "FILE", "With --layout: a JSON file with names and shapes of the parameters."
    ),
    dry_run: bool = flag("--dry-run", "With --layout: check everything, and commit nothing."),
    watch: bool = flag("--watch", "With --layout: take each file in once it is complete."),
    quiet: float | None = option(
        "--quiet",
        "TIME",
        "With --watch: how long a file must not change that cannot tell whether it is complete; "
        "10s by default.",
        parser=options.seconds,
    ),
) -> Answer:
    """Store a file or folder as a checkpoint, artifact or run.

    With `--format tree`, or if no format knows a folder, every file keeps its exact bytes;
    `show --files` shows them. With --layout every file of the folder that a training run of another
    system wrote becomes a checkpoint; a second push takes in only what is new. The exit status is 3
    if files are refused.
    """
    of_a_folder = {"table": table, "dry_run": dry_run, "watch": watch, "quiet": quiet}
    of_a_file = {"max_bytes": max_bytes, "format": format_name}
    of_a_checkpoint: dict[str, object] = {
        "step": step,
        "phase": phase,
        "after": after,
        "metric": metric,
        "stream": stream,
        "meta": meta,
        "precision": precision,
        "allow_lossy_optimizer": allow_lossy_optimizer,
    }
    if layout is not None:
        _refuse("--layout", {**of_a_checkpoint, **of_a_file, "artifact": artifact})
        quiet_s = (10.0 if quiet is None else quiet) if watch else None
        return folders.taken(opened, file, run, layout, table, dry_run=dry_run, quiet_s=quiet_s)
    _refuse("a push without --layout", of_a_folder)
    if run is None:
        raise typer.BadParameter("name the run")
    if artifact is not None:
        _refuse("--artifact", {**of_a_checkpoint, "create": create})
        return _push_artifact(opened.run(run), artifact, file, format_name, max_bytes)
    if step is None:
        raise typer.BadParameter("--step N is needed: the training step, update or epoch")
    metrics, texts = options.numbers(metric or ()), options.pairs(meta or ())
    entries = {name: Path(file) for name, file in options.pairs(stream or ()).items()}
    streams = {name: read_entries(path) for name, path in entries.items()}
    given = precision or []
    is_name = len(given) == 1 and "=" not in given[0]
    policies = options.pairs(one if "=" in one else f"*={one}" for one in given)
    found = formats.read(file, format=format_name, portable=True, max_bytes=max_bytes)
    try:
        into = opened.run(run, create=create)
    except NotFound as error:
        error.add_note("--create creates the run")
        raise
    # So that they are written again if this state has their content.
    into.handle.committer.writer.objects.suspect |= damaged_keys(opened.handle.store)
    known = into.manifest.count
    saved = into.exchange.push(
        found.state,
        step=step,
        after=_after(after),
        phase=phase,
        metrics=metrics,
        streams=streams,
        meta=texts or None,
        storing=Storing(
            precision=given[0] if is_name else policies, allow_lossy_optimizer=allow_lossy_optimizer
        ),
    )
    is_new = into.manifest.count > known
    shape = describe.checkpoint_json(into.handle.store, into.manifest, saved)
    how = "pushed" if is_new else "there already"
    text: list[Part] = [f"{how}: {describe.named(saved)}"]
    if shape["lossy"]:
        text.append(f"with less precision: {describe.lossy_text(shape['lossy'])}")
    if found.format in _UNREAD:
        text.append(_UNREAD[found.format])
    if not is_new and (metrics or texts):
        text.append(
            Note(f"metrics and meta were left as they are; see holdfast metric add {saved.ref}")
        )
    return Answer(lambda: {**shape, "format": found.format, "new": is_new}, lambda: text)


def _refuse(what: str, given: Mapping[str, object]) -> None:
    """Refuse options that the kind of a push or pull does not have."""
    for name, value in given.items():
        if value:
            raise typer.BadParameter(f"{what} excludes --{name.replace('_', '-')}")


def _push_artifact(
    run: Run, name: str, file: Path, format_name: str | None, max_bytes: int | None
) -> Answer:
    found = formats.read(file, format=format_name, portable=True, max_bytes=max_bytes)
    stored = run.pins.artifacts.set(name, found.state)
    pin = run.manifest.pin("artifact", name)
    assert pin is not None  # it was just set
    return answer_of(
        {**describe.pin_json(run, pin), "format": found.format},
        f"pushed: {describe.named(stored)}",
        *filter(None, [_UNREAD.get(found.format)]),
    )


def _after(text: str | None) -> int | Literal["none"] | None:
    if text is None:
        return None
    if text == "none":
        return "none"
    if not text.isdecimal():
        raise typer.BadParameter(f"--after {text!r} is neither a step nor none")
    return int(text)


@command(moves, bar="pulling", epilog=SYSTEMS)
def pull(
    opened: Registry,
    *,
    advance: Bar,
    ref: options.Ref,
    to: Path = option("--to", "PATH", f"The file to write: {MAIN_EXTENSIONS}.", default=...),
    only: list[str] | None = option(
        "--only",
        "COMPONENT",
        "Only this component; repeatable.",
        autocompletion=completing.COMPONENTS,
    ),
    format_name: str | None = option(
        "--format",
        "NAME",
        f"Its format: {GENERIC_NAMES}, or one of those below. By default the extension tells it.",
    ),
    force: bool = flag("--force", "Replace a file that exists."),
    layout: str | None = option(
        "--layout",
        "NAME",
        f"Write the run REF to the folder PATH: {LAYOUTS}; preset: that of its preset.",
    ),
    watch: bool = flag("--watch", "With --layout: follow the run until it is over."),
) -> Answer:
    """Write a checkpoint or another state to a file, or a run to a folder.

    The extension decides the format; an opaque file can be written under any name. Every byte is
    verified. The file appears complete, or not at all. With --layout a second pull brings the
    folder up to date, and removes what the run has no longer. Files that no pull has made, or that
    were changed, are left alone; the exit status is then 5.
    """
    if layout is not None:
        _refuse("--layout", {"only": only, "format": format_name, "force": force})
        return folders.written(opened.run(ref), to, layout, watch=watch)
    _refuse("a pull without --layout", {"watch": watch})
    if str(to) == "-":
        raise InvalidInput(
            "a checkpoint is written to a file, not to a pipe",
            where="--to -",
            expected="the path of a file",
        )
    stored = opened.stored(ref)
    advance.expect(
        lambda: stored.handle.reader.stored_bytes(
            tensor
            for name, part in stored.manifest.components.items()
            if not only or name in only
            for tensor in part.tensors
        )
    )
    if format_name == "hf" and not only and hub_folder.is_model(stored):
        hub_folder.export(stored, to)
        size = sum(file.stat().st_size for file in to.iterdir())
        written = formats.WrittenFile(to, format_name, size)
    else:
        state: object = stored
        if format_name == "cobre" and isinstance(stored, Checkpoint) and not only:
            state = layouts.policy_of(stored)
        written = formats.write(to, state, format=format_name, only=only or None, force=force)
    lossy = describe.lossy_text(describe.lossy_json(stored))
    return Answer(
        lambda: {
            "ref": stored.ref,
            "id": stored.digest,
            "path": str(written.path),
            **picked(written, "format size_bytes"),
        },
        lambda: [
            f"pulled: {stored.ref}  {stored.digest.short}  {output.size(written.size_bytes)} to "
            f"{written.path}"
        ],
        notes=[f"saved with less precision: {lossy}"] if lossy else (),
    )


@command(table=True, epilog=SYSTEMS)
def inspect(
    *,
    file: Path = argument("FILE", "The file."),
    format_name: str | None = FORMAT,
    max_bytes: int | None = options.MAX_BYTES,
) -> Answer:
    """Describe a file without reading the data of its tensors.

    No registry is needed.
    """
    report = formats.inspect(file, format=format_name, max_bytes=max_bytes)
    tensors = [
        {"path": path, "dtype": one.dtype, "shape": list(one.shape)}
        for path, one in report.tensors.items()
    ]
    head = {"format": report.format, "size": output.size(report.size_bytes)}
    about = {
        f"{kind}.{shown(key)}": value
        for kind, values in (("header", report.header), ("metadata", report.metadata))
        for key, value in (values or {}).items()
    }
    return answer_of(
        {**picked(report, "format size_bytes header metadata"), "tensors": tensors},
        {**head, **about},
        "",
        Table(_TENSORS, tensors),
    )


@command(epilog=SYSTEMS)
def validate(
    *,
    file: Path = argument("FILE", "The file."),
    format_name: str | None = FORMAT,
    max_bytes: int | None = options.MAX_BYTES,
) -> Answer:
    """Check a file, and list its problems.

    No registry is needed. The exit status is 3 if there are problems, and 9 if the format of the
    file is unknown, so that nothing could be checked.
    """
    problems = formats.validate(file, format=format_name, max_bytes=max_bytes)
    if problems:
        rows = {"ok": False, "problems": problems, "format": None}
        return Answer(lambda: rows, lambda: problems, status=InvalidInput.exit_code)
    report = formats.inspect(file, format=format_name, max_bytes=max_bytes)
    found, count = named(report.format), len(report.tensors)
    known = format_name is not None or found not in (OPAQUE_FORMAT, TREE)
    parts = f"{count} {'file' if found == TREE else 'array'}{'s' * (count != 1)}"
    text = f"ok: {found.name}, {parts}, {found.checked}"
    return Answer(
        lambda: {"ok": known or None, "problems": [], "format": found.name if known else None},
        lambda: [text if known else "unknown: no format knows it, so nothing was checked"],
        status=0 if known else _UNKNOWN,
    )


@command(epilog=f"{SYSTEMS} --level, --precision and --to-version are for thalia.")
def convert(
    *,
    file: Path = argument("FILE", "The file or folder to read."),
    to: Path = argument("TO", f"The file to write: {MAIN_EXTENSIONS}."),
    read_as: str | None = option("--read-as", "NAME", "The format of FILE, as for push."),
    format_name: str | None = option("--format", "NAME", "The format of TO, as for pull."),
    level: int | None = option(
        "--level", "N", "Level of the compression: 1 to 22 for zstd, 1 to 12 for lz4."
    ),
    precision: str | None = option("--precision", "NAME", "fp32, fp16 or mixed."),
    version: str | None = option("--to-version", "X.Y", "The version to write: 0.1 or 0.2."),
    max_bytes: int | None = options.MAX_BYTES,
    force: bool = flag("--force", "Replace a file that exists."),
) -> Answer:
    """Write a file again, in another format or form.

    No registry is needed. Tensors and values stay as they are, unless --precision or --to-version
    says otherwise. The file appears complete, or not at all.
    """
    if version is None and level is None and precision is None:
        found = formats.read(file, format=read_as, portable=True, max_bytes=max_bytes)
        written = formats.write(to, found.state, format=format_name, force=force)
    elif by_extension(to) != named("thalia"):
        raise InvalidInput(
            "--level, --precision and --to-version are for files of Thalia",
            where=to,
            expected=", ".join(named("thalia").extensions),
        )
    elif version is None:
        with limited(max_bytes):
            state = formats.read(file, format=read_as, portable=True).state
            written = thalia.save(to, state, level=level, precision=precision, force=force)
    elif any(one is not None for one in (level, precision, read_as)):
        raise InvalidInput(
            "--to-version excludes --level, --precision and --read-as",
            hint="Convert the file twice.",
        )
    else:
        with limited(max_bytes):
            written = thalia.migrate(file, to, version, force=force)
    size = output.size(written.size_bytes)
    return answer_of(
        {"path": str(written.path), **picked(written, "format size_bytes")},
        f"wrote: {written.path}  {written.format}  {size}",
    )
