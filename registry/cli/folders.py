"""`checkout` and `import`: a run as the folder of another system, and such a folder as a run."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import typer

from holdfast.registry.cli import options
from holdfast.registry.cli.command import Answer, command
from holdfast.registry.cli.describe import picked
from holdfast.registry.cli.opening import reads, writes
from holdfast.registry.cli.options import argument, flag, option
from holdfast.registry.cli.output import Note, Part
from holdfast.registry.errors import Conflict, InvalidInput, NotFound
from holdfast.registry.face import Registry, Run, init
from holdfast.registry.layouts import (
    NAMES,
    CheckoutReport,
    ImportedFile,
    check_folder,
    import_spec,
    keep_checked_out,
)
from holdfast.registry.loading.following import Patience

_LAYOUT = option("--layout", "NAME", f"The layout: {NAMES}. Default: the preset's layout.")


@command(reads)
def checkout(
    opened: Registry,
    *,
    run: options.NamedRun,
    folder: Path = argument("DIR", "The folder; made if it does not exist."),
    layout: str | None = _LAYOUT,
    watch: bool = flag("--watch", "Follow the run until it is over."),
) -> Answer:
    """Write a run as the folder of another system.

    A second checkout brings the folder up to date, and removes what the run has no longer. Files
    that no checkout has made, or that were changed, are left alone; the exit status is then 5.
    """
    found = opened.run(run)
    if watch:
        reports = keep_checked_out(found.handle.committer, folder, layout, Patience())
        return Answer(
            lambda: _until_over(reports, lambda report: [_report_json(report)]),
            lambda: _until_over(reports, lambda report: [*_left(report), *_lines(report)]),
            is_live=True,
        )
    report = found.exchange.checkout(folder, layout=layout)
    return Answer(
        lambda: _report_json(report),
        lambda: _lines(report),
        notes=_left(report),
        status=_status(report),
    )


def _until_over(
    reports: Iterable[CheckoutReport], shown: Callable[[CheckoutReport], Iterable[Any]]
) -> Iterator[Any]:
    """Yield the lines for each report; end the command with the status of the last."""
    report = CheckoutReport()
    for report in reports:
        yield from shown(report)
    if report.left:
        raise typer.Exit(_status(report))


def _status(report: CheckoutReport) -> int:
    return Conflict.exit_code if report.left else 0


def _left(report: CheckoutReport) -> list[Note]:
    return [Note(f"left alone: {path}: {why}") for path, why in report.left.items()]


def _report_json(report: CheckoutReport) -> dict[str, Any]:
    return picked(report, "written kept removed left")


def _lines(report: CheckoutReport) -> Iterator[Part]:
    yield from (f"wrote: {path}" for path in report.written)
    yield from (f"removed: {path}" for path in report.removed)
    if not report.written and not report.removed:
        yield Note("the folder was up to date")


@command(writes)
def import_folder(
    opened: Registry,
    *,
    folder: Path = argument("DIR", "The folder."),
    run: str | None = argument(
        "RUN", "The run; by default it has the folder's name.", default=None
    ),
    layout: str = option("--layout", "NAME", f"The layout: {NAMES}.", default=...),
    table: Path | None = option(
        "--table", "FILE", "andrea: a JSON file with names and shapes of the parameters."
    ),
    dry_run: bool = flag("--dry-run", "Read and check everything, and commit nothing."),
    watch: bool = flag("--watch", "Follow the folder, and take each file in once it is complete."),
    quiet: float = option(
        "--quiet",
        "TIME",
        "With --watch: how long a file that cannot tell whether it is complete must not change.",
        parser=options.seconds,
        default="10s",
    ),
) -> Answer:
    """Take the folder of another system into a run.

    The run is created if it does not exist. It has the preset of the layout, but keeps every
    checkpoint. A second import takes in only what is new. The exit status is 3 if files are
    refused.
    """
    if watch and dry_run:
        raise InvalidInput("--watch and --dry-run exclude each other")
    check_folder(folder)
    into = _run(opened, run or folder.resolve().name, layout, dry_run=dry_run)
    if watch:
        files = into.exchange.watch_folder(folder, layout=layout, table=table, quiet_s=quiet)
        return Answer(
            lambda: _as_they_come(files, lambda one: [_json(one)]),
            lambda: _as_they_come(files, lambda one: [*_warnings(one), _line(one)]),
            is_live=True,
        )
    taken = into.exchange.import_tree(folder, layout=layout, table=table, dry_run=dry_run)
    refused = any(one.outcome == "refused" for one in taken)
    return Answer(
        lambda: [_json(one) for one in taken],
        lambda: [_line(one, dry_run=dry_run) for one in taken],
        notes=[note for one in taken for note in _warnings(one)],
        status=InvalidInput.exit_code if refused else 0,
    )


def _as_they_come(
    files: Iterable[ImportedFile], shown: Callable[[ImportedFile], Iterable[Any]]
) -> Iterator[Any]:
    """Yield the lines for each file; end the command with the status of all."""
    refused = False
    for one in files:
        yield from shown(one)
        refused |= one.outcome == "refused"
    if refused:
        raise typer.Exit(InvalidInput.exit_code)


def _warnings(one: ImportedFile) -> list[Note]:
    return [Note(f"{one.path}: {text}") for text in one.warnings]


def _run(opened: Registry, name: str, layout: str, *, dry_run: bool) -> Run:
    try:
        return opened.run(name)
    except NotFound:
        # A dry run asks an empty run of the same rules, in memory.
        into = init(f"memory://dry-run-{secrets.token_hex(8)}") if dry_run else opened
        return into.create_run(name, preset=import_spec(layout))


def _line(one: ImportedFile, *, dry_run: bool = False) -> str:
    outcome = "would import" if dry_run and one.outcome == "imported" else one.outcome
    more = f" as {one.ref}" if one.ref else f": {one.why}" if one.why else ""
    return f"{outcome}: {one.path}{more}"


def _json(one: ImportedFile) -> dict[str, object]:
    return {
        "path": one.path,
        "outcome": one.outcome,
        "kind": one.kind or None,
        "ref": one.ref or None,
        "why": one.why or None,
        "warnings": list(one.warnings),
    }
