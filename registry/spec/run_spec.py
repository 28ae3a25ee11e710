"""What a run is to be: phases, monitors, retention, gates, pool, streams. Data, not code.

The names of phases, tiers, metrics and keys stand in presets and in specifications that users
write; nothing here knows any. A run carries its specification in commit 0, so that every reader of
its log applies the rules it was begun with.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from holdfast.registry.spec.monitors import Monitor
from holdfast.registry.spec.policies import Retention, Tier
from holdfast.registry.spec.transition_table import Transition
from holdfast.registry.values.dtypes import ITEM_SIZES
from holdfast.registry.values.records import Name, PhaseName, Record


class DtypeRule(Record):
    """Floating-point tensors on these paths have this element type.

    Attributes:
        path: Component and keys joined with `/`; `*` matches anything.
        dtype: Name of the element type.
    """

    path: str
    dtype: str

    @model_validator(mode="after")
    def _exists(self) -> Self:
        if self.dtype not in ITEM_SIZES:
            raise ValueError(f"unknown dtype {self.dtype!r}; known are {', '.join(ITEM_SIZES)}")
        return self


class Phase(Record):
    """One phase of a run.

    Attributes:
        name: Its name, or its number in digits.
        about: What it is, for people.
        counter: What its steps count: training steps, PPO updates, epochs.
        save_every: Cadence in that counter.
        monitors: What decides `best`; the first one is `best` itself.
        retention: What is kept; everything where absent.
        tiers: Retention classes, tried in order; the last one takes what no other takes.
        required_keys: Top-level keys that a state of this phase must have, beside those of the run.
        companions: States that are saved beside every checkpoint of this phase.
    """

    name: PhaseName
    about: str = ""
    counter: str = "step"
    save_every: Annotated[int, Field(ge=1)] | None = None
    monitors: tuple[Monitor, ...] = ()
    retention: Retention | None = None
    tiers: tuple[Tier, ...] = ()
    required_keys: tuple[str, ...] = ()
    companions: tuple[Name, ...] = ()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        labels = [monitor.label for monitor in self.monitors]
        _distinct("monitor", labels)
        _distinct("tier", [tier.name for tier in self.tiers])
        if self.tiers and self.retention is not None:
            raise ValueError(f"phase {self.name}: its tiers have the retention, not the phase")
        for tier in self.tiers:
            _known(f"tier {tier.name}: monitor", tier.improves, labels)
        for policy in [self.retention, *(tier.retention for tier in self.tiers)]:
            if policy is not None and policy.best and not self.monitors:
                raise ValueError(f"phase {self.name} keeps its best, and has no monitor")
        return self


class Gate(Record):
    """A checkpoint that a phase ends with: immutable, verified on every load.

    Attributes:
        name: For example `bc_best`.
        phase: The phase that it is from.
    """

    name: Name
    phase: PhaseName


class Draw(Record):
    """One kind of opponent.

    Attributes:
        kind: `self` (the current weights in every seat), `roster` (any entry of the pool that is
            not frozen) or `frozen` (one entry that never changes).
        weight: Its share of the games.
        name: Gate of the frozen entry.
    """

    kind: Literal["self", "roster", "frozen"]
    weight: Annotated[int, Field(ge=0)]
    name: Name | None = None

    @model_validator(mode="after")
    def _named(self) -> Self:
        if (self.kind == "frozen") != (self.name is not None):
            raise ValueError("`name` belongs to `frozen`, and to it alone")
        return self


class Pool(Record):
    """The opponent pool.

    Attributes:
        phase: The phase that plays against it.
        size: Entries that are kept, oldest first out; frozen ones do not count.
        promote_on_save: Whether every checkpoint of the phase enters it.
        seed_child: Which child of the phase's seed sequence draws the opponents.
        draws: The kinds of opponents.
        cache: Models kept loaded.
        mu: Metric of a checkpoint that is its rating's mu.
        sigma: Metric that is its sigma.
    """

    phase: PhaseName
    size: Annotated[int, Field(ge=1)]
    promote_on_save: bool = False
    seed_child: Annotated[int, Field(ge=0)] = 0
    draws: tuple[Draw, ...] = ()
    cache: Annotated[int, Field(ge=1)] = 5
    mu: str = "mu"
    sigma: str = "sigma"


class Stream(Record):
    """An append-only history beside the checkpoints.

    Attributes:
        name: For example `loss`.
        lifetime: `forever` may never be archived; `resettable` is archived at a pivot.
    """

    name: Name
    lifetime: Literal["forever", "resettable"]


class RunSpec(Record):
    """What a run is to be.

    Attributes:
        name: Of the preset.
        about: What it is for.
        phases: In their order; any phase without a declaration where empty.
        monitors: What decides `best` in a run without declared phases.
        retention: What such a run keeps; everything where absent.
        required_keys: Top-level keys of every state; `a | b` where either will do.
        commit_keys: Keys that differ between equal trainings (times, host). They move to the commit
            at save and come back on load, so that equal trainings give equal ids.
        finite: Patterns of paths of the weights; with NaN or infinity in them a checkpoint is
            recorded and does not become latest.
        dtypes: Element types by path.
        version_key: Top-level key that holds the version of the state's schema.
        version: The version that a state of this preset has.
        inference: Keys that inference needs: what a release or an entry of the pool consists of.
        gates: Gates by the phase that they are from; any name where empty.
        pool: The opponent pool.
        streams: Declared streams.
        card_fields: Fields that a release's model card must have.
        transitions: The ways from phase to phase.
        layout: Names in a folder of files, by what they name; for `checkout`.
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
    version_key: str | None = None
    version: int | str | None = None
    inference: tuple[str, ...] = ()
    gates: tuple[Gate, ...] = ()
    pool: Pool | None = None
    streams: tuple[Stream, ...] = ()
    card_fields: tuple[str, ...] = ()
    transitions: tuple[Transition, ...] = ()
    layout: dict[str, str] = Field(default={})

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        phases = [phase.name for phase in self.phases]
        gates = [gate.name for gate in self.gates]
        _distinct("phase", phases)
        _distinct("gate", gates)
        _distinct("stream", [stream.name for stream in self.streams])
        _distinct("monitor", [monitor.label for monitor in self.monitors])
        if self.phases and (self.monitors or self.retention):
            raise ValueError("with declared phases, monitors and retention stand in each phase")
        if self.retention is not None and self.retention.best and not self.monitors:
            raise ValueError("the best are kept, and there is no monitor")
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
            resettable = [s.name for s in self.streams if s.lifetime == "resettable"]
            _known("archived stream", transition.archives, resettable)
        return self

    def phase(self, name: str) -> Phase:
        """Return the rules of a phase: the declared ones, or those of an undeclared run."""
        for phase in self.phases:
            if phase.name == name:
                return phase
        # Checked with the run already, so not again.
        return Phase.model_construct(
            name=name, monitors=self.monitors, retention=self.retention, counter="step",
            save_every=None, tiers=(), required_keys=(), companions=(), about="",
        )  # fmt: skip

    def transition(self, from_phase: str, to_phase: str) -> Transition | None:
        """Return the declared way from one phase to another."""
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
