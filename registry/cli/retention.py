"""`prune` and `undo`: checkpoints let go, and brought back."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from registry.checkpoint import Checkpoint, phase_segment
from registry.cli import describe, options, output
from registry.cli.columns import Column
from registry.errors import AmbiguousRef, NotFound
from registry.refs import is_digest
from registry.registry import open  # noqa: A004
from registry.retention import RetentionPlan, Verdict
from registry.run import Run
from registry.spec import Retention
from registry.suggest import near

_STEP = re.compile(r"\d{1,16}$")
_PLAN = (
    Column("phase"),
    Column("step", is_number=True),
    Column("id"),
    Column("tier"),
    Column("is"),
    Column("why", folds=True),
)


def prune(
    run: options.Run,
    registry: options.Registry,
    *,
    last: Annotated[
        int | None, typer.Option("--last", min=1, metavar="N", help="Keep the newest N.")
    ] = None,
    best: Annotated[
        int | None, typer.Option("--best", min=1, metavar="N", help="Keep the best N.")
    ] = None,
    every: Annotated[
        int | None, typer.Option("--every", min=1, metavar="N", help="Keep every N steps.")
    ] = None,
    days: Annotated[
        int | None, typer.Option("--days", min=1, metavar="N", help="Keep those younger than this.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would become of what.")
    ] = False,
    json: options.Json = False,
) -> None:
    """Let go of the checkpoints that retention does not keep.

    By the run's own policy, or by the one that is given. The newest and the best ones, gates, tags
    and what a follower holds stay in any case. `undo` brings back what went.
    """
    own = None
    if any(number is not None for number in (last, best, every, days)):
        own = Retention(last=last, best=best, every=every, for_days=days)
    with open(registry, read_only=dry_run) as opened:
        pruned = opened.run(run)
        if best is not None:
            for phase in dict.fromkeys(record.phase for record in pruned.manifest.live()):
                pruned.monitor(phase)  # or say that nothing decides which are the best
        plan = pruned.prune(own, dry_run=dry_run)
    if json:
        output.document(_plan_json(run, plan, dry_run=dry_run))
        return
    if plan.kept or plan.evicted:
        output.table(_PLAN, _plan_rows(plan))
    went = "would go" if dry_run else "evicted"
    output.line(f"{output.counted(len(plan.kept), 'checkpoint')} kept, {len(plan.evicted)} {went}")


def _plan_json(run: str, plan: RetentionPlan, *, dry_run: bool) -> dict[str, Any]:
    def shapes(verdicts: Sequence[Verdict]) -> list[dict[str, Any]]:
        return [
            {
                **describe.record_json(run, verdict.checkpoint, []),
                "reasons": list(verdict.reasons),
            }
            for verdict in verdicts
        ]

    return {
        "run": run,
        "dry_run": dry_run,
        "kept": shapes(plan.kept),
        "evicted": shapes(plan.evicted),
    }


def _plan_rows(plan: RetentionPlan) -> list[tuple[object, ...]]:
    verdicts = [("kept", one) for one in plan.kept] + [("goes", one) for one in plan.evicted]
    verdicts.sort(key=lambda pair: pair[1].checkpoint.n)
    return [
        (
            one.checkpoint.phase,
            one.checkpoint.step,
            one.checkpoint.manifest.short,
            one.checkpoint.tier or "-",
            fate,
            ", ".join(one.reasons),
        )
        for fate, one in verdicts
    ]


def undo(
    run: options.Run,
    registry: options.Registry,
    ref: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="REF",
            help="PHASE/stepN or ID, RUN/ before it or not; the last eviction's without.",
        ),
    ] = None,
    *,
    json: options.Json = False,
) -> None:
    """Bring evicted checkpoints back.

    All of the last eviction where none is named. Retention lets them alone from then on. What
    collection has removed meanwhile cannot come back.
    """
    with open(registry) as opened:
        into = opened.run(run)
        back = into.undo(*_named(into, ref or ()))
        marks = describe.marks(into.manifest)
        shapes = [describe.record_json(run, one.record, marks.get(one.n, [])) for one in back]
        names = [(one.ref, one.digest.short) for one in back]
    if json:
        output.document(shapes)
        return
    for name, digits in names:
        output.line(f"back: {name}  {digits}")


def _named(run: Run, refs: Sequence[str]) -> list[Checkpoint]:
    """Return the evicted checkpoints that refs name, each once, in their order."""
    evicted = run.evicted() if refs else []
    found = {one.n: one for one in (_find(run, evicted, ref) for ref in refs)}
    return list(found.values())


def _find(run: Run, evicted: Sequence[Checkpoint], ref: str) -> Checkpoint:
    """Return the one evicted checkpoint that a ref names, with or without the run before it.

    Raises:
        NotFound: None of them.
        AmbiguousRef: Several: a step that training came by again.
    """
    path = ref.removeprefix(f"{run.id}/")
    fitting = [one for one in evicted if _fits(one, path)]
    if not fitting:
        kept = any(_fits(one, path) for one in run.checkpoints())
        raise NotFound(
            "no evicted checkpoint of this name",
            where=f"{run.id}/{path}",
            expected="PHASE/stepN or 8 and more digits of an id",
            found="a checkpoint that is kept" if kept else None,
            hint=_near(path, evicted) or "`holdfast ls --evicted` lists them.",
        )
    if len({one.digest for one in fitting}) > 1:
        raise AmbiguousRef(
            "several evicted checkpoints have this name",
            where=f"{run.id}/{path}",
            found=", ".join(one.digest.short for one in fitting),
            hint="Name one by its id.",
        )
    return fitting[-1]


def _near(path: str, evicted: Sequence[Checkpoint]) -> str | None:
    """Return near names of the same step: another step is another checkpoint, not a slip."""
    number = _STEP.search(path)
    return near(path, [_path(one) for one in evicted if number and one.step == int(number[0])])


def _path(checkpoint: Checkpoint) -> str:
    return f"{phase_segment(checkpoint.record.phase)}/step{checkpoint.step}"


def _fits(checkpoint: Checkpoint, path: str) -> bool:
    if is_digest(path):
        return checkpoint.digest.hex().startswith(path.removeprefix("sha256:"))
    phase, _, step = path.rpartition("/step")
    named = phase in (checkpoint.record.phase, phase_segment(checkpoint.record.phase))
    return named and step.isdigit() and int(step) == checkpoint.step
