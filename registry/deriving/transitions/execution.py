"""Carry out one transition: find its source, check it, make the new state and commit.

Nothing is committed before every check has passed: strict parts fit, tensors that must be zero are,
metrics suffice. Then the phase, the anchors of the pool and the archived streams become visible
together. The trainer checks who may do it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from holdfast.backends.escape import quoted
from holdfast.registry import pytree
from holdfast.registry.curation import find_pin
from holdfast.registry.curation.pool import DEFAULT, Candidate, find_entry, promotion
from holdfast.registry.deriving.transitions.rows import Applied, Initialise, NewPhase, Table
from holdfast.registry.errors import Conflict, Hint, IncompatibleState, InvalidInput, NotFound
from holdfast.registry.history import check_metrics, check_phase, phase_segment
from holdfast.registry.history.actions import Action, AppliedRow, ArchiveStream, EnterPhase
from holdfast.registry.history.replay import (
    CheckpointRecord,
    PhaseRecord,
    Pin,
    RunManifest,
    StreamRecord,
)
from holdfast.registry.loading import Checkpoint, StateHandle, Stored, load_to_train
from holdfast.registry.pytree import traversal
from holdfast.registry.saving import RunHandle
from holdfast.registry.spec import (
    Readiness,
    Transition,
    check_phase_is_declared,
    child,
    first_of,
    inference_parts,
    phase_number,
    phase_sequence,
)
from holdfast.registry.values import Digest, abridged, collector_paused, near, require_first_rank
from holdfast.registry.writing import NewCommit, Stale, StateWriter, Written, after_commit

if TYPE_CHECKING:
    from numpy.random import SeedSequence

_Tensors = dict[str, tuple[str, tuple[int, ...]]]


@dataclass(frozen=True, slots=True)
class Transitioned:
    """The state, companions and seeds at the start of a phase, or after a pivot.

    Attributes:
        state: Carried parts, frozen copies, and new parts. Parts that are reset without a value
            from `initialise` are not in it; the caller makes them.
        companions: Frozen states that every checkpoint of the phase has.
        seeds: The seeds of reseeded parts, by name.
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
    """The options of a transition; see `RunPhases.transition`."""

    targets: Mapping[str, Any] | None
    metrics: Mapping[str, object] | None
    enable: str | Iterable[str]
    initialise: Initialise | None
    zero: str | Iterable[str] | None
    map_location: object


def transition(handle: RunHandle, to: object, options: TransitionOptions) -> Transitioned:
    """Begin a phase by a declared transition; see `RunPhases.transition`."""
    require_first_rank()
    phase = check_phase(to)
    handle.log.refresh()
    check_phase_is_declared(handle.log.run.spec, phase)
    commit = _TransitionCommit(handle.committer.writer, phase, options)
    handle.saver.commit(commit)
    return commit.outcome()


@dataclass(frozen=True, slots=True)
class _Origin:
    """The declared transition, and the checkpoint that it begins from."""

    rules: Transition
    checkpoint: int  # the commit number of the source
    manifest: Digest  # the id of the source
    anchors: tuple[Pin, ...]  # gates that enter the pool


class _TransitionCommit(NewCommit):
    """The commit of a transition.

    The new state depends on the run as the trainer takes it over, which only `actions` sees. So the
    first `write_states` writes nothing, and `actions` raises `Stale` to have it called again.
    """

    def __init__(self, writer: StateWriter, to: str, options: TransitionOptions) -> None:
        enable = options.enable
        self._writer = writer
        self._to = to
        self._options = options
        self._enabled = frozenset([enable] if isinstance(enable, str) else enable)
        self._origin: _Origin | None = None
        self._table: Table
        self._made: NewPhase | None = None
        self._ready: dict[str, float] = {}
        self._companions: dict[str, Written] = {}
        self._entries: list[tuple[Pin, Written]] = []

    def write_states(self) -> Sequence[Written]:
        """Check and make everything, and put the objects of the commit on the store."""
        origin, writer = self._origin, self._writer
        if origin is None:
            return ()
        if self._made is None:
            self._made = self._make(origin)
        bases = writer.choose_bases([origin.manifest])
        with collector_paused():
            companions = {name: pytree.flatten(one) for name, one in self._made.companions.items()}
        self._companions = {}
        for name, flat in companions.items():
            pytree.await_devices(flat)
            self._companions[name] = writer.write(flat, bases)
        self._entries = [
            (pin, writer.cut(pin.manifest, self._inference_parts(pin))) for pin in origin.anchors
        ]
        return [*self._companions.values(), *(written for _, written in self._entries)]

    def actions(self, run: RunManifest) -> Sequence[Action] | None:
        """Return the actions; `None` if the phase was entered with the same result already."""
        entered = _entered(run, self._to)
        origin = _find_origin(run, entered, self._to)
        if origin != self._origin:
            self._origin, self._made = origin, None
            raise Stale
        enter = self._enter(origin)
        if entered is not None and _same(entered, enter):
            return None
        actions: list[Action] = [enter]
        for pin, written in self._entries:
            actions += self._promotion(after_commit(run, actions), pin, written)
        return actions + [
            ArchiveStream(
                stream=name, label=archive_label(stream, phase_segment(origin.rules.from_phase))
            )
            for name in origin.rules.archives
            if (stream := run.stream(name)) is not None and stream.count
        ]

    def outcome(self) -> Transitioned:
        """Return the result, once the phase is entered."""
        assert self._origin is not None  # the commit was made, or found in the log
        assert self._made is not None
        log, run = self._writer.log, self._writer.log.run
        return Transitioned(
            state=self._made.state,
            companions=self._made.companions,
            seeds=phase_seeds(run, self._to, self._table.reseeded),
            checkpoint=Checkpoint(self._writer.store, log, self._record(self._origin)),
            report=self._table.applied,
        )

    def _make(self, origin: _Origin) -> NewPhase:
        """Load the source, check every rule, and carry out the table."""
        writer, options, rules = self._writer, self._options, origin.rules
        for name in sorted(self._enabled - rules.conditions):
            raise InvalidInput(
                "the transition has no such condition",
                where=f"enable: {name}",
                expected=", ".join(sorted(rules.conditions)) or "none",
                hint=near(name, rules.conditions),
            )
        record = self._record(origin)
        checkpoint = Checkpoint(writer.store, writer.log, record)
        # The whole of exactly this checkpoint: damage is an error, and there is no fallback
        # (document of Hydra, Gate checkpoint verification).
        source = load_to_train(checkpoint, options.map_location)
        self._table = Table(rules.rows, self._enabled, source)
        self._ready, unready = measured_readiness(
            rules, self._enabled, record.metrics, options.metrics
        )
        problems = [
            *differences(rules, source, options.targets or {}),
            *not_zero(_zero(rules, options.zero), source),
            *unready,
            *self._table.problems,
        ]
        if problems:
            raise IncompatibleState(
                f"phase {rules.to_phase} cannot begin from this checkpoint",
                where=f"{checkpoint.ref} ({rules.source})",
                found=abridged(problems, most=12),
                hint="Nothing was changed.",
            )
        for pin in origin.anchors:
            if pin.manifest != origin.manifest:
                self._stored(pin).load(only=self._inference_parts(pin))
        return self._table.carry_out(options.initialise or {})

    def _enter(self, origin: _Origin) -> EnterPhase:
        return EnterPhase(
            from_phase=origin.rules.from_phase,
            to_phase=origin.rules.to_phase,
            source=origin.rules.source,
            manifest=origin.manifest,
            rows=recorded(self._table.applied),
            enabled=tuple(sorted(self._enabled)),
            ready=self._ready,
            companions={
                name: written.state.manifest.digest for name, written in self._companions.items()
            },
        )

    def _promotion(self, run: RunManifest, pin: Pin, written: Written) -> list[Action]:
        """Return the actions that add an anchor to the pool, unless it is in it already."""
        assert pin.checkpoint is not None  # replay makes sure that every gate names one
        record = run.record(pin.checkpoint)
        candidate = Candidate(
            manifest=written.state.manifest.digest,
            phase=record.phase,
            step=record.step,
            checkpoint=record.n,
            gate=pin.name,
            frozen=True,
        )
        if find_entry(run, candidate) is not None:
            return []
        # A league starts with ratings of its own (document of Hydra, Phase 2 to 3, step 8).
        return promotion(run, candidate, DEFAULT)

    def _inference_parts(self, pin: Pin) -> list[str]:
        parts, run = self._stored(pin).manifest.components, self._writer.log.run
        return inference_parts(run.spec, parts, where=f"{run.run_id}/{pin.ref}")

    def _record(self, origin: _Origin) -> CheckpointRecord:
        """Return the source, which another writer may have evicted meanwhile."""
        return self._writer.log.knowing(origin.checkpoint).by_n[origin.checkpoint]

    def _stored(self, pin: Pin) -> Stored:
        writer = self._writer
        return Stored(StateHandle(writer.store, writer.log, pin.manifest, pin.ref))


def _zero(rules: Transition, given: str | Iterable[str] | None) -> Sequence[str]:
    """Return the patterns of tensors that must be zero: the caller's, or else the preset's."""
    if given is None:
        return rules.zero
    patterns = [given] if isinstance(given, str) else list(given)
    if not rules.zero or not patterns or not all(isinstance(one, str) for one in patterns):
        raise InvalidInput(
            "`zero` must return the tensor names that the transition expects",
            where=f"zero={quoted(given)}",
            expected="patterns of paths; the preset has " + (", ".join(rules.zero) or "none"),
        )
    return patterns


def _entered(run: RunManifest, to: str) -> PhaseRecord | None:
    """Return the record of the phase, if training is in it and has saved nothing there."""
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
        hint=Hint(
            "To begin it again call `run.restore(at=...)` with a checkpoint of the phase before.",
            "Its training begins it again from a checkpoint of the phase before.",
        ),
    )


def _find_origin(run: RunManifest, entered: PhaseRecord | None, to: str) -> _Origin:
    """Return the declared transition into a phase, with the checkpoint that it begins from."""
    spec = run.spec
    before = entered.from_phase if entered else run.phase
    if before is None and spec.phases:
        before = spec.phases[0].name
    rules = spec.transition(before or "", to)
    if rules is None:
        targets = [one.to_phase for one in spec.transitions if one.from_phase == before]
        raise InvalidInput(
            "no transition is declared for this change of phase",
            where=f"{run.run_id}: from phase {before} to phase {to}",
            expected=f"to {', '.join(targets)}" if targets else "none from here",
            hint="The run's preset declares the transitions.",
        )
    record = _source(run, rules)
    anchors = tuple(find_pin(run, "gate", name) for name in rules.anchors)
    return _Origin(rules, record.n, record.manifest, anchors)


def _source(run: RunManifest, rules: Transition) -> CheckpointRecord:
    kind, _, name = rules.source.partition("/")
    if name:
        pin = find_pin(run, "gate", name)
        assert pin.checkpoint is not None  # replay makes sure that every gate names one
        return run.record(pin.checkpoint)
    found = run.latest(rules.from_phase)
    if kind == "best":
        monitors = run.spec.phase(rules.from_phase).monitors
        found = run.best(monitors[0], rules.from_phase) if monitors else None
    if found is None:
        raise NotFound(
            "there is none yet",
            where=f"{run.run_id}/{phase_segment(rules.from_phase)}/{kind}",
            hint="The transition begins from this checkpoint.",
        )
    return found


def _same(entered: PhaseRecord, enter: EnterPhase) -> bool:
    """Return whether a phase was entered with the same result."""
    before = (entered.from_phase, entered.manifest, entered.rows, entered.companions)
    return before == (enter.from_phase, enter.manifest, enter.rows, enter.companions)


def recorded(applied: Iterable[Applied]) -> tuple[AppliedRow, ...]:
    """Return rows that were applied, as the log has them."""
    return tuple(AppliedRow(part=one.part, change=one.change, to=one.to) for one in applied)


def phase_seeds(
    run: RunManifest, phase: str, reseeded: Mapping[str, int | None]
) -> dict[str, SeedSequence]:
    """Return the seeds of reseeded parts at the start of a phase; see `Table.reseeded`."""
    if not reseeded:
        return {}
    number = phase_number(run.spec, phase)
    return {
        name: phase_sequence(run.seed, number) if index is None else child(run.seed, number, index)
        for name, index in reseeded.items()
    }


def archive_label(stream: StreamRecord, base: str) -> str:
    """Return an unused label for the archive of a stream: the base, or it with a number."""
    taken = {archive.label for archive in stream.archives}
    label, number = base, 1
    while label in taken:
        number += 1
        label = f"{base[:60]}_{number}"
    return label


def differences(
    rules: Transition, source: Mapping[str, Any], targets: Mapping[str, Any]
) -> Iterator[str]:
    """Yield the differences between the strict parts and their targets.

    Every tensor of the one must be in the other, with the same shape and dtype (document of Hydra,
    Strict loading).
    """
    known = [name.strip() for part in rules.strict for name in part.split("|")]
    for name in targets:
        if name not in known:
            raise InvalidInput(
                "the transition does not check a part of this name",
                where=f"targets[{name!r}]",
                expected=", ".join(rules.strict) or "none",
                hint=near(name, known),
            )
    for part in rules.strict:
        named = first_of(part, targets)
        if named is None:
            raise InvalidInput(
                "the transition checks a part strictly, but no target is given for it",
                where=f"targets[{part!r}]",
                expected="the module that will load the part, or its state_dict()",
            )
        found = first_of(part, source)
        if found is None:
            yield f"{part} is not in the source"
        else:
            yield from _compare(_tensors(found, source[found]), _tensors(found, targets[named]))


def not_zero(patterns: Iterable[str], source: Mapping[str, Any]) -> Iterator[str]:
    """Yield tensors that must be zero and are not, and patterns that match nothing."""
    leaves = [leaf for name, value in source.items() for leaf in traversal.walk(name, value)]
    for pattern in patterns:
        choices = [one.strip() for one in pattern.split("|")]
        matched = [leaf for leaf in leaves if any(fnmatchcase(leaf[0], one) for one in choices)]
        if not matched:
            yield f"no tensor that must be zero matches: {pattern}"
        for path, value in matched:
            if not traversal.is_zero(value):
                yield f"{path} is not zero"


def measured_readiness(
    rules: Transition,
    enabled: Collection[str],
    known: Mapping[str, float],
    given: Mapping[str, object] | None,
) -> tuple[dict[str, float], list[str]]:
    """Return the checked metrics with their values, and the problems."""
    metrics = {**known, **check_metrics(given)}
    ready = [one for one in rules.ready if one.when is None or one.when in enabled]
    checked = {one.metric: metrics[one.metric] for one in ready if one.metric in metrics}
    wrong = [clause for one in ready if (clause := _unready(one, metrics))]
    return checked, wrong


def _unready(rule: Readiness, metrics: Mapping[str, float]) -> str | None:
    value = metrics.get(rule.metric)
    if value is None:
        return f"{rule.metric} is not known"
    # Written with `not`, so that NaN passes neither.
    if rule.at_least is not None and not value >= rule.at_least:
        return f"{rule.metric} is {value:g}, must be at least {rule.at_least:g}"
    if rule.at_most is not None and not value <= rule.at_most:
        return f"{rule.metric} is {value:g}, must be at most {rule.at_most:g}"
    return None


def _tensors(name: str, value: Any) -> _Tensors:
    leaves = traversal.walk(name, value)
    return {path: pytree.describe(leaf) for path, leaf in leaves if traversal.is_array(leaf)}


def _compare(source: _Tensors, target: _Tensors) -> Iterator[str]:
    for path, (dtype, shape) in source.items():
        if path not in target:
            yield f"{path} is not in the target"
        elif target[path] != (dtype, shape):
            wanted, axes = target[path]
            yield f"{path} is {dtype}{list(shape)}, target {wanted}{list(axes)}"
    for path in target:
        if path not in source:
            yield f"{path} is not in the source"
