"""`prune`, `evict` and `undo`: checkpoints evicted, and brought back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from holdfast.registry.cli import describe, options, output
from holdfast.registry.cli.columns import Column, Table, numbers
from holdfast.registry.cli.command import Answer, answer_of, command
from holdfast.registry.cli.opening import writes
from holdfast.registry.cli.options import argument, flag, option
from holdfast.registry.cli.output import Part
from holdfast.registry.curation import checkpoint_marks
from holdfast.registry.face import Registry, find_evicted
from holdfast.registry.history import RetentionPlan, Verdict

_PLAN = (
    Column("phase"),
    *numbers("step"),
    Column("id", text=describe.short, drop=1),
    Column("tier", none="-", drop=2),
    Column("is"),
    Column("why", "reasons", ", ".join, folds=True),
)


@command(writes, table=True)
def prune(
    opened: Registry,
    *,
    run: options.Run,
    last: int | None = options.LAST,
    best: int | None = options.BEST,
    every: int | None = options.EVERY,
    days: int | None = options.DAYS,
    dry_run: bool = flag("--dry-run", "Only show which would be kept and evicted."),
) -> Answer:
    """Evict the checkpoints that retention does not keep.

    The policy is that of the run, or the one that the options give. The newest and the best one,
    gates, tags and checkpoints that a follower holds are always kept. `undo` brings evicted
    checkpoints back.
    """
    own = options.retention(last, best, every, days)
    pruned = opened.run(run)
    if best is not None:
        for phase in dict.fromkeys(record.phase for record in pruned.manifest.live()):
            pruned.monitor(phase)  # raises if no monitor decides which are best
    plan = pruned.prune(own, dry_run=dry_run)
    return Answer(
        lambda: {
            "run": run,
            "dry_run": dry_run,
            "kept": _verdicts(run, plan.kept),
            "evicted": _verdicts(run, plan.evicted),
        },
        lambda: _text(run, plan, dry_run=dry_run),
    )


def _verdicts(run: str, verdicts: Sequence[Verdict]) -> list[dict[str, Any]]:
    return [
        {**describe.record_json(run, one.checkpoint, []), "reasons": list(one.reasons)}
        for one in verdicts
    ]


def _text(run: str, plan: RetentionPlan, *, dry_run: bool) -> Iterator[Part]:
    fates = [(one, "kept") for one in plan.kept] + [(one, "goes") for one in plan.evicted]
    fates.sort(key=lambda pair: pair[0].checkpoint.n)
    rows = _verdicts(run, [one for one, _ in fates])
    more = ({"tier": one.checkpoint.tier, "is": fate} for one, fate in fates)
    if rows:
        yield Table(_PLAN, [row | also for row, also in zip(rows, more, strict=True)])
    went = "would go" if dry_run else "evicted"
    kept = output.counted(len(plan.kept), "checkpoint")
    yield f"{kept} kept, {len(plan.evicted)} {went}"


@command(writes)
def evict(
    opened: Registry,
    *,
    ref: options.Ref,
    reason: str = option("--reason", "TEXT", "The reason, for the log.", default=...),
) -> Answer:
    """Evict one checkpoint.

    The newest and the best one, gates, tags and checkpoints that a follower holds are refused.
    `undo` brings it back.
    """
    found = opened.checkpoint(ref)
    opened.run(found.run_id).evict(found, reason)
    return answer_of(
        describe.record_json(found.run_id, found.record, []),
        f"evicted: {found.ref}  {found.digest.short}",
    )


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
) -> Answer:
    """Bring evicted checkpoints back.

    Without a REF, all of the last eviction. Retention does not evict them again. Checkpoints that
    `gc` has deleted meanwhile cannot come back.
    """
    into = opened.run(run)
    handle = into.handle
    back = into.undo(*(find_evicted(handle.store, handle.log, ref) if ref else ()))
    marks = checkpoint_marks(into.manifest)
    return answer_of(
        [describe.record_json(run, one.record, marks.get(one.n, [])) for one in back],
        *(f"back: {one.ref}  {one.digest.short}" for one in back),
    )
