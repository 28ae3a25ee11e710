"""What a save says and what it is made of, checked and taken apart before anything is written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypedDict, Unpack

from registry import pytree
from registry.actions import CommitKeys
from registry.bursts import allocation_burst
from registry.codecs import Compression, check_compression
from registry.environment import require_first_rank
from registry.errors import IncompatibleState, InvalidInput, UnsupportedValue
from registry.options import check_options
from registry.plain import (
    check_metrics,
    check_name,
    check_phase,
    check_step,
    decode_plain,
    encode_plain,
    join_plain,
)
from registry.precision.policy import (
    Narrowing,
    Precision,
    PrecisionPolicy,
    narrow_state,
    stored_dtypes,
)
from registry.pytree import FlatState
from registry.rules import check_dtypes, check_keys, check_phase_is_declared, flat_dtypes
from registry.spec import Phase, RunSpec
from registry.state import RunManifest
from registry.streams.segments import check_entries
from registry.suggest import near
from registry.writing.deltas import check_keyframe_every

#: The phase of runs that declare none.
DEFAULT_PHASE = "main"


class SaveOptions(TypedDict, total=False):
    """What may be said with a save; `Run.save` explains each."""

    phase: int | str | None
    metrics: Mapping[str, object] | None
    meta: object
    tier: str | None
    companions: Mapping[str, object] | None
    streams: Mapping[str, Iterable[Mapping[str, Any]]] | None
    allow_nonfinite: bool
    compression: Compression | None
    keyframe_every: int | None
    precision: PrecisionPolicy | None
    allow_lossy_optimizer: bool


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """What a save says beside its state; checked before anything is written.

    Attributes:
        phase: Phase of the run; the one that it is in where absent.
        step: The counter's value.
        metrics: Values known at save.
        meta: Encoded plain value.
        tier: Retention class; by the phase's rules where absent.
        companions: States to be kept beside it, by name.
        streams: Entries for streams, by name.
        allow_nonfinite: Whether it becomes latest even with NaN or infinity in its weights.
        takes_over: Whether who saves is then the run's one trainer; a push is not.
        compression: How its chunks are stored; as the registry has it where absent.
        keyframe_every: How often a changing chunk is stored whole; the same.
        precision: Which tensors are stored in fewer bits; none where absent.
    """

    phase: str | None
    step: int
    metrics: dict[str, float]
    meta: Any
    tier: str | None = None
    companions: Mapping[str, object] = field(default_factory=dict)
    streams: Mapping[str, list[dict[str, Any]]] = field(default_factory=dict)
    allow_nonfinite: bool = False
    takes_over: bool = True
    compression: Compression | None = None
    keyframe_every: int | None = None
    precision: Precision | None = None

    @classmethod
    def check(
        cls, step: object, *, takes_over: bool = True, **options: Unpack[SaveOptions]
    ) -> SaveRequest:
        """Check the arguments of a save.

        Raises:
            InvalidInput: One of them is wrong.
            Conflict: This process is not rank 0 of its job.
        """
        require_first_rank()
        check_options(options, SaveOptions.__annotations__, "a save")
        phase, meta = options.get("phase"), options.get("meta")
        companions = options.get("companions") or {}
        streams = options.get("streams") or {}
        return cls(
            phase=None if phase is None else check_phase(phase),
            step=check_step(step),
            metrics=check_metrics(options.get("metrics")),
            meta=None if meta is None else encode_plain(meta, "meta"),
            tier=options.get("tier"),
            companions={check_name(name, "a companion"): companions[name] for name in companions},
            streams={
                check_name(name, "a stream"): check_entries(streams[name]) for name in streams
            },
            allow_nonfinite=bool(options.get("allow_nonfinite")),
            takes_over=takes_over,
            compression=check_compression(options.get("compression")),
            keyframe_every=check_keyframe_every(
                options.get("keyframe_every"), compresses=options.get("compression") != "none"
            ),
            precision=Precision.check(
                options.get("precision"),
                allow_optimizer=bool(options.get("allow_lossy_optimizer")),
            ),
        )


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
    with allocation_burst():
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
