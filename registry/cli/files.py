"""`push`, `pull`, `convert` and others: files as checkpoints, and checkpoints as files."""

from __future__ import annotations

from pathlib import Path

from holdfast.backends.escape import shown
from holdfast.registry import formats
from holdfast.registry.cli import describe, options, output
from holdfast.registry.cli.columns import Column, Table
from holdfast.registry.cli.command import Answer, answer_of, command
from holdfast.registry.cli.describe import picked
from holdfast.registry.cli.opening import moves, reads
from holdfast.registry.cli.options import argument, flag, option
from holdfast.registry.cli.output import Bar, Note, Part
from holdfast.registry.errors import InvalidInput
from holdfast.registry.face import Registry
from holdfast.registry.formats import (
    EXTENSIONS,
    MAIN_EXTENSIONS,
    NAMES,
    TREE,
    WrittenFile,
    by_extension,
    limited,
    named,
    thalia,
)
from holdfast.registry.formats import OPAQUE_FORMAT as OPAQUE_FORMAT
from holdfast.registry.layouts import hub_folder
from holdfast.registry.writing import Storing

#: The exit status of a check of a file whose format nobody knows.
_UNKNOWN = 9
_TENSORS = (Column("tensor", "path"), Column("dtype", drop=1), Column("shape"))
FORMAT = option("--format", "NAME", f"Its format: {NAMES}. By default the content tells it.")
#: Printed if a file was stored unread.
OPAQUE = "stored as an opaque file; nothing in it was read"


@command(moves, bar="pushing")
def push(
    opened: Registry,
    *,
    file: Path = argument(
        "FILE",
        f"The file or folder to store; {EXTENSIONS} are taken apart, other files not read.",
    ),
    run: options.Run,
    step: int = option("--step", "N", "Training step, update or epoch.", default=...),
    phase: str | None = options.PHASE,
    metric: list[str] | None = options.METRICS,
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
) -> Answer:
    """Store a file, or a folder of files, as a checkpoint.

    With `--format tree`, or if no format knows a folder, every file keeps its exact bytes;
    `holdfast files` shows them.
    """
    metrics, texts = options.numbers(metric or ()), options.pairs(meta or ())
    given = precision or []
    is_name = len(given) == 1 and "=" not in given[0]
    policies = options.pairs(one if "=" in one else f"*={one}" for one in given)
    found = formats.read(file, format=format_name, portable=True, max_bytes=max_bytes)
    into = opened.run(run, create=create)
    known = into.manifest.count
    saved = into.exchange.push(
        found.state,
        step=step,
        phase=phase,
        metrics=metrics,
        meta=texts or None,
        storing=Storing(
            precision=given[0] if is_name else policies,
            allow_lossy_optimizer=allow_lossy_optimizer,
        ),
    )
    is_new = into.manifest.count > known
    shape = describe.checkpoint_json(into, saved)
    how = "pushed" if is_new else "there already"
    text: list[Part] = [f"{how}: {describe.named(saved)}"]
    if shape["lossy"]:
        text.append(f"with less precision: {describe.lossy_text(shape['lossy'])}")
    if found.format == "opaque":
        text.append(OPAQUE)
    if not is_new and (metrics or texts):
        text.append(
            Note(f"metrics and meta were left as they are; see holdfast metric add {saved.ref}")
        )
    return Answer(lambda: {**shape, "format": found.format, "new": is_new}, lambda: text)


@command(moves, bar="pulling")
def pull(
    opened: Registry,
    *,
    advance: Bar,
    ref: options.Ref,
    to: Path = option("--to", "PATH", f"The file to write: {MAIN_EXTENSIONS}.", default=...),
    only: list[str] | None = option("--only", "COMPONENT", "Only this component; repeatable."),
    format_name: str | None = option(
        "--format", "NAME", f"Its format: {NAMES}. By default the extension tells it."
    ),
    force: bool = flag("--force", "Replace a file that exists."),
) -> Answer:
    """Write a checkpoint, release, artifact or pool entry to a file.

    The extension decides the format; an opaque file can be written under any name. Every byte is
    verified. The file appears complete, or not at all.
    """
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
        written = formats.write(to, stored, format=format_name, only=only or None, force=force)
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


@command(reads)
def files(opened: Registry, *, ref: options.Ref) -> Answer:
    """List the files of a folder that was pushed, as sha256sum does.

    The text can be given to `sha256sum -c` in a folder that `pull` has written.
    """
    stored = opened.stored(ref)
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
            {"name": name, **picked(one, "size_bytes sha256 format executable")}
            for name, one in found.items()
        ],
        lambda: [f"{one.sha256}  {name}" for name, one in found.items()],
    )


@command(table=True)
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


@command()
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


@command()
def convert(
    *,
    file: Path = argument("FILE", "The file or folder to read."),
    to: Path = argument("TO", f"The file to write: {MAIN_EXTENSIONS}."),
    read_as: str | None = option("--read-as", "NAME", "The format of FILE, as for push."),
    format_name: str | None = option("--format", "NAME", "The format of TO, as for pull."),
    level: int | None = option(
        "--level", "N", ".thalia: level of the compression, 1 to 22 for zstd, 1 to 12 for lz4."
    ),
    precision: str | None = option("--precision", "NAME", ".thalia: fp32, fp16 or mixed."),
    version: str | None = option("--to-version", "X.Y", ".thalia: write version 0.1 or 0.2."),
    max_bytes: int | None = options.MAX_BYTES,
    force: bool = flag("--force", "Replace a file that exists."),
) -> Answer:
    """Write a file again, in another format or form.

    No registry is needed. Tensors and values stay as they are, unless --precision or --to-version
    says otherwise. The file appears complete, or not at all.
    """
    if version is not None or level is not None or precision is not None:
        written = _convert_brain(
            file, to, read_as, level, precision, version, max_bytes, force=force
        )
    else:
        found = formats.read(file, format=read_as, portable=True, max_bytes=max_bytes)
        written = formats.write(to, found.state, format=format_name, force=force)
    size = output.size(written.size_bytes)
    return answer_of(
        {"path": str(written.path), **picked(written, "format size_bytes")},
        f"wrote: {written.path}  {written.format}  {size}",
    )


def _convert_brain(
    file: Path,
    to: Path,
    read_as: str | None,
    level: int | None,
    precision: str | None,
    version: str | None,
    max_bytes: int | None,
    *,
    force: bool,
) -> WrittenFile:
    """Write a file of Thalia, with the options of this format alone."""
    if by_extension(to) != named("thalia"):
        raise InvalidInput(
            "--level, --precision and --to-version are for files of Thalia",
            where=to,
            expected=", ".join(named("thalia").extensions),
        )
    if version is not None and any(one is not None for one in (level, precision, read_as)):
        raise InvalidInput(
            "--to-version excludes --level, --precision and --read-as",
            hint="Convert the file twice.",
        )
    with limited(max_bytes):
        if version is not None:
            return thalia.migrate(file, to, version, force=force)
        state = formats.read(file, format=read_as, portable=True).state
        return thalia.save(to, state, level=level, precision=precision, force=force)
