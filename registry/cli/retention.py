"""`prune`, `rm`, `undo`: evict checkpoints, and bring them back; `hold`; `note`; `du`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from holdfast.registry.cli import completing, describe, options, output
from holdfast.registry.cli.columns import Column, Table, numbers
from holdfast.registry.cli.command import Answer, answer_of, command
from holdfast.registry.cli.describe import picked
from holdfast.registry.cli.failures import mark
from holdfast.registry.cli.listing import Listing
from holdfast.registry.cli.opening import DASK, address_of, reads, workers_at, writes
from holdfast.registry.cli.options import argument, flag, option
from holdfast.registry.cli.output import Note, Part
from holdfast.registry.cli.run_listing import FORM, run_json, summary
from holdfast.registry.curation import checkpoint_marks
from holdfast.registry.errors import (
    Conflict,
    IntegrityError,
    InvalidInput,
    NotFound,
    RegistryError,
)
from holdfast.registry.face import Registry, Run, find_evicted
from holdfast.registry.history import RetentionPlan, Verdict, has_policies, kept_ref
from holdfast.registry.history.replay import RunManifest
from holdfast.registry.loading import Checkpoint
from holdfast.registry.upkeep import RunUsage, Usage, measure, ways_to_free
from holdfast.registry.values import abridged, near

_PLAN = (
    Column("phase"),
    *numbers("step"),
    Column("id", text=describe.short, drop=1),
    Column("tier", none="-", drop=2),
    Column("is"),
    Column("why", "reasons", ", ".join, folds=True),
)
_SIZES = (
    *numbers("own=own_bytes", text=output.size, none="-", drop=1),
    *numbers("shared=shared_bytes", text=output.size, none="-", drop=2),
    *numbers("freed=freed_bytes", text=output.size, none="-"),
)
_RUNS = (Column("run"), *numbers("states", drop=3), *_SIZES)
_STATES = (Column("state", "ref"), *_SIZES)
_WAYS = (
    Column("what"),
    Column("runs", text=lambda names: abridged(names, ", ", most=3) or "-", folds=True),
    *numbers("states", drop=1),
    *numbers("freed=freed_bytes", text=output.size),
    Column("command"),
)
_BY = ("owner", "project", "run", "phase")
#: The exit status of `du --over` if something is over.
OVER = 10


@command(writes, table=True)
def prune(
    opened: Registry,
    *,
    run: Annotated[
        str,
        typer.Argument(
            envvar="HOLDFAST_RUN", metavar="RUN", help="Name of a run, or a pattern: 'sweep-*'."
        ),
    ],
    last: int | None = options.LAST,
    best: int | None = options.BEST,
    every: int | None = options.EVERY,
    days: int | None = options.DAYS,
    thin: list[str] | None = options.THIN,
    dry_run: bool = flag("--dry-run", "Only show which would be kept, thinned and evicted."),
    count: bool = flag("--bytes", "With --dry-run: count what evictions would free, as `du` does."),
) -> Answer:
    """Evict the checkpoints that retention does not keep.

    The policy is that of the run, or the one that the options give. The newest and the best one,
    gates, tags, and checkpoints that are held (`hold`) or that a follower holds are always kept.
    With --thin the others keep these components, and `gc` frees the rest of them. `undo` brings
    evicted and thinned checkpoints back. A pattern passes over dropped runs, and over those
    without a policy.
    """
    if count and not dry_run:
        raise typer.BadParameter("--bytes is for --dry-run")
    own = options.retention(last, best, every, days, thin)
    several, listing = options.is_pattern(run), Listing(opened)
    runs: list[Run] = []
    passed_over: list[Run] = []
    names = options.matching([run], opened.run_names)
    for one in listing.runs(names) if several else [opened.run(run)]:
        found = one.manifest
        can = found.dropped is None and (own is not None or has_policies(found.spec))
        (runs if can or not several else passed_over).append(one)
    if best is not None:
        for one in runs:
            for phase in dict.fromkeys(record.phase for record in one.manifest.live()):
                one.phases.monitor(phase)  # raises if no monitor decides which are best
    plans: dict[str, RetentionPlan] = {}
    for one in runs:
        try:
            plans[one.id] = one.retention.prune(own, dry_run=dry_run)
        except (Conflict, IntegrityError) as error:
            if not several:
                raise
            listing.damaged[one.id] = error
    freed = _freed_bytes(opened, plans) if count else None
    documents = [
        {
            "run": name,
            "dry_run": dry_run,
            "freed_bytes": freed,
            "kept": _verdicts(name, plan.kept),
            "thinned": _verdicts(name, plan.thinned),
            "evicted": _verdicts(name, plan.evicted),
        }
        for name, plan in plans.items()
    ]
    passed = abridged([one.id for one in passed_over], ", ")
    return Answer(
        lambda: documents if several else documents[0],
        lambda: _text(plans, [Column("run")] if several else [], dry_run=dry_run, freed=freed),
        [f"passed over, dropped or without a retention policy: {passed}"] if passed else (),
        damaged=listing.damaged,
    )


def _freed_bytes(opened: Registry, plans: Mapping[str, RetentionPlan]) -> int:
    """Return the bytes that only the checkpoints which would go need."""
    going = {
        f"{name}/{kept_ref(one.checkpoint)}" for name, plan in plans.items() for one in plan.evicted
    }
    by = lambda run, phase, ref: "goes" if ref in going else "stays"  # noqa: ARG005, E731
    usage = measure(opened.handle.store, by=by)
    return sum(one.own_bytes for one in usage.runs if one.run == "goes")


def _verdicts(run: str, verdicts: Sequence[Verdict]) -> list[dict[str, Any]]:
    return [
        {**describe.record_json(run, one.checkpoint, []), "reasons": list(one.reasons)}
        for one in verdicts
    ]


def _text(
    plans: Mapping[str, RetentionPlan], first: Sequence[Column], *, dry_run: bool, freed: int | None
) -> Iterator[Part]:
    rows = [row for run, plan in plans.items() for row in _rows(run, plan)]
    if rows:
        yield Table([*first, *_PLAN], rows)
    went = "would go" if dry_run else "evicted"
    kept = output.counted(sum(len(plan.kept) for plan in plans.values()), "checkpoint")
    thinned = sum(len(plan.thinned) for plan in plans.values())
    also = f"{thinned} {'would be thinned' if dry_run else 'thinned'}, " if thinned else ""
    evicted = sum(len(plan.evicted) for plan in plans.values())
    yield f"{kept} kept, {also}{evicted} {went}"
    if freed is not None:
        yield f"gc and repack would free {output.size(freed)} after these evictions"
    elif dry_run and evicted:
        yield Note("--bytes counts what the evictions would free")


def _rows(run: str, plan: RetentionPlan) -> list[dict[str, Any]]:
    fates = [(one, "kept") for one in plan.kept] + [(one, "goes") for one in plan.evicted]
    fates += [(one, f"only {', '.join(one.only)}") for one in plan.thinned]
    fates.sort(key=lambda pair: pair[0].checkpoint.n)
    rows = _verdicts(run, [one for one, _ in fates])
    return [
        {**row, "tier": one.checkpoint.tier, "is": fate}
        for row, (one, fate) in zip(rows, fates, strict=True)
    ]


@command(writes)
def rm(opened: Registry, *, ref: options.Ref, reason: str = options.REASON) -> Answer:
    """Evict one checkpoint.

    The newest and the best one, gates, tags and checkpoints that a follower holds are refused.
    `undo` brings it back. `run rm` drops a whole run, and `tag rm` removes a tag.
    """
    if ref in opened.run_names():
        raise InvalidInput(
            "a run, not a checkpoint", where=ref, hint=f"`holdfast run rm {ref}` drops the run."
        )
    if ref.partition("/")[2].startswith("tags/"):
        raise InvalidInput(
            "a tag, which keeps its checkpoint",
            where=ref,
            hint=f"`holdfast tag rm {ref}` removes it.",
        )
    found = opened.checkpoint(ref)
    opened.run(found.run_id).retention.evict(found, reason)
    return answer_of(
        describe.record_json(found.run_id, found.handle.newest_record(), []),
        f"evicted: {found.ref}  {found.digest.short}",
    )


def _subject(opened: Registry, ref: str) -> tuple[Run, Checkpoint | None, str]:
    """Return the run and the checkpoint that a ref names, without one for the name of a run."""
    checkpoint = None if ref in opened.run_names() else opened.checkpoint(ref)
    run = opened.run(ref if checkpoint is None else checkpoint.run_id)
    return run, checkpoint, ref if checkpoint is None else checkpoint.ref


_SUBJECT = argument("RUN|REF", "A run, or a checkpoint: RUN/best.", autocompletion=completing.REFS)


@command(writes)
def note(
    opened: Registry,
    *,
    ref: str = _SUBJECT,
    text: str | None = argument("TEXT", "The note, in place of the one before.", default=None),
    file: Path | None = option("--file", "FILE", "A file of plain text with the note."),
    remove: bool = flag("--rm", "Remove the note."),
) -> Answer:
    """Write a note on a run or a checkpoint.

    It is plain text of at most 10,000 bytes. `run show` and the pages show it, `log` has earlier
    ones. Older versions of Holdfast refuse a run that has a note.
    """
    if [text, file, remove or None].count(None) != 2:
        raise typer.BadParameter("give TEXT, --file or --rm")
    run, checkpoint, named = _subject(opened, ref)
    run.history.set_note(text or "" if file is None else options.note_of(file), checkpoint)
    written = run.manifest.note(None if checkpoint is None else checkpoint.handle.n)
    if written is None:
        return answer_of({"ref": named, "text": ""}, f"no note: {named}")
    return answer_of(describe.note_json(run, written), f"noted: {named}")


@command(writes)
def hold(
    opened: Registry,
    *,
    ref: str = _SUBJECT,
    until: str | None = option(
        "--until", "DATE", "The end: 2027-01-31, or with a time; UTC unless it names a time zone."
    ),
    reason: str = options.REASON,
    off: bool = flag("--off", "End the hold early; it takes the rights of a collector."),
) -> Answer:
    """Hold a run or a checkpoint until a date: nothing evicts or drops it.

    Nothing thins or supersedes it either. The date counts by the store's clock; a later date
    replaces an earlier one. Of a run, the hold keeps everything in it. It binds programs that keep
    the rules of Holdfast; against others the bucket needs Object Lock.
    """
    if (until is None) != off:
        raise typer.BadParameter("give --until, or --off to end a hold")
    run, checkpoint, named = _subject(opened, ref)
    if until is None:
        run.retention.unhold(checkpoint, reason=reason)
        return answer_of({"ref": named, "until": None}, f"not held: {named}")
    run.retention.hold(checkpoint, until=options.moment(until), reason=reason)
    held = run.manifest.hold(None if checkpoint is None else checkpoint.handle.n)
    assert held is not None  # it was just set
    shape = describe.hold_json(run, held)
    return answer_of(shape, f"held: {named} until {shape['until']}")


@command(writes)
def undo(
    opened: Registry,
    *,
    run: options.Run,
    ref: list[str] | None = argument(
        "REF",
        "PHASE/stepN or ID, with or without RUN/; by default the last eviction.",
        default=None,
    ),
    mirror: str | None = option(
        "--from", "URL", "A registry that has the dropped run, if it was freed since."
    ),
    mirror_storage_option: list[str] | None = options.MIRROR_OPTION,
) -> Answer:
    """Bring back evicted and thinned checkpoints, or a dropped run.

    Of a dropped run, all that it held. Otherwise the checkpoints that are named, or all of the last
    eviction or thinning. Retention does not evict or thin them again. Checkpoints that `gc` has
    deleted meanwhile cannot come back.
    """
    into = opened.run(run)
    if not ref and (mirror is not None or into.manifest.dropped is not None):
        return _undropped(into, mirror, mirror_storage_option)
    handle = into.handle
    back = into.retention.undo(*(find_evicted(handle.store, handle.log, ref) if ref else ()))
    marks = checkpoint_marks(into.manifest)
    return answer_of(
        [
            describe.record_json(run, one.handle.newest_record(), marks.get(one.handle.n, []))
            for one in back
        ],
        *(f"back: {one.ref}  {one.digest.short}" for one in back),
    )


def _undropped(run: Run, mirror: str | None, given: list[str] | None) -> Answer:
    if mirror is None:
        run.retention.undrop()
    else:
        place = address_of(mirror, given, side="from")
        run.retention.undrop(place.url, storage_options=place.storage_options)
    held = output.counted(len(run.manifest.live()), "checkpoint")
    return Answer(lambda: run_json(run, None), lambda: [f"back: {run.id}, with {held}"])


@command(reads, bar="counting", table=True)
def du(
    opened: Registry,
    *,
    run: list[str] | None = argument("RUN", "Show each state of these runs.", default=None),
    by: str | None = option("--by", "|".join(_BY), "Count by one of these."),
    over: str | None = option(
        "--over", "SIZE", "Show only what needs more, such as 2TB; the exit status is then 10."
    ),
    free: bool = flag("--free", "Show what can be deleted, and by which command."),
    dask: str | None = DASK,
) -> Answer:
    """Show how many bytes runs and checkpoints use and would free.

    Counts bytes as they are stored, without reading data. `own` is needed by nothing else. `freed`
    is what gc and repack can free once the run is dropped or the checkpoint is evicted. With --by,
    `needed` has the bytes that several groups need in each of them. Nothing stops a save.
    """
    if free:
        if run or by or over:
            raise typer.BadParameter("--free is about the whole registry, without --by and --over")
        return _ways(opened, dask)
    if by or over:
        if run:
            raise typer.BadParameter("--by and --over are about the whole registry")
        return _groups(opened, by or "run", options.size_bytes(over) if over else None, dask)
    with workers_at(dask) as executor:
        usage = measure(opened.handle.store, executor=executor)
    chosen = _chosen(usage, run or [one.run for one in usage.runs])
    damaged = {name: error for name, error in usage.damaged.items() if not run or name in run}
    return Answer(
        lambda: _usage_json(usage, chosen),
        lambda: _usage_text(usage, chosen, damaged, by_state=bool(run)),
        damaged=damaged,
    )


def _ways(opened: Registry, dask: str | None) -> Answer:
    """Say what can be deleted, and by which command."""
    with workers_at(dask) as executor:
        ways, damaged = ways_to_free(opened.handle.store, executor=executor)
    rows = [picked(one, "what runs states freed_bytes command") for one in ways]
    freed = sum(one.freed_bytes for one in ways)
    total = ["", f"{output.size(freed)} together, at least"] if ways else []
    return Answer(
        lambda: rows,
        lambda: [Table(_WAYS, rows, none="nothing to free: runs keep all that is stored"), *total],
        damaged=damaged,
    )


def _groups(opened: Registry, by: str, over: float | None, dask: str | None) -> Answer:
    """Count by groups of states; with `over` only those that need more."""
    if by not in _BY:
        raise InvalidInput("nothing to count by", where="--by", expected=", ".join(_BY), found=by)
    listing = Listing(opened)
    rows = listing.summaries(summary, FORM) if by == "owner" else {}
    owners = {name: one["row"]["owner"] or "-" for name, one in rows.items()}

    def group(run: RunManifest, phase: str, _: str) -> str:
        match by:
            case "owner":
                return str(owners.get(run.run_id, "-"))
            case "project":
                return (run.created and run.created.project) or "-"
            case "phase":
                return phase or "-"
        return run.run_id

    with workers_at(dask) as executor:
        usage = measure(opened.handle.store, executor=executor, by=group)
    found = [
        {by: one.run, "needed_bytes": one.needed_bytes, "own_bytes": one.own_bytes}
        for one in sorted(usage.runs, key=lambda one: (-one.needed_bytes, one.run))
        if over is None or one.needed_bytes > over
    ]
    sizes = numbers("needed=needed_bytes", "own=own_bytes", text=output.size)
    return Answer(
        lambda: found,
        lambda: [Table((Column(by), *sizes), found, none=f"no {by} needs more" if over else "")],
        status=OVER if over is not None and found else 0,
        damaged=usage.damaged,
    )


def _chosen(usage: Usage, names: list[str]) -> list[RunUsage]:
    known = {one.run: one for one in usage.runs}
    for name in names:
        if name not in known and name not in usage.damaged:
            raise NotFound(
                "no such run",
                where=name,
                hint=near(name, known) or "`du` takes names of runs; `holdfast run ls` lists them.",
            )
    return [known[name] for name in dict.fromkeys(names) if name in known]


def _usage_text(
    usage: Usage, chosen: list[RunUsage], damaged: Mapping[str, RegistryError], *, by_state: bool
) -> Iterator[Part]:
    if by_state:
        yield Table(_STATES, [state for one in chosen for state in _run_json(one)["states"]])
    elif chosen or damaged:
        rows = {one.run: {**_run_json(one), "states": len(one.states)} for one in chosen}
        rows |= {name: {"run": name, "states": mark(error)} for name, error in damaged.items()}
        yield Table(_RUNS, [rows[name] for name in sorted(rows)])
    if chosen or damaged:
        yield ""
    yield _sums(usage)


def _sums(usage: Usage) -> dict[str, object]:
    needed, shared = usage.own_bytes + usage.shared_bytes, output.size(usage.shared_bytes)
    dead = {"repack": usage.dead_bytes, "gc": usage.unneeded_bytes}
    removed = [f"{output.size(nbytes)} for {name}" for name, nbytes in dead.items() if nbytes]
    hidden = sum(one.own_bytes for one in usage.runs if one.is_hidden)
    until = f"; dropped runs hold {output.size(hidden)} until gc frees them (holdfast drops)"
    needed_text = f"{output.size(needed)}, of which several states share {shared}"
    return {
        "needed": needed_text + until * (hidden > 0),
        "dead": ", ".join(removed) or "0 B",
        "tables": f"{output.size(usage.table_bytes)} of packs",
        "logs": output.size(usage.log_bytes),
        "other": output.size(usage.other_bytes),
        "total": output.size(usage.total_bytes),
    }


def _usage_json(usage: Usage, runs: list[RunUsage]) -> dict[str, Any]:
    sums = "total_bytes own_bytes shared_bytes dead_bytes unneeded_bytes table_bytes log_bytes"
    return {
        **picked(usage, f"{sums} other_bytes"),
        "runs": [_run_json(run) for run in runs],
        "damaged": {name: error.summary for name, error in usage.damaged.items()},
    }


def _run_json(run: RunUsage) -> dict[str, Any]:
    states = [picked(one, "ref id own_bytes shared_bytes freed_bytes") for one in run.states]
    sizes = picked(run, "run own_bytes shared_bytes freed_bytes log_bytes")
    return {**sizes, "hidden": run.is_hidden, "states": states}
