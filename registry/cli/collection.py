"""`gc`: delete the objects that no run needs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from holdfast.registry.cli import options, output
from holdfast.registry.cli.command import Answer, command
from holdfast.registry.cli.describe import picked
from holdfast.registry.cli.opening import writes
from holdfast.registry.cli.options import flag, option
from holdfast.registry.cli.output import Part
from holdfast.registry.cli.progress import Bar
from holdfast.registry.maintenance.gc_report import GcReport, Tally
from holdfast.registry.registries.registry import Registry

_FORGETTING = (
    "All checkpoints, pins and streams of {} are given up, and it can never be written again. "
    "Lost for good is every object that no other run needs. A backup of its log, or a mirror, is "
    "a better way."
)


@command(writes, bar="deleting")
def gc(
    opened: Registry,
    *,
    advance: Bar,
    grace: float = option(
        "--grace",
        "TIME",
        "Keep objects that were stored or evicted within this time: 0, 30m, 12h, 7d.",
        parser=options.seconds,
        default="1d",
    ),
    dry_run: bool = flag("--dry-run", "Only show what would be deleted."),
    forget: list[str] | None = option(
        "--forget", "RUN", "Give up a run that cannot be read, for ever; repeatable."
    ),
    yes: bool = flag("--yes", "With --forget: do not ask."),
) -> Answer:
    """Delete the objects that no run needs any more.

    Safe while others save, read, sync and collect. If a collection is killed, the next one finishes
    it. It stops before it deletes anything if a run cannot be read. If nothing can mend that run,
    --forget gives it up: what only that run needs is deleted, and the other runs keep all they
    need.
    """
    for name in forget or () if not (yes or dry_run) else ():
        output.confirm_name(name, "forget", _FORGETTING.format(name))
    report = opened.gc(grace_s=grace, forget=forget or (), dry_run=dry_run, progress=advance)
    return Answer(lambda: _json(report), lambda: _text(report))


def _json(report: GcReport) -> dict[str, Any]:
    tallies = picked(report, "objects condemned spared recent deleted stale")
    return {
        **picked(report, "dry_run epoch runs"),
        "forgotten": list(report.forgotten),
        **{name: picked(tally, "objects size_bytes") for name, tally in tallies.items()},
        **picked(report, "unfinished_bytes freed_bytes keeps_versions noncurrent_bytes"),
    }


def _text(report: GcReport) -> Iterator[Part]:
    sweep = "" if report.epoch is None else f", by sweep {report.epoch}"
    yield {
        "looked at": f"{_tally_text(report.objects)}, of {output.counted(report.runs, 'run')}",
        "would forget" if report.dry_run else "forgot": ", ".join(report.forgotten) or None,
        "would go": _tally_text(report.condemned) if report.dry_run else None,
        "deleted": None if report.dry_run else f"{_tally_text(report.deleted)}{sweep}",
        "spared": _some(report.spared, "a run uses them again"),
        "for now": _some(report.recent, "kept within the grace (--grace), so that undo works"),
        "stale": _some(report.stale, "old snapshots of logs, and probes", "file"),
        "unfinished": f"{output.size(report.unfinished_bytes)} of dead writers"
        if report.unfinished_bytes
        else None,
    }
    if report.noncurrent_bytes:
        yield (
            f"{output.size(report.noncurrent_bytes)} remain in the bucket as noncurrent versions, "
            "until a lifecycle rule removes them."
        )
    elif report.noncurrent_bytes is None and report.freed_bytes:
        yield "The bucket does not say whether it keeps deleted objects as versions."


def _tally_text(tally: Tally, noun: str = "object") -> str:
    return f"{output.counted(tally.objects, noun)}, {output.size(tally.size_bytes)}"


def _some(tally: Tally, why: str, noun: str = "object") -> str | None:
    return f"{_tally_text(tally, noun)}: {why}" if tally.objects else None
