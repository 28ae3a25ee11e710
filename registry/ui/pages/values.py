"""The metrics of checkpoints: of kept ones from their run, of evicted ones from its log."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from holdfast.registry.history import actions
from holdfast.registry.history.actions import Commit
from holdfast.registry.history.replay import CheckpointRecord, RunManifest
from holdfast.registry.ui.charts import Curve, Point
from holdfast.registry.values import Digest

#: Charts of metrics on one page.
MOST_CHARTS = 24


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint with its metrics."""

    n: int  # number of its commit
    id: Digest
    phase: str
    step: int
    time_ms: int  # when it was saved
    size_bytes: int  # bytes of its tensors
    metrics: Mapping[str, float]  # the newest value of each metric
    is_superseded: bool = False  # whether training went back to an earlier one


def saved_of(run: RunManifest | None, commits: Iterable[Commit]) -> tuple[Saved, ...]:
    """Return the kept checkpoints of a run, and the checkpoints that commits of its log added."""
    kept = {} if run is None else {one.n: _kept(one) for one in run.checkpoints}
    found = {one.n: one for one in _told(commits)} | kept
    return tuple(found[n] for n in sorted(found))


def _kept(one: CheckpointRecord) -> Saved:
    return Saved(
        one.n,
        one.manifest,
        one.phase,
        one.step,
        one.time_ms,
        one.size_bytes,
        one.metrics,
        one.superseded,
    )


def _told(commits: Iterable[Commit]) -> Iterable[Saved]:
    """Return the checkpoints that commits added, updated by the later commits."""
    found: dict[int, Saved] = {}
    for commit in commits:
        for action in commit.actions:
            match action:
                case actions.AddCheckpoint():
                    found[commit.n] = Saved(
                        commit.n,
                        action.manifest,
                        action.phase,
                        action.step,
                        commit.time_ms,
                        action.size_bytes,
                        dict(action.metrics),
                    )
                case actions.ReportMetrics() if action.checkpoint in found:
                    one = found[action.checkpoint]
                    metrics = {**one.metrics, **action.metrics}
                    found[one.n] = replace(one, metrics=metrics)
                case actions.Rewind():
                    since = -1 if action.to is None else action.to
                    for one in list(found.values()):
                        if one.n > since:
                            found[one.n] = replace(one, is_superseded=True)
    return found.values()


def metric_names(
    saved: Sequence[Saved], first: Iterable[str] = (), *, matching: str = ""
) -> tuple[str, ...]:
    """Return the names of metrics that any checkpoint has."""
    known = {name for one in saved for name in one.metrics if matching.lower() in name.lower()}
    ahead = [name for name in first if name in known]
    return tuple(dict.fromkeys([*ahead, *sorted(known)]))


def curves_of(saved: Sequence[Saved], metric: str, *, prefix: str = "") -> tuple[Curve, ...]:
    """Return the curves of a metric: one for each phase, superseded values apart."""
    found: dict[tuple[str, bool], list[Point]] = {}
    for one in saved:
        if metric in one.metrics:
            point = Point(one.step, one.time_ms, one.metrics[metric])
            found.setdefault((one.phase, one.is_superseded), []).append(point)
    phases = {phase for phase, _ in found}
    return tuple(
        Curve(
            _name(prefix, phase, len(phases), is_superseded=behind), tuple(points), behind, prefix
        )
        for (phase, behind), points in found.items()
    )


def _name(prefix: str, phase: str, phases: int, *, is_superseded: bool) -> str:
    own = prefix if prefix and phases == 1 else f"{prefix} {phase}".strip()
    return f"{own}, superseded" if is_superseded else own
