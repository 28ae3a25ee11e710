"""`repack`: packs rewritten without what nobody needs."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated, Any

import typer

from registry.cli import options, output, progress
from registry.maintenance.repacking.plan import RewrittenPack
from registry.maintenance.repacking.repack import RepackReport
from registry.registry import open  # noqa: A004

_SHARE = re.compile(r"(\d{1,3}(?:\.\d+)?)\s*(%?)")
_REASONS = {"dead": "dead in part", "recoded": "recoded", "small": "small"}


def _share(text: str) -> float:
    """Read a share such as `25%` or `0.25`."""
    match = _SHARE.fullmatch(text.strip())
    share = float(match[1]) / (100 if match[2] else 1) if match else 0.0
    if not 0 < share <= 1:
        raise typer.BadParameter(f"{text!r} is not a share such as 25% or 0.25")
    return share


def repack(
    registry: options.Registry,
    run: Annotated[
        list[str] | None, typer.Argument(metavar="RUN", help="Only packs that these runs need.")
    ] = None,
    *,
    min_dead: Annotated[
        float,
        typer.Option(
            "--min-dead",
            parser=_share,
            metavar="SHARE",
            help="Rewrite a pack when so much of it is dead: 25%, 0.25.",
        ),
    ] = "25%",  # type: ignore[assignment]  # typer parses defaults too
    compression: Annotated[
        str | None,
        typer.Option(
            "--compression",
            help="Store chunks compressed where that is worth it: zstd or lz4; none: raw again.",
        ),
    ] = None,
    keyframe_every: Annotated[
        int | None,
        typer.Option(
            "--keyframe-every",
            metavar="N",
            help="Cut longer chains of deltas: at most N versions of a chunk, 1 (no deltas) to "
            "32, are read for one.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would be rewritten.")
    ] = False,
    json: options.Json = False,
) -> None:
    """Drop dead bytes from packs, and put small packs together.

    Deltas are stored anew where their bases are needed for nothing else and take more than they
    save. No id changes. Safe while others save, read, sync and collect. The old packs stay until
    `gc` removes them.
    """
    with open(registry, read_only=dry_run) as opened, progress.bar("repacking") as advance:
        report = opened.repack(
            run or None,
            min_dead=min_dead,
            compression=compression,  # type: ignore[arg-type]  # checked there
            keyframe_every=keyframe_every,
            dry_run=dry_run,
            progress=advance,
        )
    if json:
        output.document(_report_json(report))
    else:
        _print_report(report, _idle(compression, keyframe_every, some=bool(run)))


def _report_json(report: RepackReport) -> dict[str, Any]:
    return {
        "dry_run": report.dry_run,
        "packs_read": report.packs_read,
        "packs_written": report.packs_written,
        "bytes_moved": report.bytes_moved,
        "packs_in_vain": report.packs_in_vain,
        "in_vain_bytes": report.in_vain_bytes,
        "freed_bytes": report.freed_bytes,
        "runs": list(report.runs),
        "checkpoints": report.checkpoints,
        "placed_meanwhile": report.placed_meanwhile,
        "recoded_chunks": report.recoded,
        "recoded_before_bytes": report.recoded_before,
        "recoded_after_bytes": report.recoded_after,
        "bases_dropped": report.bases,
        "bases_dropped_bytes": report.bases_bytes,
        "packs": [
            {
                "pack": str(one.pack),
                "size_bytes": one.size_bytes,
                "live_bytes": one.live_bytes,
                "reason": one.reason,
            }
            for one in report.rewritten
        ],
    }


def _idle(compression: str | None, keyframe_every: int | None, *, some: bool) -> str:
    """Return why there is nothing to do, by what was asked for."""
    reasons = []
    if compression == "none":
        reasons.append("every chunk is stored raw already")
    elif compression is not None:
        # What does not shrink stays raw, by the rule of a save.
        reasons.append(f"all chunks that are worth it are stored as {compression} already")
    if keyframe_every == 1:
        reasons.append("none is stored as a delta")
    elif keyframe_every is not None:
        reasons.append(f"no chain of deltas is longer than {keyframe_every} versions")
    if some and reasons:
        # What lies in a pack beyond them is not stored in another way there.
        reasons[-1] += ", but for what lies in packs of other runs too"
    reasons += ["no pack is dead enough", "no small ones fit together"]
    return f"nothing to gain: {'; '.join(reasons[:-1])}, and {reasons[-1]}"


def _print_report(report: RepackReport, idle: str) -> None:
    if not report.rewritten:
        output.line(idle)
        return
    written = "to write" if report.dry_run else "written"
    placed = "to place anew" if report.dry_run else "placed anew"
    packs = output.counted(report.packs_written, "pack")
    states = output.counted(report.checkpoints, "state")
    output.fields(
        {
            **{name: _told(report.rewritten, why) for why, name in _REASONS.items()},
            "encoded anew": _told_recoded(report),
            "bases left": _told_bases(report),
            written: f"{packs}, {output.size(report.bytes_moved)}",
            "in vain": _told_in_vain(report),
            placed: f"{states} of {output.counted(len(report.runs), 'run')}",
            "left to gc": _told_left(report),
        }
    )
    if report.placed_meanwhile:
        lost = output.counted(report.placed_meanwhile, "state")
        verb = "was" if report.placed_meanwhile == 1 else "were"
        output.line(f"{lost} {verb} placed by somebody else meanwhile; run it again.")


def _told_in_vain(report: RepackReport) -> str:
    if not report.packs_in_vain:
        return ""
    packs = output.counted(report.packs_in_vain, "pack")
    return f"{packs} of these, {output.size(report.in_vain_bytes)}, that no state needs now"


def _told_left(report: RepackReport) -> str:
    left = f"{output.size(report.freed_bytes)} of old packs"
    if report.packs_in_vain:
        left += f", {output.size(report.in_vain_bytes)} written in vain"
    return left


def _told_recoded(report: RepackReport) -> str:
    if not report.recoded:
        return ""
    before, after = output.size(report.recoded_before), output.size(report.recoded_after)
    return f"{output.counted(report.recoded, 'chunk')}, {before} before, {after} after"


def _told_bases(report: RepackReport) -> str:
    if not report.bases:
        return ""
    bases = output.counted(report.bases, "base")
    return f"{bases} of deltas, {output.size(report.bases_bytes)}, that nothing needs any more"


def _told(packs: Iterable[RewrittenPack], reason: str) -> str:
    found = [one for one in packs if one.reason == reason]
    if not found:
        return ""
    size, live = sum(one.size_bytes for one in found), sum(one.live_bytes for one in found)
    counted = output.counted(len(found), "pack")
    return f"{counted}, {output.size(size)}, of which {output.size(live)} are needed"
