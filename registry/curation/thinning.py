"""Thin checkpoints: keep some components, and give up the others.

A thinning is a line of the log and, in the same slot, a new place that covers what the run still
holds of the state. Collection deletes the rest like every object that no place names. Specified in
docs/spec.md, section 22.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from holdfast.backends.escape import quoted
from holdfast.registry.errors import IntegrityError, InvalidInput
from holdfast.registry.history import RetentionPlan, Verdict
from holdfast.registry.history.actions import Action, Thin, Thinning
from holdfast.registry.history.replay import RunManifest
from holdfast.registry.values import Digest, Name, near
from holdfast.registry.writing import Stale, StateWriter, Written, after_commit

_LOGGER = logging.getLogger("holdfast")
#: Checkpoints that one slot of a prune thins, and one save.
PER_SLOT = 256
PER_SAVE = 8


@dataclass(slots=True)
class PlacedThinnings:
    """Thinnings whose new placements are on the store."""

    thinnings: dict[int, Thinning] = field(default_factory=dict)  # by checkpoint
    states: list[Written] = field(default_factory=list)  # what the run then holds in part

    def actions(self, run: RunManifest, plan: RetentionPlan | None = None) -> list[Action]:
        """Return the action for a run, where the places still have to be what it then holds.

        With a plan, that has to thin these checkpoints, too.
        """
        if not self.thinnings:
            return []
        wanted = self.thinnings.keys() if plan is None else {o.checkpoint.n for o in plan.thinned}
        if not self.thinnings.keys() <= wanted or any(map(run.is_evicted, self.thinnings)):
            raise Stale
        parts = ((run.by_n[n].parts, one.keep) for n, one in self.thinnings.items())
        if any(has is not None and not set(keep) <= set(has) for has, keep in parts):
            raise Stale  # somebody has thinned it further
        held = _held_after(run, self.thinnings.values())
        placed = {one.state.manifest.digest: one.state.placement.components for one in self.states}
        manifests = {run.by_n[n].manifest for n in self.thinnings}
        for digest in manifests | placed.keys():
            if sorted(held.get(digest, ())) != sorted(placed.get(digest) or ()):
                raise Stale  # another checkpoint has come or gone that holds the state
        return [Thin(thinnings=tuple(self.thinnings.values()))]


def place_thinnings(
    writer: StateWriter, run: RunManifest, plan: RetentionPlan, limit: int
) -> PlacedThinnings:
    """Put the placements for the checkpoints that a plan thins, the oldest first."""
    known = writer.unthinnable
    wanted = [one for one in plan.thinned if one.checkpoint.manifest not in known][:limit]
    found: list[Thinning] = []
    for one, thinning in zip(
        wanted, writer.store.pools.small.map(lambda one: _of(writer, one), wanted), strict=True
    ):
        if thinning is not None:
            found.append(thinning)
            continue
        known.add(one.checkpoint.manifest)
        _LOGGER.warning(
            "%s: the checkpoint of step %d is not thinned and stays whole: it has none of the "
            "components %s, or cannot be read",
            run.run_id,
            one.checkpoint.step,
            ", ".join(one.only),
        )
    return place(writer, run, found)


def _of(writer: StateWriter, verdict: Verdict) -> Thinning | None:
    record = verdict.checkpoint
    try:
        names = writer.components_of(record.manifest)
    except IntegrityError:
        return None  # what is damaged stays as it is
    kept = [name for name in names if name in verdict.only]
    if record.parts is not None:
        kept = [name for name in kept if name in record.parts]
    reason = "; ".join(verdict.reasons)
    return Thinning(checkpoint=record.n, keep=tuple(kept), reason=reason) if kept else None


def place(writer: StateWriter, run: RunManifest, thinnings: Sequence[Thinning]) -> PlacedThinnings:
    """Put the placements of states that the run holds in part after some thinnings."""
    if not thinnings:
        return PlacedThinnings()
    held = _held_after(run, thinnings)
    wanted = dict.fromkeys(run.by_n[one.checkpoint].manifest for one in thinnings)
    parts = [(digest, held[digest]) for digest in wanted if digest in held]
    states = list(writer.store.pools.small.map(lambda part: writer.thin(*part), parts))
    return PlacedThinnings({one.checkpoint: one for one in thinnings}, states)


def _held_after(run: RunManifest, thinnings: Iterable[Thinning]) -> dict[Digest, tuple[Name, ...]]:
    return dict(after_commit(run, [Thin(thinnings=tuple(thinnings))]).thinned)


def check_names(names: Sequence[str], components: Sequence[str], where: str) -> None:
    """Refuse names that are no components of a checkpoint, or none at all."""
    if not names:
        raise InvalidInput("a thinned checkpoint keeps something", where=where, expected="names")
    for name in names:
        if name not in components:
            raise InvalidInput(
                "no such component",
                where=f"{where}: {quoted(name)}",
                expected=", ".join(components),
                hint=near(name, components),
            )
