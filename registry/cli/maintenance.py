"""`verify` and `sync`: a registry held against itself, and brought up to another."""

from __future__ import annotations

from typing import Annotated

import typer

from registry.cli import options, output, progress
from registry.cli.output import Column
from registry.errors import IntegrityError
from registry.maintenance.findings import Finding, VerifyReport
from registry.registry import open  # noqa: A004
from registry.sync import SyncReport
from registry.sync import sync as sync_registries

_RUN_COLUMNS = (
    Column("run", folds=True),
    Column("commits", is_number=True),
    Column("checkpoints", is_number=True),
    Column("packs sent", is_number=True),
    Column("present", is_number=True),
    Column("bytes sent", is_number=True),
)


def verify(
    registry: options.Registry,
    *,
    deep: Annotated[bool, typer.Option("--deep", help="Read and hash every byte.")] = False,
    json: options.Json = False,
) -> None:
    """Check that every checkpoint is whole.

    The exit status is 6 where one is not.
    """
    with open(registry, read_only=True) as opened, progress.bar("verifying") as advance:
        report = opened.verify(deep=deep, progress=advance)
    if json:
        output.document(_report_json(report))
    else:
        _print_report(report, deep=deep)
    if not report.ok:
        raise typer.Exit(IntegrityError.exit_code)


def _report_json(report: VerifyReport) -> dict[str, object]:
    return {
        "ok": report.ok,
        "runs": report.runs,
        "checkpoints": report.checkpoints,
        "objects": report.objects,
        "bytes_checked": report.bytes_checked,
        "findings": [
            {
                "kind": finding.kind,
                "severity": finding.severity,
                "where": finding.where,
                "message": finding.message,
                "affects": list(finding.affects),
                "advice": finding.advice,
            }
            for finding in report.findings
        ],
    }


def _print_report(report: VerifyReport, *, deep: bool) -> None:
    for finding in report.findings:
        _print_finding(finding)
    counts = ", ".join(
        output.counted(count, noun)
        for count, noun in (
            (report.runs, "run"),
            (report.checkpoints, "checkpoint"),
            (report.objects, "object"),
        )
    )
    read = f"; {output.size(report.bytes_checked)} hashed" if deep else ""
    errors = sum(finding.severity == "error" for finding in report.findings)
    verdict = "ok" if report.ok else output.counted(errors, "error")
    output.line(f"{verdict}: {counts}{read}")
    if report.ok and not deep:
        output.line("Names and sizes were checked; --deep hashes every byte.")


def _print_finding(finding: Finding) -> None:
    # Messages of errors begin with the place already.
    place = "" if finding.message.startswith(finding.where) else f"{finding.where}: "
    output.line(f"{finding.severity}: {place}{finding.message}")
    for ref in finding.affects:
        output.line(f"  affects {ref}")
    if finding.advice:
        output.line(f"  {finding.advice}")


def sync(
    source: Annotated[str, typer.Argument(metavar="SRC", help="Registry to read.")],
    destination: Annotated[str, typer.Argument(metavar="DST", help="Registry to write.")],
    run: Annotated[list[str] | None, typer.Argument(metavar="RUN", help="Only these runs.")] = None,
    *,
    json: options.Json = False,
) -> None:
    """Copy runs from one registry to another.

    Fast-forward only; what the destination holds already is not sent again.
    """
    with progress.bar("copying") as advance:
        report = sync_registries(source, destination, run or None, progress=advance)
    if json:
        output.document(_sync_json(report))
        return
    output.table(
        _RUN_COLUMNS,
        [
            (
                done.run_id,
                done.commits,
                done.checkpoints,
                done.packs_copied,
                done.packs_present,
                output.size(done.bytes_copied),
            )
            for done in report.runs
        ],
    )
    copied = sum(done.commits > 0 for done in report.runs)
    packless = [done for done in report.runs if not done.packs_copied + done.packs_present]
    small = any(done.checkpoints for done in packless) and not report.bytes_copied
    output.line(
        f"{output.counted(copied, 'run')} copied, {len(report.runs) - copied} up to date before; "
        f"{output.size(report.bytes_copied)} of packs sent"
        f"{' (small states travel in manifests)' * small}"
    )


def _sync_json(report: SyncReport) -> dict[str, object]:
    return {
        "runs": [
            {
                "run": done.run_id,
                "commits": done.commits,
                "checkpoints": done.checkpoints,
                "packs_copied": done.packs_copied,
                "packs_present": done.packs_present,
                "bytes_copied": done.bytes_copied,
            }
            for done in report.runs
        ],
        "bytes_copied": report.bytes_copied,
    }
