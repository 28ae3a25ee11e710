"""`pull --layout` and `push --layout`: a run as the folder of another system, and back."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import typer

from holdfast.registry.cli.command import Answer
from holdfast.registry.cli.describe import picked
from holdfast.registry.cli.output import Note, Part
from holdfast.registry.errors import Conflict, InvalidInput, NotFound
from holdfast.registry.face import Registry, Run, init
from holdfast.registry.layouts import OF_SYSTEMS as OF_SYSTEMS
from holdfast.registry.layouts import (
    CheckoutReport,
    ImportedFile,
    check_folder,
    import_spec,
    keep_checked_out,
)
from holdfast.registry.loading.following import Patience

LAYOUTS = "hf (the HF Trainer), or one of those below"


def written(run: Run, folder: Path, layout: str, *, watch: bool) -> Answer:
    """Write a run as the folder of another system, and return the answer of `pull`."""
    name = None if layout == "preset" else layout
    if watch:
        reports = keep_checked_out(run.handle.committer, folder, name, Patience())
        return Answer(
            lambda: _until_over(reports, lambda report: [_report_json(report)]),
            lambda: _until_over(reports, lambda report: [*_left(report), *_lines(report)]),
            is_live=True,
        )
    report = run.exchange.checkout(folder, layout=name)
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


def taken(
    opened: Registry,
    folder: Path,
    run: str | None,
    layout: str,
    table: Path | None,
    *,
    dry_run: bool,
    quiet_s: float | None,
) -> Answer:
    """Take the folder of another system into a run, and return the answer of `push`.

    The run is created if it does not exist. It has the preset of the layout, but keeps every
    checkpoint. Some layouts need a `table` of names and shapes of the parameters. With `quiet_s`
    the folder is followed.
    """
    if quiet_s is not None and dry_run:
        raise InvalidInput("--watch and --dry-run exclude each other")
    check_folder(folder)
    into = _run(opened, run or folder.resolve().name, layout, dry_run=dry_run)
    given: dict[str, Any] = {"layout": layout, "table": table}
    if quiet_s is not None:
        files = into.exchange.watch_folder(folder, **given, quiet_s=quiet_s)
        return Answer(
            lambda: _as_they_come(files, lambda one: [_json(one)]),
            lambda: _as_they_come(files, lambda one: [*_warnings(one), _line(one)]),
            is_live=True,
        )
    found = into.exchange.import_tree(folder, **given, dry_run=dry_run)
    refused = any(one.outcome == "refused" for one in found)
    return Answer(
        lambda: [_json(one) for one in found],
        lambda: [_line(one, dry_run=dry_run) for one in found],
        notes=[note for one in found for note in _warnings(one)],
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
