"""`gc`: deleting what no run needs."""

from __future__ import annotations

import re
from typing import Annotated, Any

import typer

from registry.cli import options, output, progress
from registry.maintenance.gc_report import GcReport, Tally
from registry.registry import open  # noqa: A004

_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*([smhdw]?)")
_UNIT_S = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


def _seconds(text: str) -> float:
    """Read a duration such as `90`, `30m`, `12h` or `7d`."""
    match = _DURATION.fullmatch(text.strip())
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a duration such as 0, 30m, 12h or 7d")
    return float(match[1]) * _UNIT_S[match[2]]


Grace = Annotated[
    float,
    typer.Option(
        "--grace",
        parser=_seconds,
        metavar="TIME",
        help="Keep what was stored or let go within this time: 0, 30m, 12h, 7d.",
    ),
]


def gc(
    registry: options.Registry,
    *,
    grace: Grace = "1d",  # type: ignore[assignment]  # typer parses defaults too
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    json: options.Json = False,
) -> None:
    """Delete what no run needs any more.

    Safe while others save, read, sync and collect. What a killed collection left is finished by
    the next one.
    """
    with open(registry, read_only=dry_run) as opened, progress.bar("deleting") as advance:
        report = opened.gc(grace_s=grace, dry_run=dry_run, progress=advance)
    if json:
        output.document(_report_json(report))
    else:
        _print_report(report)


def _report_json(report: GcReport) -> dict[str, Any]:
    def shape(tally: Tally) -> dict[str, int]:
        return {"objects": tally.objects, "size_bytes": tally.size_bytes}

    return {
        "dry_run": report.dry_run,
        "epoch": report.epoch,
        "runs": report.runs,
        "objects": shape(report.objects),
        "condemned": shape(report.condemned),
        "spared": shape(report.spared),
        "recent": shape(report.recent),
        "deleted": shape(report.deleted),
        "stale": shape(report.stale),
        "unfinished_bytes": report.unfinished_bytes,
        "freed_bytes": report.freed_bytes,
        "keeps_versions": report.keeps_versions,
        "noncurrent_bytes": report.noncurrent_bytes,
    }


def _print_report(report: GcReport) -> None:
    sweep = "" if report.epoch is None else f", by sweep {report.epoch}"
    leftovers = report.stale.size_bytes + report.unfinished_bytes
    output.fields(
        {
            "looked at": f"{_told(report.objects)}, of {output.counted(report.runs, 'run')}",
            "would go": _told(report.condemned) if report.dry_run else None,
            "deleted": None if report.dry_run else f"{_told(report.deleted)}{sweep}",
            "spared": _some(report.spared, "a run took them up again meanwhile"),
            "for now": _some(report.recent, "kept within the grace (--grace), so that undo works"),
            "leftovers": f"{output.size(leftovers)} of old snapshots and unfinished files"
            if leftovers
            else None,
        }
    )
    if report.noncurrent_bytes:
        output.line(
            f"{output.size(report.noncurrent_bytes)} remain in the bucket as noncurrent versions, "
            "until a lifecycle rule removes them."
        )
    elif report.noncurrent_bytes is None and report.freed_bytes:
        output.line("The bucket does not say whether it keeps what was deleted as versions.")


def _told(tally: Tally) -> str:
    return f"{output.counted(tally.objects, 'object')}, {output.size(tally.size_bytes)}"


def _some(tally: Tally, why: str) -> str | None:
    return f"{_told(tally)}: {why}" if tally.objects else None
