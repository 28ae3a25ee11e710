"""The checkpoints of a run, each with the reason why it stays or was evicted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from holdfast.registry.curation import checkpoint_marks
from holdfast.registry.history import has_policies, plan_retention, step_ref
from holdfast.registry.history.replay import RunManifest
from holdfast.registry.ui.pages.events import Event
from holdfast.registry.ui.pages.runs import monitor_of
from holdfast.registry.ui.pages.values import Saved
from holdfast.registry.ui.source import now_ms
from holdfast.registry.upkeep import Damage


@dataclass(frozen=True, slots=True)
class CheckpointRow:
    """A checkpoint of the run."""

    ref: str  # its name within the run
    saved: Saved  # its record from the log
    state: str  # `kept`, `evicted` or `superseded`
    reason: str  # why it stays or was evicted
    marks: tuple[str, ...]  # names that point at it
    value: float | None  # its value of the run's listed metric


def read_rows(
    saved: Sequence[Saved], events: Iterable[Event], run: RunManifest | None, damage: Damage
) -> Iterable[CheckpointRow]:
    """Yield the checkpoints in log order; `run` is `None` if it cannot be read."""
    went = {one.checkpoint: one for one in events if one.lane == "retention"}
    stays = {} if run is None else _reasons(run)
    marks = {} if run is None else _marks(run, damage)
    monitor = None if run is None else monitor_of(run)
    for one in saved:
        last = went.get(one.n)
        is_evicted = last is not None and last.kind == "evict"
        state = "evicted" if is_evicted else "superseded" if one.is_superseded else "kept"
        reason = last.reason if last is not None and is_evicted else stays.get(one.n, "")
        yield CheckpointRow(
            ref=step_ref(one),
            saved=one,
            state=state,
            reason=reason,
            marks=tuple(mark for mark in marks.get(one.n, ()) if mark not in (state, "evicted")),
            value=None if monitor is None else monitor.measured(one.metrics),
        )


def _marks(run: RunManifest, damage: Damage) -> dict[int, list[str]]:
    """Return the names that point at each checkpoint, its releases, and whether it is damaged."""
    found = checkpoint_marks(run)
    for record in run.checkpoints:
        if damage.marks(run.run_id, record):
            found.setdefault(record.n, []).insert(0, "damaged")
    for pin in run.pins_of("release"):
        if pin.checkpoint is not None:
            found.setdefault(pin.checkpoint, []).append(pin.ref)
    return found


def _reasons(run: RunManifest) -> dict[int, str]:
    """Return why the run keeps its checkpoints, by the numbers of their commits."""
    if not has_policies(run.spec):
        return {one.n: "no retention policy: everything stays" for one in run.checkpoints}
    plan = plan_retention(run, now_ms())
    kept = {one.checkpoint.n: "; ".join(one.reasons) for one in plan.kept}
    going = {
        one.checkpoint.n: f"goes with the next save: {'; '.join(one.reasons)}"
        for one in plan.evicted
    }
    return kept | going
