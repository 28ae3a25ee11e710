"""What a save says and what it is made of, checked and taken apart before anything is written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from holdfast.registry import pytree
from holdfast.registry.errors import IncompatibleState, InvalidInput, UnsupportedValue
from holdfast.registry.history.actions import CommitKeys
from holdfast.registry.history.log_values import (
    check_metrics,
    check_name,
    check_phase,
    check_step,
    decode_plain,
    encode_plain,
    join_plain,
)
from holdfast.registry.history.replay import RunManifest
from holdfast.registry.precision.policy import (
    Narrowing,
    Precision,
    PrecisionPolicy,
    narrow_state,
    stored_dtypes,
)
from holdfast.registry.pytree import FlatState
from holdfast.registry.spec import Phase, RunSpec
from holdfast.registry.spec.requirements import (
    check_dtypes,
    check_keys,
    check_phase_is_declared,
    flat_dtypes,
)
from holdfast.registry.storage.codecs import Compression, check_compression
from holdfast.registry.streams.segments import check_entries
from holdfast.registry.values.gc_pause import collector_paused
from holdfast.registry.values.process import require_first_rank
from holdfast.registry.values.suggest import near
from holdfast.registry.writing.deltas import check_keyframe_every

#: The phase of runs that declare none.
DEFAULT_PHASE = "main"


class SaveRequest:
    """What a save says beside its state, checked before anything is written; see `Run.save`.

    Attributes:
        takes_over: Whether the program that saves becomes the run's one trainer; a push does not.
        phase: As given; `None` for the phase that the run is in.
        meta: As a plain value, encoded.

    Raises:
        InvalidInput: An argument is wrong.
        Conflict: This process is not rank 0 of its job.
    """

    def __init__(
        self,
        step: object,
        *,
        takes_over: bool,
        phase: int | str | None = None,
        metrics: Mapping[str, object] | None = None,
        meta: object = None,
        tier: str | None = None,
        companions: Mapping[str, object] | None = None,
        streams: Mapping[str, Iterable[Mapping[str, Any]]] | None = None,
        allow_nonfinite: bool = False,
        compression: Compression | None = None,
        keyframe_every: int | None = None,
        precision: PrecisionPolicy | None = None,
        allow_lossy_optimizer: bool = False,
    ) -> None:
        require_first_rank()
        self.takes_over = takes_over
        self.phase = None if phase is None else check_phase(phase)
        self.step = check_step(step)
        self.metrics = check_metrics(metrics)
        self.meta: Any = None if meta is None else encode_plain(meta, "meta")
        self.tier = tier
        self.companions = {
            check_name(name, "a companion"): state for name, state in (companions or {}).items()
        }
        self.streams = {
            check_name(name, "a stream"): check_entries(entries)
            for name, entries in (streams or {}).items()
        }
        self.allow_nonfinite = bool(allow_nonfinite)
        self.compression = check_compression(compression)
        self.keyframe_every = check_keyframe_every(keyframe_every, compresses=compression != "none")
        self.precision = Precision.check(precision, allow_optimizer=bool(allow_lossy_optimizer))


@dataclass(frozen=True)
class PreparedSave:
    """A save whose states are taken apart and found to be what the run demands.

    Attributes:
        request: What it says.
        phase: The phase that it is of.
        given: The state as it was given, without the keys that its commit keeps.
        narrowing: Which of its leaves are stored in fewer bits.
        commit_keys: Those.
        companions: The states beside it.
        counters: Values of the counters that the tiers of the phase name.
    """

    request: SaveRequest
    phase: str
    given: FlatState
    narrowing: Narrowing | None
    commit_keys: CommitKeys | None
    companions: Mapping[str, FlatState]
    counters: Mapping[str, int]

    @cached_property
    def state(self) -> FlatState:
        """The state as it is to be stored.

        Looked for here and not before, so that a save in the background looks there and at its
        copy: numbers that the narrower type of a tensor cannot hold.

        Raises:
            UnsupportedValue: There is one.
        """
        return narrow_state(self.given, self.narrowing) if self.narrowing else self.given

    def copied(self, copy: Callable[[str, FlatState], FlatState]) -> PreparedSave:
        """Return the same with every state copied, each under a name of its own."""
        return replace(
            self,
            given=copy("", self.given),
            companions={name: copy(name, flat) for name, flat in self.companions.items()},
        )


def prepare_save(state: object, request: SaveRequest, run: RunManifest) -> PreparedSave:
    """Take a state apart and hold it against the rules of the run.

    Raises:
        UnsupportedValue: Something in it cannot be stored; the message names its path.
        InvalidInput: The run has no such phase or tier, or a counter of a tier is nowhere; or the
            precision decides about nothing, or about optimizer state.
        IncompatibleState: Required keys are missing, or tensors have another dtype than demanded.
    """
    spec = run.spec
    with collector_paused():
        flat = state if isinstance(state, FlatState) else pytree.flatten(state)
        companions = {name: pytree.flatten(value) for name, value in request.companions.items()}
    pytree.await_devices(flat)
    for companion in companions.values():
        pytree.await_devices(companion)
    phase = request.phase or run.phase or (spec.phases[0].name if spec.phases else DEFAULT_PHASE)
    where = f"{run.run_id}: phase {phase}, step {request.step}"
    check_phase_is_declared(spec, phase)
    check_keys(spec, phase, [part.name for part in flat.components], where=where)
    check_dtypes(spec, flat_dtypes(flat), where=where)
    _check_tier(spec.phase(phase), request.tier, where)
    kept, commit_keys = _split(flat, spec)
    narrowing = _narrowing(kept, request, spec, where)
    counters = _counters(spec.phase(phase), request, flat)
    return PreparedSave(request, phase, kept, narrowing, commit_keys, companions, counters)


def _narrowing(
    state: FlatState, request: SaveRequest, spec: RunSpec, where: str
) -> Narrowing | None:
    """Choose which leaves are stored in fewer bits; the run's rules hold for what is stored too."""
    if request.precision is None:
        return None
    narrowing = request.precision.choose(state, where=where)
    try:
        check_dtypes(spec, stored_dtypes(state, narrowing), where=where)
    except IncompatibleState as error:
        raise IncompatibleState(
            "tensors would be stored in another dtype than the run demands",
            where=f"{where}, precision",
            found=error.found,
            hint="Say 'keep' for them, before the other patterns; or mend the preset.",
        ) from error
    return narrowing


def _split(state: FlatState, spec: RunSpec) -> tuple[FlatState, CommitKeys | None]:
    """Take out of a state the keys that its commit keeps."""
    moved = [part for part in state.components if part.name in spec.commit_keys]
    if not moved:
        return state, None
    for part in moved:
        if part.leaves:
            raise UnsupportedValue(
                "a key that the commit is to keep holds an array or a very long string",
                where=part.leaves[0].path,
                hint="The run's preset lists it in commit_keys; the log holds small plain values.",
            )
    kept = tuple(part for part in state.components if part.name not in spec.commit_keys)
    values = join_plain({part.name: part.skeleton for part in moved}, "the commit keys")
    order = tuple(part.name for part in state.components)
    return FlatState(state.kind, kept), CommitKeys(order=order, values=values)


def _check_tier(phase: Phase, tier: str | None, where: str) -> None:
    tiers = [one.name for one in phase.tiers]
    if tier is not None and tier not in tiers:
        raise InvalidInput(
            "the phase has no such tier",
            where=f"{where}, tier {tier}",
            expected=", ".join(tiers) or "no tier",
            hint=near(tier, tiers),
        )


def _counters(phase: Phase, request: SaveRequest, state: FlatState) -> dict[str, int]:
    """Return the counters that the phase's tiers name: its own, of the state, or of meta."""
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
                f"tier {tier.name} counts in {name}, and nothing says where that stands",
                where=f"phase {phase.name}, step {request.step}",
                expected=f"a whole number as state[{name!r}] or meta[{name!r}]",
                found=type(value).__name__,
            )
        found[name] = value
    return found
