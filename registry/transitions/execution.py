"""One transition under way: from where, what it makes, and what its commit says.

Nothing is committed before every check has passed; then the phase, the anchors of the pool and the
archived streams become visible together. Who may do it is the business of the trainer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from holdfast.registry import pytree
from holdfast.registry.errors import Conflict, IncompatibleState, InvalidInput, NotFound
from holdfast.registry.history.actions import Action, AppliedRow, ArchiveStream, EnterPhase
from holdfast.registry.history.log_values import check_phase
from holdfast.registry.history.replay import CheckpointRecord, PhaseRecord, Pin, RunManifest
from holdfast.registry.loading.checkpoint import Checkpoint, phase_segment
from holdfast.registry.loading.load_to_train import load_to_train
from holdfast.registry.loading.stored import Stored
from holdfast.registry.names.pins import find_pin
from holdfast.registry.pool.promotion import Candidate, find_entry, promotion
from holdfast.registry.pool.ratings import DEFAULT
from holdfast.registry.spec import Transition
from holdfast.registry.spec.requirements import check_phase_is_declared, inference_parts
from holdfast.registry.spec.seeds import child, phase_number, phase_sequence
from holdfast.registry.training.trainer import Trainer
from holdfast.registry.transitions import readiness
from holdfast.registry.transitions.rows import Applied, Begun, Initialise, Table
from holdfast.registry.values.digest import Digest
from holdfast.registry.values.gc_pause import collector_paused
from holdfast.registry.values.process import require_first_rank
from holdfast.registry.values.suggest import near
from holdfast.registry.writing.change import NewCommit, Stale, after_commit
from holdfast.registry.writing.committer import Committer
from holdfast.registry.writing.placing import Written

if TYPE_CHECKING:
    from numpy.random import SeedSequence

_NAMED_AT_MOST = 12


@dataclass(frozen=True, slots=True)
class Transitioned:
    """What a phase begins with.

    Attributes:
        state: Parts carried along, frozen copies, parts made new; what is reset otherwise is not in
            it, and the caller makes it.
        companions: Frozen states that every checkpoint of the phase has beside it.
        seeds: What is seeded anew, by name.
        checkpoint: The source.
        report: Every row that was applied, in the order of the table.
    """

    state: dict[str, Any]
    companions: dict[str, dict[str, Any]]
    seeds: dict[str, SeedSequence]
    checkpoint: Checkpoint
    report: tuple[Applied, ...]


@dataclass(frozen=True, slots=True)
class TransitionOptions:
    """The options of a transition; see `Run.transition`."""

    targets: Mapping[str, Any] | None
    metrics: Mapping[str, object] | None
    enable: str | Iterable[str]
    initialise: Initialise | None
    map_location: object


def transition(
    trainer: Trainer, committer: Committer, to: object, options: TransitionOptions
) -> Transitioned:
    """Begin a phase by the declared way; see `Run.transition`."""
    require_first_rank()
    phase = check_phase(to)
    committer.log.refresh()
    check_phase_is_declared(committer.log.run.spec, phase)
    passage = _Passage(committer, phase, options)
    trainer.commit(passage)
    return passage.outcome()


@dataclass(frozen=True, slots=True)
class _Way:
    """Where a transition leads from, in a run as it stands.

    Attributes:
        rules: The declared transition.
        checkpoint: Commit number of the source.
        manifest: Its id.
        anchors: Gates that enter the pool.
    """

    rules: Transition
    checkpoint: int
    manifest: Digest
    anchors: tuple[Pin, ...]


class _Passage(NewCommit):
    """A transition under way.

    What it makes depends on the run as the trainer takes it over, which only the commit knows. So
    the first time it writes nothing, and `actions` has it write again once it has seen the run.
    """

    def __init__(self, committer: Committer, to: str, options: TransitionOptions) -> None:
        enable = options.enable
        self._committer = committer
        self._to = to
        self._options = options
        self._enabled = frozenset([enable] if isinstance(enable, str) else enable)
        self._way: _Way | None = None
        self._table: Table
        self._begun: Begun | None = None
        self._ready: dict[str, float] = {}
        self._companions: dict[str, Written] = {}
        self._entries: list[tuple[Pin, Written]] = []

    def write_states(self) -> Sequence[Written]:
        """Check and make everything, and put what the commit names on the store."""
        way, committer = self._way, self._committer
        if way is None:
            return ()
        if self._begun is None:
            self._begun = self._make(way)
        bases = committer.choose_bases([way.manifest])
        with collector_paused():
            companions = {name: pytree.flatten(one) for name, one in self._begun.companions.items()}
        self._companions = {}
        for name, flat in companions.items():
            pytree.await_devices(flat)
            self._companions[name] = committer.write(flat, bases)
        self._entries = [
            (pin, committer.cut(pin.manifest, self._inference_parts(pin))) for pin in way.anchors
        ]
        return [*self._companions.values(), *(written for _, written in self._entries)]

    def actions(self, run: RunManifest) -> Sequence[Action] | None:
        """Return what the commit says; `None` if the phase was entered this way already."""
        entered = _entered(run, self._to)
        way = _find_way(run, entered, self._to)
        if way != self._way:
            self._way, self._begun = way, None
            raise Stale
        enter = self._enter(way)
        if entered is not None and _same(entered, enter):
            return None
        actions: list[Action] = [enter]
        for pin, written in self._entries:
            actions += self._promotion(after_commit(run, actions), pin, written)
        return actions + [
            ArchiveStream(stream=name, label=_label(run, name, way.rules.from_phase))
            for name in way.rules.archives
            if (stream := run.stream(name)) is not None and stream.count
        ]

    def outcome(self) -> Transitioned:
        """Return what the phase begins with, once it is entered."""
        assert self._way is not None  # a commit has been made, or found to stand
        assert self._begun is not None
        log, run = self._committer.log, self._committer.log.run
        assert run.created is not None  # it has a checkpoint
        seed, number = int(run.created.seed, 16), phase_number(run.spec, self._to)
        return Transitioned(
            state=self._begun.state,
            companions=self._begun.companions,
            seeds={
                name: phase_sequence(seed, number) if index is None else child(seed, number, index)
                for name, index in self._table.reseeded.items()
            },
            checkpoint=Checkpoint(self._committer.store, log, self._record(self._way)),
            report=self._table.applied,
        )

    def _make(self, way: _Way) -> Begun:
        """Load the source, hold it against every rule, and carry the table out."""
        committer, options = self._committer, self._options
        for name in sorted(self._enabled - way.rules.conditions):
            raise InvalidInput(
                "the transition knows no such condition",
                where=f"enable: {name}",
                expected=", ".join(sorted(way.rules.conditions)) or "none",
                hint=near(name, way.rules.conditions),
            )
        record = self._record(way)
        checkpoint = Checkpoint(committer.store, committer.log, record)
        # Whole and exactly this one: damage is an error, and nothing is fallen back to
        # (seeds/hydra.md, Gate checkpoint verification).
        source = load_to_train(checkpoint, options.map_location)
        self._table = Table(way.rules, self._enabled, source)
        self._ready, unready = readiness.readiness(way.rules, record.metrics, options.metrics)
        problems = [
            *readiness.differences(way.rules, source, options.targets or {}),
            *readiness.not_zero(way.rules, source),
            *unready,
            *self._table.problems,
        ]
        if problems:
            raise _unfit(way, checkpoint.ref, problems)
        for pin in way.anchors:
            if pin.manifest != way.manifest:
                self._stored(pin).load(only=self._inference_parts(pin))
        return self._table.carry_out(options.initialise or {})

    def _enter(self, way: _Way) -> EnterPhase:
        return EnterPhase(
            from_phase=way.rules.from_phase,
            to_phase=way.rules.to_phase,
            source=way.rules.source,
            manifest=way.manifest,
            rows=tuple(
                AppliedRow(part=one.part, change=one.change, to=one.to)
                for one in self._table.applied
            ),
            enabled=tuple(sorted(self._enabled)),
            ready=self._ready,
            companions={
                name: written.base.manifest.digest for name, written in self._companions.items()
            },
        )

    def _promotion(self, run: RunManifest, pin: Pin, written: Written) -> list[Action]:
        """Return what lets an anchor into the pool, unless it is in it already."""
        assert pin.checkpoint is not None  # replay has every gate name one
        record = run.record(pin.checkpoint)
        candidate = Candidate(
            manifest=written.base.manifest.digest,
            phase=record.phase,
            step=record.step,
            checkpoint=record.n,
            gate=pin.name,
            frozen=True,
        )
        if find_entry(run, candidate) is not None:
            return []
        # A league starts with ratings of its own (seeds/hydra.md, Phase 2 to 3, step 8).
        return promotion(run, candidate, DEFAULT)

    def _inference_parts(self, pin: Pin) -> list[str]:
        parts = self._stored(pin).manifest.components
        spec = self._committer.log.run.spec
        return inference_parts(spec, parts, where=f"{self._committer.log.run_id}/{pin.ref}")

    def _record(self, way: _Way) -> CheckpointRecord:
        """Return the source, which another writer may have evicted meanwhile."""
        return self._committer.log.knowing(way.checkpoint).by_n[way.checkpoint]

    def _stored(self, pin: Pin) -> Stored:
        return Stored(self._committer.store, self._committer.log, pin.manifest, pin.ref)


def _entered(run: RunManifest, to: str) -> PhaseRecord | None:
    """Return how the phase was entered, if training is in it and has saved nothing.

    Raises:
        Conflict: Training is in it, and has.
    """
    if run.phase != to:
        return None
    entered = run.entered(to)
    if entered is not None and not run.saved_in(to):
        return entered
    saved = next(run.newest_first(to), None)
    raise Conflict(
        "this phase is under way",
        where=f"{run.run_id}: phase {to}",
        found=f"its newest checkpoint at step {saved.step}" if saved else None,
        hint="To begin it anew call `run.restore(at=...)` with a checkpoint of the phase before.",
    )


def _find_way(run: RunManifest, entered: PhaseRecord | None, to: str) -> _Way:
    """Return the declared way into a phase, with the checkpoint that it begins from.

    Raises:
        InvalidInput: None is declared.
        NotFound: The source, or an anchor, is not there.
    """
    spec = run.spec
    before = entered.from_phase if entered else run.phase
    if before is None and spec.phases:
        before = spec.phases[0].name
    rules = spec.transition(before or "", to)
    if rules is None:
        ways = [one.to_phase for one in spec.transitions if one.from_phase == before]
        raise InvalidInput(
            "no transition is declared for this change of phase",
            where=f"{run.run_id}: from phase {before} to phase {to}",
            expected=f"to {', '.join(ways)}" if ways else "none from here",
            hint="Transitions are declared by the run's preset.",
        )
    record = _source(run, rules)
    anchors = tuple(find_pin(run, "gate", name) for name in rules.anchors)
    return _Way(rules, record.n, record.manifest, anchors)


def _source(run: RunManifest, rules: Transition) -> CheckpointRecord:
    kind, _, name = rules.source.partition("/")
    if name:
        pin = find_pin(run, "gate", name)
        assert pin.checkpoint is not None  # replay has every gate name one
        return run.record(pin.checkpoint)
    found = run.latest(rules.from_phase)
    if kind == "best":
        monitors = run.spec.phase(rules.from_phase).monitors
        found = run.best(monitors[0], rules.from_phase) if monitors else None
    if found is None:
        raise NotFound(
            "there is none yet",
            where=f"{run.run_id}/{phase_segment(rules.from_phase)}/{kind}",
            hint="The transition begins with it.",
        )
    return found


def _same(entered: PhaseRecord, enter: EnterPhase) -> bool:
    """Return whether a phase was entered just like this."""
    before = (entered.from_phase, entered.manifest, entered.rows, entered.companions)
    return before == (enter.from_phase, enter.manifest, enter.rows, enter.companions)


def _label(run: RunManifest, name: str, phase: str) -> str:
    """Return a free label for what a stream held until the end of a phase."""
    stream = run.stream(name)
    taken = {archive.label for archive in stream.archives} if stream else set()
    label, number = phase_segment(phase), 1
    while label in taken:
        number += 1
        label = f"{phase_segment(phase)}_{number}"
    return label


def _unfit(way: _Way, ref: str, problems: Sequence[str]) -> IncompatibleState:
    more = len(problems) - _NAMED_AT_MOST
    return IncompatibleState(
        f"the checkpoint is not fit to begin phase {way.rules.to_phase} with",
        where=f"{ref} ({way.rules.source})",
        found="; ".join(problems[:_NAMED_AT_MOST]) + (f"; and {more} more" if more > 0 else ""),
        hint="Nothing was changed.",
    )
