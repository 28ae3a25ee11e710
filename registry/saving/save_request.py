"""The first values of a save: what was asked, the states taken apart, and the planned save.

`SaveRequest` has the checked arguments, `FlatSave` the flattened states. `PlannedSave` is checked
against the rules of the run. Nothing is written until then. `holdfast.registry.saving.save_commit`
makes the next value, `WrittenSave`, and the commit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, Self, TypeVar

from holdfast.backends.escape import quoted
from holdfast.registry import pytree
from holdfast.registry.curation.streams import check_entries
from holdfast.registry.errors import IncompatibleState, InvalidInput, Malformed, UnsupportedValue
from holdfast.registry.history import (
    check_metrics,
    check_name,
    check_phase,
    check_step,
    decode_plain,
    encode_plain,
    join_plain,
)
from holdfast.registry.history.actions import CommitKeys
from holdfast.registry.history.replay import RunManifest
from holdfast.registry.pytree import FlatState
from holdfast.registry.spec import (
    MIGRATIONS,
    Phase,
    RunSpec,
    check_dtypes,
    check_keys,
    check_phase_is_declared,
    flat_dtypes,
)
from holdfast.registry.spec.precision import Narrowing, Precision, narrow_state, stored_dtypes
from holdfast.registry.values import Json, collector_paused, float_to_hex, near, require_first_rank
from holdfast.registry.writing import Storing, check_storing

#: The tags of dicts whose numbers are metrics; see `pytree.pairs_of`.
_DICTS = {"d": None, "od": None}

Named = TypeVar("Named")


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest:
    """The checked arguments of a save, without its state; see `Run.save`."""

    step: int
    takes_over: bool  # whether the program becomes the run's only trainer; false for a push
    #: Of a push: the step that the run's newest checkpoint must have; -1 if there may be none.
    follows: int | None = None
    phase: str | None = None  # the given phase; `None` for the present phase of the run
    metrics: Mapping[str, float] = field(default_factory=dict)
    meta: Any = None  # the encoded plain value
    tier: str | None = None
    companions: Mapping[str, object] = field(default_factory=dict)
    streams: Mapping[str, Sequence[dict[str, Any]]] = field(default_factory=dict)
    allow_nonfinite: bool = False
    storing: Storing = field(default_factory=Storing)
    #: Whether the arguments of rank 0 count for all ranks that save together.
    first_rank_decides: bool = False
    may_fail: int = 0  # how many saves in a row may fail before the training hears of it
    promotes: bool = True  # whether its model enters the pool, if the preset says so

    @classmethod
    def of(
        cls,
        step: object,
        *,
        takes_over: bool,
        after: object = None,
        phase: int | str | None = None,
        metrics: Mapping[str, object] | None = None,
        meta: object = None,
        tier: str | None = None,
        companions: Mapping[str, object] | None = None,
        streams: Mapping[str, Iterable[Mapping[str, Any]]] | None = None,
        allow_nonfinite: bool = False,
        storing: Storing | None = None,
        every_rank: bool = False,
        first_rank_decides: bool = False,
        may_fail: int = 0,
    ) -> Self:
        """Check the arguments of a save."""
        if not every_rank:
            require_first_rank()
        return cls(
            may_fail=check_may_fail(may_fail, every_rank=every_rank),
            first_rank_decides=first_rank_decides,
            takes_over=takes_over,
            follows=None if after is None else -1 if after == "none" else check_step(after),
            phase=None if phase is None else check_phase(phase),
            step=check_step(step),
            metrics=check_metrics(metrics),
            meta=None if meta is None else encode_plain(meta, "meta"),
            tier=tier,
            companions={
                check_name(name, "a companion"): state
                for name, state in named("companions", companions).items()
            },
            streams={
                check_name(name, "a stream"): check_entries(entries)
                for name, entries in named("streams", streams).items()
            },
            allow_nonfinite=bool(allow_nonfinite),
            storing=check_storing(storing),
        )

    def after(self, earlier: Iterable[SaveRequest]) -> SaveRequest:
        """Return the request with the stream entries of earlier saves that were not made."""
        joined: dict[str, list[dict[str, Any]]] = {}
        for request in (*earlier, self):
            for name, entries in request.streams.items():
                joined.setdefault(name, []).extend(entries)
        return replace(self, streams=joined)

    def without_states(self) -> SaveRequest:
        """Return the request without companions, which take memory."""
        return replace(self, companions={})


def named(what: str, given: Mapping[str, Named] | None) -> Mapping[str, Named]:
    """Return companions or streams by name, and refuse what is no mapping; `None` is empty."""
    if given is not None and not isinstance(given, Mapping):
        raise InvalidInput(
            f"{what} are not a mapping", expected="{name: ...}", found=type(given).__name__
        )
    return given or {}


def without_landed(
    failed: Sequence[SaveRequest], has_landed: Callable[[SaveRequest], object]
) -> list[SaveRequest]:
    """Leave out failed saves whose entries are in the log: with their own slot or a later one's."""
    newest = max((one.step for one in failed if has_landed(one)), default=-1)
    return [one for one in failed if one.step > newest]


def check_may_fail(may_fail: object, *, every_rank: bool) -> int:
    """Check how many saves in a row may fail before a training hears of it, and return it."""
    most = 0 if every_rank else 2**53
    if type(may_fail) is not int or not 0 <= may_fail <= most:
        raise InvalidInput(
            "not a number of saves that may fail",
            where="may_fail",
            expected="0, since all ranks save together" if every_rank else "a whole number from 0",
            found=quoted(may_fail),
        )
    return may_fail


@dataclass(frozen=True, slots=True)
class FlatSave:
    """A save whose states are taken apart. A rank that saves with others has its share here."""

    request: SaveRequest
    state: FlatState
    companions: Mapping[str, FlatState]  # the companions by name
    #: The rank's `PerRank` values, by the name of the state; none if it saves alone.
    per_rank: Mapping[str, tuple[bytes, ...]] = field(default_factory=dict)

    @property
    def states(self) -> dict[str, FlatState]:
        """All states by name; "" for the state itself."""
        return {"": self.state, **self.companions}


@dataclass(frozen=True, slots=True)
class PlannedSave:
    """A save whose states meet the rules of the run."""

    request: SaveRequest
    phase: str
    state: FlatState  # the given state, without the keys that its commit stores
    companions: Mapping[str, FlatState]  # the companions by name
    narrowing: Narrowing | None = None  # the leaves that are stored with less precision
    commit_keys: CommitKeys | None = None  # the keys that its commit stores
    #: Metrics of the request, and of the state if the preset names their key.
    metrics: Mapping[str, float] = field(default_factory=dict)
    #: Values of the counters that the tiers of the phase name.
    counters: Mapping[str, int] = field(default_factory=dict)

    def narrowed(self) -> FlatState:
        """Return the state to store. A save in the background narrows its copy, in its thread."""
        return narrow_state(self.state, self.narrowing) if self.narrowing else self.state


#: A save before its states are written; it can be copied.
Save = TypeVar("Save", FlatSave, PlannedSave)


def copied(save: Save, copy: Callable[[str, FlatState], FlatState]) -> Save:
    """Return a save with every state copied, each under its own name."""
    companions = {name: copy(name, flat) for name, flat in save.companions.items()}
    return replace(save, state=copy("", save.state), companions=companions)


def take_apart(state: object, request: SaveRequest) -> FlatSave:
    """Flatten the states of a save, and wait until their devices have made them."""
    with collector_paused():
        flat = _flat(state)
        companions = {name: _flat(value) for name, value in request.companions.items()}
    save = FlatSave(request, flat, companions)
    for one in save.states.values():
        pytree.await_devices(one)
    return save


def plan_save(save: FlatSave, run: RunManifest) -> PlannedSave:
    """Check a save against the rules of the run."""
    request, flat, spec = save.request, save.state, run.spec
    phase = request.phase or run.present_phase
    where = f"{run.run_id}: phase {phase}, step {request.step}"
    check_phase_is_declared(spec, phase)
    check_keys(spec, phase, [part.name for part in flat.components], where=where)
    check_dtypes(spec, flat_dtypes(flat), where=where)
    _check_version(spec, flat, where)
    _check_tier(spec.phase(phase), request.tier, where)
    kept, commit_keys = _split(flat, spec)
    return PlannedSave(
        request,
        phase,
        kept,
        save.companions,
        _narrowing(kept, request, spec, where),
        commit_keys,
        _metrics(spec, request, flat, where),
        _counters(spec.phase(phase), request, flat),
    )


def _flat(state: object) -> FlatState:
    return state if isinstance(state, FlatState) else pytree.flatten(state)


def _check_version(spec: RunSpec, state: FlatState, where: str) -> None:
    """Refuse a state that this program could save but not load again."""
    for part in state.components:
        if part.name == spec.version_key and spec.version is not None:
            found = None if part.leaves else decode_plain(part.skeleton)
            if found != spec.version:
                MIGRATIONS.check(found, spec.version, where=f"{where}, state[{part.name!r}]")


def _metrics(spec: RunSpec, request: SaveRequest, state: FlatState, where: str) -> dict[str, float]:
    """Return the given metrics, and those that are numbers under the state's key for metrics.

    Without that key, the last entries of the history of metrics count.
    """
    metrics = dict(request.metrics)
    parts = {part.name: part.skeleton for part in state.components}
    if spec.metrics_key is not None and spec.metrics_key not in parts:
        last = _last_entry(parts.get(f"{spec.metrics_key}_history"))
        return {**_numbers(last), **metrics}
    for part in state.components:
        if part.name != spec.metrics_key:
            continue
        for name, value in _numbers(part.skeleton).items():
            if float_to_hex(metrics.setdefault(name, value)) != float_to_hex(value):
                raise InvalidInput(
                    "a metric has two values",
                    where=f"{where}, metric {name}",
                    expected=f"{value:g}, as in state[{part.name!r}]",
                    found=f"{metrics[name]:g}, as in metrics=",
                    hint="Give it once, or the same value in both places.",
                )
    return metrics


def _last_entry(history: Json) -> Json:
    """Return the newest metrics of a list of them, or of lists by name."""
    if isinstance(history, list):
        return history[-1] if history else None
    ends = [[name, item[-1]] for name, item in _pairs(history) if isinstance(item, list) and item]
    return {"d": ends}


def _pairs(node: Json) -> list[Any]:
    """Return the names and values of a dict; nothing for other values."""
    pairs = pytree.pairs_of(node, _DICTS)
    return pairs if isinstance(pairs, list) else []


def _numbers(node: Json) -> dict[str, float]:
    """Return the numbers on the top level of a dict, without arrays and nested values."""
    values = {}
    for name, item in _pairs(node):
        with suppress(Malformed):  # a value with arrays is not a number
            values[name] = decode_plain(item)
    return check_metrics(
        {
            name: value
            for name, value in values.items()
            if isinstance(name, str) and not isinstance(value, bool) and isinstance(value, Real)
        }
    )


def _narrowing(
    state: FlatState, request: SaveRequest, spec: RunSpec, where: str
) -> Narrowing | None:
    """Choose the leaves that are stored with less precision; the stored dtypes must be allowed."""
    storing = request.storing
    wanted = Precision.check(storing.precision, allow_optimizer=storing.allow_lossy_optimizer)
    if wanted is None:
        return None
    narrowing = wanted.resolved(spec).choose(state, where=where)
    try:
        check_dtypes(spec, stored_dtypes(state, narrowing), where=where)
    except IncompatibleState as error:
        raise IncompatibleState(
            "tensors would be stored in a dtype that the run does not allow",
            where=f"{where}, precision",
            found=error.found,
            hint="Give them the policy 'keep', before the other patterns; or change the preset.",
        ) from error
    return narrowing


def _split(state: FlatState, spec: RunSpec) -> tuple[FlatState, CommitKeys | None]:
    """Separate the keys that the commit stores from a state."""
    moved = [part for part in state.components if part.name in spec.commit_keys]
    if not moved:
        return state, None
    for part in moved:
        if part.leaves:
            raise UnsupportedValue(
                "a key in commit_keys holds an array or a very long string",
                where=part.leaves[0].path,
                hint="The run's preset lists it in commit_keys; the log is for small plain values.",
            )
    kept = tuple(part for part in state.components if part.name not in spec.commit_keys)
    values = join_plain({part.name: part.skeleton for part in moved}, "the commit keys")
    try:
        with suppress(IncompatibleState):  # an adapter that only another program has
            decode_plain(values)
    except Malformed as error:  # they are nested one level deeper here
        raise UnsupportedValue("the commit keys could not be read", found=error) from error
    order = tuple(part.name for part in state.components)
    return FlatState(state.kind, kept), CommitKeys(order=order, values=values)


def _check_tier(phase: Phase, tier: str | None, where: str) -> None:
    tiers = [one.name for one in phase.tiers]
    if tier is not None and tier not in tiers:
        raise InvalidInput(
            "the phase has no such tier",
            where=f"{where}, tier {tier}",
            expected=", ".join(tiers) or "no tier",
            hint=near(tier, tiers) if isinstance(tier, str) else "",
        )


def _counters(phase: Phase, request: SaveRequest, state: FlatState) -> dict[str, int]:
    """Return the counters that the phase's tiers name: the step, or a value of state or meta."""
    plain = {part.name: part.skeleton for part in state.components}
    meta = decode_plain(request.meta)
    if isinstance(meta, dict):
        plain = {**plain, **meta}
    found = {phase.counter: request.step}
    for tier in phase.tiers:
        name = tier.counter or phase.counter
        if tier.every is None or name in found:
            continue
        value = plain.get(name)
        if type(value) is not int:
            raise InvalidInput(
                f"the counter {name} of tier {tier.name} has no value",
                where=f"phase {phase.name}, step {request.step}",
                expected=f"a whole number as state[{name!r}] or meta[{name!r}]",
                found=type(value).__name__,
            )
        found[name] = value
    return found
