"""Compare two runs side by side: two branches of a fork, or a run and its repetition."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from holdfast.registry.comparing.state_diff import Diff, diff
from holdfast.registry.history import RunLog, ValueDiff, compare_configs, parent_ref, phase_segment
from holdfast.registry.history.actions import Parent
from holdfast.registry.history.replay import CheckpointRecord, RunManifest
from holdfast.registry.loading import CheckpointHandle
from holdfast.registry.store import Store
from holdfast.registry.values import markup


@dataclass(frozen=True, slots=True)
class StepPair:
    """A step that both runs, or one of them, have a checkpoint of."""

    phase: str
    step: int
    first: CheckpointRecord | None  # the checkpoint of the first run; `None` where it has none
    second: CheckpointRecord | None  # the checkpoint of the second run

    @property
    def is_same(self) -> bool | None:
        """Whether both are the same state; `None` if one of them is absent."""
        if self.first is None or self.second is None:
            return None
        return self.first.manifest == self.second.manifest


@dataclass(frozen=True, slots=True, repr=False)
class Branches:
    """Two runs side by side.

    Attributes:
        first: Name of the first run.
        second: Name of the second.
        fork: The checkpoint that both continue from; `None` if they have none in common.
        settings: Differences of seed, preset and input hash.
        config: Differences of the configurations, by path.
        steps: The kept checkpoints from the fork on, in the order of the first run.
        difference: The differences at the first common step whose states differ; `None` if no
            common step differs.
        differs_at: That step.
    """

    first: str
    second: str
    fork: Parent | None
    settings: tuple[ValueDiff, ...]
    config: tuple[ValueDiff, ...]
    steps: tuple[StepPair, ...]
    difference: Diff | None
    differs_at: StepPair | None

    def __repr__(self) -> str:
        facts = ", ".join(f"{name}={value!r}" for name, value in self._facts().items())
        return f"Branches({self.first!r}, {self.second!r}, {facts})"

    def _facts(self) -> dict[str, object]:
        at = self.differs_at
        return {
            "fork": None if self.fork is None else parent_ref(self.fork),
            "settings": len(self.settings),
            "config": len(self.config),
            "steps": len(self.steps),
            "differs_at": None if at is None else f"{phase_segment(at.phase)}/step{at.step}",
        }

    def _repr_html_(self) -> str:
        return markup.safely("Branches", self._html)

    def _html(self) -> str:
        values = [*self.settings, *self.config]
        newest = list(reversed(self.steps))
        return markup.describe(
            "Branches",
            f"{self.first} and {self.second}",
            self._facts(),
            markup.Rows(
                ("setting", self.first, self.second),
                ((one.name, one.before, one.after) for one in values),
                len(values),
                "settings",
            ),
            markup.Rows(
                ("step", self.first, self.second, "the same state"),
                (
                    (
                        one.step,
                        *(side and side.metrics for side in (one.first, one.second)),
                        one.is_same,
                    )
                    for one in newest
                ),
                len(newest),
                "steps",
            ),
        )


def compare_runs(store: Store, first: RunLog, second: RunLog) -> Branches:
    """Compare two runs; reads manifests, and no tensors."""
    one, two = first.run, second.run
    fork = _fork(store, one, two)
    steps = tuple(_steps(one, two, 0 if fork is None else fork.step))
    differs_at = next((pair for pair in steps if pair.is_same is False), None)
    difference = None
    if differs_at is not None and differs_at.first and differs_at.second:
        difference = diff(
            CheckpointHandle(store, first, differs_at.first),
            CheckpointHandle(store, second, differs_at.second),
        )
    return Branches(
        first=one.run_id,
        second=two.run_id,
        fork=fork,
        settings=tuple(_settings(one, two)),
        config=compare_configs(one.config, two.config),
        steps=steps,
        difference=difference,
        differs_at=differs_at,
    )


def _fork(store: Store, one: RunManifest, two: RunManifest) -> Parent | None:
    """Return the newest checkpoint that both runs continue from, as a fork records it."""
    ours, theirs = (dict(_ancestry(store, run)) for run in (one, two))
    for run_id, mine in ours.items():
        if run_id in theirs:
            shared = [origin for origin in (mine, theirs[run_id]) if origin is not None]
            return min(shared, key=lambda origin: origin.commit, default=None)
    return None


def _ancestry(store: Store, run: RunManifest) -> Iterator[tuple[str, Parent | None]]:
    """Yield a run and its ancestors, each with the point at which it was left for a fork."""
    left: Parent | None = None
    while True:
        yield run.run_id, left
        left = run.created.parent if run.created else None
        if left is None:
            return
        run = RunLog(store, left.run).open()


def _steps(one: RunManifest, two: RunManifest, since: int) -> Iterator[StepPair]:
    ours, theirs = (
        {(record.phase, record.step): record for record in run.live() if record.step >= since}
        for run in (one, two)
    )
    for phase, step in sorted({**ours, **theirs}, key=lambda key: (_order(one, key[0]), key[1])):
        yield StepPair(phase, step, ours.get((phase, step)), theirs.get((phase, step)))


def _order(run: RunManifest, phase: str) -> tuple[int, str]:
    phases = run.phases_saved
    return (phases.index(phase) if phase in phases else len(phases), phase)


def settings_of(run: RunManifest) -> dict[str, object]:
    """Return seed, preset and input hash of a run."""
    created = run.created
    return {
        "seed": int(created.seed, 16) if created else None,
        "preset": run.spec.name or None,
        "input_hash": created.input_hash if created else None,
    }


def _settings(one: RunManifest, two: RunManifest) -> Iterator[ValueDiff]:
    theirs = settings_of(two)
    for name, ours in settings_of(one).items():
        if ours != theirs[name]:
            yield ValueDiff("changed", name, ours, theirs[name])
    if one.spec != two.spec and one.spec.name == two.spec.name:
        yield ValueDiff("changed", "rules", f"those of {one.run_id}", f"those of {two.run_id}")
