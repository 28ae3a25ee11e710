"""The specification of a run: phases, monitors, retention, gates, pool, streams. Data, not code.

Presets and users choose the names of phases, tiers, metrics and keys; this module knows none of
them. Commit 0 of a run holds its specification, so all readers of its log apply the same rules.
"""

from collections.abc import Iterable
from typing import Annotated, Literal

from holdfast.registry.spec.policies import Monitor, Retention, Tier
from holdfast.registry.spec.transition_table import Pivot, Row, Transition
from holdfast.registry.values import (
    ITEM_SIZES,
    Field,
    Name,
    PhaseName,
    PrecisionName,
    Record,
    empty,
)

_ExitCode = Annotated[int, Field(ge=0, le=255)]

#: When SIGUSR1 saves: after the current step, or at the next multiple of the cadence.
WhenAsked = Literal["now", "at_cadence"]


class Signals(Record):
    """The reaction of a training run to signals."""

    exit_code: _ExitCode = 143  # exit status after SIGTERM or a notice of preemption
    sigint_exit_code: _ExitCode = 130  # exit status after SIGINT
    sigusr1: WhenAsked = "now"  # when SIGUSR1 saves
    #: Seconds after the first SIGTERM, SIGINT or notice after which the process ends with what is
    #: durable.
    deadline_s: Annotated[int, Field(ge=1)] = 25


class DtypeRule(Record):
    """Floating-point tensors on these paths must have this element type."""

    path: str  # component and keys joined by `/`; `*` matches anything
    dtype: str  # name of the element type

    def _agree_(self) -> None:
        if self.dtype not in ITEM_SIZES:
            raise ValueError(f"unknown dtype {self.dtype!r}; known are {', '.join(ITEM_SIZES)}")


class PrecisionRule(Record):
    """The precision of floating-point tensors on some paths."""

    #: Component and keys joined by `/`; `*` matches anything.
    path: Annotated[str, Field(min_length=1)]
    policy: PrecisionName  # a policy of `Run.save`


class NamedPrecision(Record):
    """A precision that a save may name; the first rule that matches a tensor decides."""

    name: Name  # its name, for `Storing(precision=...)`
    #: Its rules; unlike those of a save, a rule may match nothing.
    rules: Annotated[tuple[PrecisionRule, ...], Field(min_length=1)]


class ReleaseKeys(Record):
    """Top-level keys for what a release has besides its state; no key for what it leaves out."""

    version: str | None = None  # for its semantic version
    metrics: str | None = None  # for its metrics
    card: str | None = None  # for its model card


class Phase(Record):
    """One phase of a run."""

    name: PhaseName  # its name, or its number in digits
    about: str = ""  # a description for people
    counter: str = "step"  # the unit of its steps: training steps, PPO updates, epochs
    save_every: Annotated[int, Field(ge=1)] | None = None  # number of those steps from save to save
    monitors: tuple[Monitor, ...] = ()  # they decide `best`; the first one is `best` itself
    retention: Retention | None = None  # which checkpoints are kept; all of them without it
    #: Retention classes, tried in order; the last one gets all other checkpoints.
    tiers: tuple[Tier, ...] = ()
    #: Top-level keys that a state of this phase must have, besides those of the run.
    required_keys: tuple[str, ...] = ()
    companions: tuple[Name, ...] = ()  # states that are saved with every checkpoint of this phase

    def _agree_(self) -> None:
        labels = [monitor.label for monitor in self.monitors]
        _distinct("monitor", labels)
        _distinct("tier", [tier.name for tier in self.tiers])
        if self.tiers and self.retention is not None:
            raise ValueError(f"phase {self.name}: with tiers, retention belongs in each tier")
        for tier in self.tiers:
            _known(f"tier {tier.name}: monitor", tier.improves, labels)
        for policy in [self.retention, *(tier.retention for tier in self.tiers)]:
            if policy is not None and policy.best and not self.monitors:
                raise ValueError(f"phase {self.name} keeps its best, but has no monitor")


class Gate(Record):
    """The checkpoint at the end of a phase: immutable, verified on every load."""

    name: Name  # its name, for example `bc_best`
    phase: PhaseName  # the phase of the checkpoint


class Draw(Record):
    """One kind of opponent."""

    #: `self` (the current weights in every seat), `roster` (any entry of the pool that is not
    #: frozen) or `frozen` (one entry that never changes).
    kind: Literal["self", "roster", "frozen"]
    weight: Annotated[int, Field(ge=0)]  # its share of the games
    name: Name | None = None  # the gate of the frozen entry

    def _agree_(self) -> None:
        if (self.kind == "frozen") != (self.name is not None):
            raise ValueError("`frozen` needs a `name`, and no other kind has one")


class Pool(Record):
    """The opponent pool."""

    phase: PhaseName  # the phase that plays against it
    #: The most entries; the oldest one is removed first. Frozen entries do not count.
    size: Annotated[int, Field(ge=1)]
    promote_on_save: bool = False  # whether every checkpoint of the phase enters the pool
    #: Number of the child of the phase's seed sequence that draws opponents.
    seed_child: Annotated[int, Field(ge=0)] = 0
    draws: tuple[Draw, ...] = ()  # the kinds of opponents
    cache: Annotated[int, Field(ge=1)] = 5  # the most models that stay loaded
    mu: str = "mu"  # the metric that holds a checkpoint's mu
    sigma: str = "sigma"  # the metric that holds its sigma


class Stream(Record):
    """An append-only history of a run, besides its checkpoints."""

    name: Name  # its name, for example `loss`
    #: A `forever` stream is never archived; a `resettable` one can be.
    lifetime: Literal["forever", "resettable"]


class RunSpec(Record):
    """The specification of a run.

    Attributes:
        format: The name of the format of preset files.
        name: The name of the preset.
        about: A description for people.
        phases: The phases in order; if empty, a run may have any phase.
        monitors: They decide `best` in a run without declared phases.
        retention: Which checkpoints such a run keeps; all of them without it.
        required_keys: Top-level keys of every state; `a | b` if one of the two is enough.
        commit_keys: Keys that differ between equal trainings (times, host). A save moves them to
            the commit and a load moves them back, so equal trainings give equal ids.
        finite: Patterns of paths of the weights; a checkpoint with NaN or infinity there is
            recorded, but does not become latest.
        dtypes: Element types by path.
        metrics_key: Top-level key that holds the metrics of the state: the numbers on its top level
            count like those that a save is given.
        version_key: Top-level key that holds the version of the state's schema.
        version: The version of the states of this preset.
        inference: Keys that inference needs; a release or an entry of the pool consists of them.
        release_keys: What a release has besides its state where it is written to a file, and under
            which top-level keys.
        precision: Precisions that a save may name; they hide the policies of the same name.
        load_precision: The precision of loads that name none.
        gates: The gates and their phases; if empty, a gate may have any name.
        pool: The opponent pool.
        streams: Declared streams.
        card_fields: Fields that a release's model card must have.
        transitions: The transitions between phases.
        pivot: The changes at a pivot within a phase; without it everything is carried.
        warm_start: The changes when a run starts from another run's checkpoint; a key without a row
            is reset.
        compatible_keys: Paths of plain values that the program has to expect when it starts from a
            checkpoint, and that must be equal there.
        must_match: Values that a resume must give, equal to those of the run.
        sources: Places in a state, or `streams/NAME`, whose keys are names of the caller's sources.
        layout: File names in a folder, by their purpose; for `checkout`.
        signals: Reaction of a training run to signals; the defaults of `Signals` without it.
        must_change: Patterns of the components that no later step may repeat; without it they are
            found by what they hold, and only warned about.
    """

    format: Literal["holdfast.preset/1"] = "holdfast.preset/1"
    name: str = ""
    about: str = ""
    phases: tuple[Phase, ...] = ()
    monitors: tuple[Monitor, ...] = ()
    retention: Retention | None = None
    required_keys: tuple[str, ...] = ()
    commit_keys: tuple[str, ...] = ()
    finite: tuple[str, ...] = ()
    dtypes: tuple[DtypeRule, ...] = ()
    metrics_key: str | None = None
    version_key: str | None = None
    version: int | str | None = None
    inference: tuple[str, ...] = ()
    release_keys: ReleaseKeys | None = None
    precision: tuple[NamedPrecision, ...] | None = None
    load_precision: Literal["stored", "original"] | None = None
    gates: tuple[Gate, ...] = ()
    pool: Pool | None = None
    streams: tuple[Stream, ...] = ()
    card_fields: tuple[str, ...] = ()
    transitions: tuple[Transition, ...] = ()
    pivot: Pivot | None = None
    warm_start: tuple[Row, ...] | None = None
    compatible_keys: tuple[str, ...] | None = None
    must_match: tuple[Literal["config", "input_hash"], ...] | None = None
    sources: tuple[str, ...] | None = None
    layout: dict[str, str] = empty()
    signals: Signals | None = None
    must_change: tuple[str, ...] | None = None

    def _agree_(self) -> None:
        phases = [phase.name for phase in self.phases]
        gates = [gate.name for gate in self.gates]
        _distinct("phase", phases)
        _distinct("gate", gates)
        _distinct("stream", [stream.name for stream in self.streams])
        _distinct("monitor", [monitor.label for monitor in self.monitors])
        _distinct("precision", [one.name for one in self.precision or ()])
        if self.phases and (self.monitors or self.retention):
            raise ValueError("with declared phases, monitors and retention belong in each phase")
        if self.retention is not None and self.retention.best and not self.monitors:
            raise ValueError("retention keeps the best, but there is no monitor")
        if (self.version_key is None) != (self.version is None):
            raise ValueError("version_key and version belong together")
        _known("gate of phase", [gate.phase for gate in self.gates], phases)
        if self.pool is not None:
            _known("pool of phase", [self.pool.phase], phases)
            _known("draw of gate", [draw.name for draw in self.pool.draws if draw.name], gates)
        for transition in self.transitions:
            _known("transition of phase", [transition.from_phase, transition.to_phase], phases)
            _known("anchor", transition.anchors, gates)
            kind, _, name = transition.source.partition("/")
            _known("source: gate", [name] if kind == "gates" else [], gates)
            frozen = [row.companion for row in transition.rows if row.companion]
            declared = self.phase(transition.to_phase).companions
            _known(f"phase {transition.to_phase}: companion", frozen, declared)
            _known("archived stream", transition.archives, self._resettable)
        if self.pivot is not None:
            _known("pivot: archived stream", self.pivot.archives or (), self._resettable)
        for row in self.warm_start or ():
            if row.companion or row.when or row.unless:
                raise ValueError(f"warm_start: row {row.part}: no companions and conditions")
        moved = {path.split("/")[0] for path in self.compatible_keys or ()} & {*self.commit_keys}
        if moved:
            raise ValueError(f"compatible_keys: {min(moved)} is one of the commit_keys")

    @property
    def _resettable(self) -> list[str]:
        return [stream.name for stream in self.streams if stream.lifetime == "resettable"]

    def phase(self, name: str) -> Phase:
        """Return the rules of a phase: the declared ones, or those of an undeclared run."""
        for phase in self.phases:
            if phase.name == name:
                return phase
        # The run's fields are checked already.
        return Phase.unchecked(
            name=name, monitors=self.monitors, retention=self.retention, counter="step",
            save_every=None, tiers=(), required_keys=(), companions=(), about="",
        )  # fmt: skip

    def transition(self, from_phase: str, to_phase: str) -> Transition | None:
        """Return the declared transition from one phase to another."""
        for transition in self.transitions:
            if (transition.from_phase, transition.to_phase) == (from_phase, to_phase):
                return transition
        return None


def _distinct(what: str, names: Iterable[str]) -> None:
    seen = set()
    for name in names:
        if name in seen:
            raise ValueError(f"{what} {name} is declared twice")
        seen.add(name)


def _known(what: str, names: Iterable[str], known: Iterable[str]) -> None:
    allowed = list(known)
    for name in names:
        if name not in allowed:
            declared = ", ".join(allowed) or "none"
            raise ValueError(f"{what} {name}: not declared; declared are {declared}")
