"""`verify`, `repair` and `sync`: a registry held against itself, mended, brought up to another."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from backends import parse
from registry.cli import options, output, progress
from registry.cli.columns import Column
from registry.errors import IntegrityError
from registry.heads import trust as trust_registry
from registry.maintenance.findings import Finding, VerifyReport
from registry.maintenance.repair import RepairReport
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
    sample: Annotated[
        str | None,
        typer.Option(metavar="SHARE", help="Read and hash this share of the packs: 5% or 0.05."),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Keep what was read in FILE, and go on from there next time; implies --deep.",
        ),
    ] = None,
    decode: Annotated[
        bool,
        typer.Option(
            "--decode",
            help="Also decode every compressed chunk and hash the result; implies --deep.",
        ),
    ] = False,
    heads: Annotated[
        Path | None,
        typer.Option(
            "--heads",
            metavar="FILE",
            help="Check each log against FILE: it must not be shorter, different or gone.",
        ),
    ] = None,
    write_heads: Annotated[
        Path | None,
        typer.Option(
            "--write-heads", metavar="FILE", help="Write the heads to FILE if nothing is wrong."
        ),
    ] = None,
    json: options.Json = False,
) -> None:
    """Check that every checkpoint is whole; others may use the registry meanwhile.

    The exit status is 6 where one is not.
    """
    share = None if sample is None else _share(sample)
    with open(registry, read_only=True) as opened, progress.bar("verifying") as advance:
        report = opened.verify(
            deep=deep,
            sample=share,
            resume=resume,
            decode=decode,
            heads=heads,
            write_heads=write_heads,
            progress=advance,
        )
    if json:
        output.document(_report_json(report))
    else:
        _print_report(report)
    if not report.ok:
        raise typer.Exit(IntegrityError.exit_code)


def _share(text: str) -> float:
    number, percent = text.removesuffix("%"), text.endswith("%")
    try:
        share = float(number) / (100 if percent else 1)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise typer.BadParameter(f"--sample {text!r} is not a share such as 5% or 0.05")
    return share


def _report_json(report: VerifyReport) -> dict[str, object]:
    return {
        "ok": report.ok,
        "runs": report.runs,
        "checkpoints": report.checkpoints,
        "objects": report.objects,
        "bytes_checked": report.bytes_checked,
        "data": None if report.data is None else asdict(report.data),
        "findings": [asdict(finding) for finding in report.findings],
    }


def _print_report(report: VerifyReport) -> None:
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
    read = "" if report.data is None else f"; {output.size(report.bytes_checked)} hashed"
    errors = sum(finding.severity == "error" for finding in report.findings)
    verdict = "ok" if report.ok else output.counted(errors, "error")
    output.line(f"{verdict}: {counts}{read}")
    _print_extent(report)


def _print_extent(report: VerifyReport) -> None:
    """Say how much was looked at, unless it was everything."""
    data = report.data
    if data is None:
        if report.ok:
            output.line("Names and sizes were checked; --deep hashes every byte.")
        return
    if data.chunks_decoded is not None:
        chunks = output.counted(data.chunks_decoded, "compressed chunk")
        output.line(f"{chunks} decoded and hashed.")
    if data.packs_noted:
        before = output.counted(data.packs_noted, "pack")
        output.line(f"{before}, {output.size(data.bytes_noted)}, were read before in this pass.")
    if data.packs_read + data.packs_noted < data.packs:
        output.line(
            f"Read {data.packs_read:,} of {output.counted(data.packs, 'pack')}: "
            f"{output.size(data.bytes_read)} of {output.size(data.pack_bytes)}, drawn at random."
        )


def _print_finding(finding: Finding) -> None:
    # Messages of errors begin with the place already.
    place = "" if finding.message.startswith(finding.where) else f"{finding.where}: "
    output.line(f"{finding.severity}: {place}{finding.message}")
    for ref in finding.affects:
        output.line(f"  affects {ref}")
    if finding.advice:
        output.line(f"  {finding.advice}")


def trust(
    url: Annotated[
        str | None, typer.Argument(metavar="URL", help="The registry; by default that of -r.")
    ] = None,
    registry: options.OptionalRegistry = None,
    *,
    json: options.Json = False,
) -> None:
    """Accept a registry that went back, or was replaced: forget its heads."""
    place = url or registry
    if place is None:
        raise typer.BadParameter("no URL: give one here, by -r or in HOLDFAST_REGISTRY")
    shown, forgotten = parse(place).url, trust_registry(place)
    if json:
        output.document({"url": shown, "forgotten": forgotten})
    elif forgotten:
        output.line(f"trusted: {shown}; this machine has forgotten its old heads")
    else:
        output.line(f"no heads were remembered for {shown}")


def repair(
    registry: options.Registry,
    *,
    mirror: Annotated[
        str, typer.Option("--from", metavar="URL", help="A registry that holds the same states.")
    ],
    deep: Annotated[
        bool,
        typer.Option(
            "--deep/--no-deep", help="Find what is damaged by every byte, or by names and sizes."
        ),
    ] = True,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Look, and write nothing.")] = False,
    json: options.Json = False,
) -> None:
    """Restore from a mirror what is missing or damaged; nothing is ever invented.

    The exit status is 6 where something cannot be mended.
    """
    with (
        open(registry, read_only=dry_run) as opened,
        progress.bar("verifying and mending") as advance,
    ):
        report = opened.repair(mirror, deep=deep, dry_run=dry_run, progress=advance)
    if json:
        output.document(_repair_json(report))
    else:
        _print_repair(report)
    if not report.ok:
        raise typer.Exit(IntegrityError.exit_code)


def _repair_json(report: RepairReport) -> dict[str, object]:
    return {
        "ok": report.ok,
        "dry_run": report.dry_run,
        "found": _report_json(report.found),
        "mended": [asdict(mended) for mended in report.mended],
        "left": [asdict(left) for left in report.left],
        "bytes_written": report.bytes_written,
    }


def _print_repair(report: RepairReport) -> None:
    would = "would be " * report.dry_run
    for mended in report.mended:
        output.line(f"{would}{mended.how}: {mended.where}")
        output.line(f"  from {mended.source}")
        for ref in mended.affects:
            output.line(f"  mends {ref}")
    for left in report.left:
        place = "" if left.message.startswith(left.where) else f"{left.where}: "
        output.line(f"left: {place}{left.message}")
        for ref in left.affects:
            output.line(f"  affects {ref}")
        output.line(f"  not mended: {left.reason}")
        output.line(f"  {left.advice}")
    verdict = "ok" if report.ok else f"{len(report.left):,} left"
    written = output.size(report.bytes_written)
    output.line(
        f"{verdict}: {len(report.mended):,} {would}mended, {written} {would}written"
        if report.mended or report.left
        else "ok: nothing to mend"
    )


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
