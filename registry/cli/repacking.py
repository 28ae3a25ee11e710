"""`repack`, `gc` and `tier`: which bytes stay on the store, and in which storage class."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from holdfast.registry.cli import options, output
from holdfast.registry.cli.command import Answer, answer_of, command
from holdfast.registry.cli.describe import picked
from holdfast.registry.cli.opening import DASK, SHARD, workers_at, writes
from holdfast.registry.cli.options import argument, flag, option
from holdfast.registry.cli.output import Bar, Part
from holdfast.registry.face import Registry
from holdfast.registry.upkeep import GcReport, Tally
from holdfast.registry.upkeep.repacking import RepackReport, RewrittenPack

_REASONS = {"dead": "dead in part", "recoded": "recoded", "small": "small"}
_COUNTS = (
    "dry_run packs_read packs_written bytes_moved packs_in_vain in_vain_bytes freed_bytes",
    "checkpoints placed_meanwhile recoded_chunks=recoded recoded_before_bytes=recoded_before "
    "recoded_after_bytes=recoded_after bases_dropped=bases bases_dropped_bytes=bases_bytes",
)


@command(writes, bar="repacking")
def repack(
    opened: Registry,
    *,
    advance: Bar,
    run: list[str] | None = argument("RUN", "Only packs that these runs need.", default=None),
    min_dead: float = option(
        "--min-dead",
        "SHARE",
        "Rewrite a pack if at least this share of it is dead: 25%, 0.25.",
        parser=options.share,
        default="25%",
    ),
    compression: str | None = option(
        "--compression",
        None,
        "Compress chunks if that makes them shorter: auto, zstd or lz4; none: raw again.",
    ),
    keyframe_every: int | None = option(
        "--keyframe-every",
        "N",
        "Cut longer chains of deltas: a read needs at most N versions of a chunk, 1 (no "
        "deltas) to 32.",
    ),
    dry_run: bool = flag("--dry-run", "Only show what would be rewritten."),
    dask: str | None = DASK,
) -> Answer:
    """Remove dead bytes from packs, and combine small packs.

    Deltas are stored in another way if their bases are needed for nothing else and take more bytes
    than they save. No id changes. Safe while others save, read, sync and collect. The old packs
    stay until `gc` deletes them.
    """
    with workers_at(dask) as executor:
        report = opened.repack(
            run or None,
            min_dead=min_dead,
            compression=compression,  # type: ignore[arg-type]  # checked there
            keyframe_every=keyframe_every,
            dry_run=dry_run,
            executor=executor,
            progress=advance,
        )
    idle = _idle(compression, keyframe_every, some=bool(run))
    return Answer(lambda: _json(report), lambda: _text(report) if report.rewritten else [idle])


@command(writes)
def tier(
    opened: Registry,
    *,
    refs: list[str] = argument("REF", "A state, or the name of a run for all that it holds."),
    storage_class: str | None = option(
        "--class", "NAME", "Where to move the packs: GLACIER_IR, GLACIER, STANDARD, ..."
    ),
    restore_days: int | None = option(
        "--restore-days", "N", "Ask for archived packs: readable some hours later, for N days."
    ),
    dry_run: bool = flag("--dry-run", "Only count."),
) -> Answer:
    """Move packs to another storage class, or ask for archived ones.

    Only in a bucket on S3. No name, id or log changes. A pack that other states need too stays out
    of an archive.
    """
    report = opened.tier(refs, storage_class, restore_days=restore_days, dry_run=dry_run)
    verb = "moved to " + report.storage_class if report.storage_class else "asked for"
    packs = f"{output.counted(report.packs, 'pack')}, {output.size(report.bytes)}"
    text = f"would be {verb}: {packs}" if report.dry_run else f"{packs}, {verb}"
    kept = f"{output.counted(report.kept_packs, 'pack')}, {output.size(report.kept_bytes)}"
    more = [f"not moved, since other states need them: {kept}"] if report.kept_packs else []
    names = "storage_class packs bytes kept_packs kept_bytes dry_run"
    return answer_of(picked(report, names), text, *more)


def _json(report: RepackReport) -> dict[str, Any]:
    first, last = (picked(report, names) for names in _COUNTS)
    packs = [
        {"pack": str(one.pack), **picked(one, "size_bytes live_bytes reason")}
        for one in report.rewritten
    ]
    return {**first, "runs": list(report.runs), **last, "packs": packs}


def _idle(compression: str | None, keyframe_every: int | None, *, some: bool) -> str:
    """Return why there is nothing to do, by the options that were given."""
    reasons = []
    if compression == "none":
        reasons.append("every chunk is stored raw already")
    elif compression is not None:
        # A chunk that does not shrink stays raw, as in a save.
        how = "compressed" if compression == "auto" else f"stored as {compression}"
        reasons.append(f"all chunks that are worth it are {how} already")
    if keyframe_every == 1:
        reasons.append("none is stored as a delta")
    elif keyframe_every is not None:
        reasons.append(f"no chain of deltas is longer than {keyframe_every} versions")
    if some and reasons:
        # Chunks in packs that other runs need too stay as they are.
        reasons[-1] += ", but for chunks in packs that other runs need too"
    reasons += ["no pack is dead enough", "no small ones fit together"]
    return f"nothing to gain: {'; '.join(reasons[:-1])}, and {reasons[-1]}"


def _text(report: RepackReport) -> Iterator[Part]:
    counted, size = output.counted, output.size
    written = "to write" if report.dry_run else "written"
    placed = "to place again" if report.dry_run else "placed again"
    before, after = size(report.recoded_before), size(report.recoded_after)
    recoded = f"{counted(report.recoded, 'chunk')}, {before} before, {after} after"
    bases = f"{counted(report.bases, 'base')} of deltas, {size(report.bases_bytes)}"
    vain, left = size(report.in_vain_bytes), f"{size(report.freed_bytes)} of old packs"
    no_use = f"{counted(report.packs_in_vain, 'pack')} of these, {vain}, that no state needs now"
    yield {
        **{name: _packs_text(report.rewritten, why) for why, name in _REASONS.items()},
        "re-encoded": recoded if report.recoded else None,
        "bases left": f"{bases}, that nothing needs any more" if report.bases else None,
        written: f"{counted(report.packs_written, 'pack')}, {size(report.bytes_moved)}",
        "in vain": no_use if report.packs_in_vain else None,
        placed: f"{counted(report.checkpoints, 'state')} of {counted(len(report.runs), 'run')}",
        "left to gc": f"{left}, {vain} written in vain" if report.packs_in_vain else left,
    }
    if report.placed_meanwhile:
        lost = output.counted(report.placed_meanwhile, "state")
        verb = "was" if report.placed_meanwhile == 1 else "were"
        yield f"{lost} {verb} placed by somebody else meanwhile; run it again."


def _packs_text(packs: Iterable[RewrittenPack], reason: str) -> str:
    found = [one for one in packs if one.reason == reason]
    if not found:
        return ""
    size, live = sum(one.size_bytes for one in found), sum(one.live_bytes for one in found)
    counted = output.counted(len(found), "pack")
    return f"{counted}, {output.size(size)}, of which {output.size(live)} are needed"


# `gc`: delete the objects that no run needs.


_FORGETTING = (
    "All checkpoints, pins and streams of {} are given up, and it can never be written again. "
    "Lost for good is every object that no other run needs. A backup of its log, or a mirror, is "
    "a better way."
)
_ACCEPTING = (
    "Commits of {} that are not in its log as it is now are given up. Lost for good is every "
    "object that only they need."
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
    accept: list[str] | None = option(
        "--accept", "RUN", "Take the log of a run as a mirror or a backup put it back; repeatable."
    ),
    full: bool = flag(
        "--full", "Read every log, and compare it with notes of earlier collections."
    ),
    yes: bool = flag("--yes", "With --forget or --accept: do not ask."),
    shard: str | None = SHARD,
    dask: str | None = DASK,
) -> Answer:
    """Delete the objects that no run needs any more.

    Safe while others save, read, sync and collect. If a collection is killed, the next one finishes
    it. It stops before it deletes anything if a run cannot be read. If nothing can mend that run,
    --forget gives it up: what only that run needs is deleted, and the other runs keep all they
    need. If a mirror or a backup put the log of a run back, --accept takes it as it is.
    """
    asks = not (yes or dry_run)
    for name in forget or () if asks else ():
        output.confirm_name(name, "forget", _FORGETTING.format(name))
    for name in accept or () if asks else ():
        output.confirm_name(name, "accept", _ACCEPTING.format(name))
    with workers_at(dask) as executor:
        report = opened.gc(
            grace_s=grace,
            forget=forget or (),
            accept=accept or (),
            full=full,
            dry_run=dry_run,
            shard=shard,
            executor=executor,
            progress=advance,
        )
    return Answer(lambda: _collected_json(report), lambda: _collected_text(report, shard))


def _collected_json(report: GcReport) -> dict[str, Any]:
    tallies = picked(report, "objects condemned spared recent deleted stale")
    return {
        **picked(report, "dry_run epoch runs full forgotten accepted differing hidden_runs"),
        **picked(report, "freed_runs keeps"),
        **{name: picked(tally, "objects size_bytes") for name, tally in tallies.items()},
        **picked(report, "unfinished_bytes freed_bytes keeps_versions noncurrent_bytes"),
    }


def _collected_text(report: GcReport, shard: str | None) -> Iterator[Part]:
    sweep = "" if report.epoch is None else f", by sweep {report.epoch}"
    yield {
        "shard": shard,
        "looked at": f"{_tally_text(report.objects)}, of {output.counted(report.runs, 'run')}",
        "would forget" if report.dry_run else "forgot": ", ".join(report.forgotten) or None,
        "would accept" if report.dry_run else "accepted": ", ".join(report.accepted) or None,
        "dropped": f"{', '.join(report.hidden_runs)}: kept, since `undo` may bring them back"
        if report.hidden_runs
        else None,
        "keeps": "all that was evicted, thinned and dropped (drops --keep)"
        if report.keeps
        else None,
        "would free" if report.dry_run else "freed": ", ".join(report.freed_runs) or None,
        "would go": _tally_text(report.condemned) if report.dry_run else None,
        "deleted": None if report.dry_run else f"{_tally_text(report.deleted)}{sweep}",
        "spared": _some(report.spared, "a run uses them again"),
        "for now": _some(report.recent, "kept within the grace (--grace), so that undo works"),
        "stale": _some(report.stale, "old snapshots of logs, and probes", "file"),
        "unfinished": f"{output.size(report.unfinished_bytes)} of dead writers"
        if report.unfinished_bytes
        else None,
    }
    if report.differing:
        yield (
            f"Notes of earlier collections differ from the logs of {', '.join(report.differing)}. "
            "The logs counted. Run `holdfast verify`: an earlier collection may have been wrong."
        )
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
