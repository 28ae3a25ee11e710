"""Commits that name stored states: written first, named in one slot, planned anew where needed.

One `Committer` belongs to one handle of a run. Who may commit what is the business of its callers:
the trainer (`registry.trainer.trainer`), and those who annotate a run and need no token.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from functools import partial, reduce
from threading import RLock

from registry import pytree
from registry.actions import Action, Line, Place
from registry.bursts import allocation_burst
from registry.charge import check_not_dropped
from registry.codecs import COMPRESSIONS, Compression
from registry.digest import Digest
from registry.errors import Conflict, IntegrityError, MissingObject
from registry.log import RunLog, commit_line
from registry.pytree import FlatState
from registry.reading.loading import read_lists
from registry.state import Forgotten, RunManifest, foresee
from registry.state_reader import StateReader
from registry.store import Store
from registry.writer import Choice, Condemned, Writer
from registry.writing.adopting import adopt
from registry.writing.deltas import Trials
from registry.writing.placing import Base, Written, cut_state
from registry.writing.room import check_state_fits
from registry.writing.saving import write_state

#: Checkpoints whose chunks a save looks through before it stores any.
MAX_BASES = 8
#: States that a handle remembers, so that they need not be read again: bases of its states and of
#: what it saves beside them.
_KEPT_BASES = 3 * MAX_BASES
_PLANS = 5

#: Gives the actions of the next commit for the run as it stands, or raises where they are not
#: allowed. Without actions only places that have changed are put; `None` means nothing at all.
Compose = Callable[[RunManifest], Sequence[Action] | None]
#: Puts states on the store that the commit names.
Plan = Callable[[], Sequence[Written]]


class Stale(Exception):
    """What was written for a commit does not fit the run any more: write it anew."""


class Committer:
    """Writes states of one run, and commits what names them.

    Attributes:
        store: The registry's objects.
        log: The run's log.
        writer: Chooses the keys.
    """

    def __init__(self, store: Store, log: RunLog) -> None:
        self.store = store
        self.log = log
        self.writer = Writer(store, log)
        self._bases: dict[Digest, Base] = {}
        self._trials = Trials()
        self._pid, self._made_lock = os.getpid(), RLock()

    @property
    def _lock(self) -> RLock:
        if self._pid != os.getpid():
            # A fork copies the lock as it was: a save that the parent has under way holds it.
            self._pid, self._made_lock = os.getpid(), RLock()
        return self._made_lock

    def commit(self, compose: Compose, plan: Plan = tuple) -> RunManifest:
        """Commit, once what the commit names is on the store.

        Args:
            compose: The actions; called again after every lost race.
            plan: Writes the states that the actions name; called again where a sweep condemned
                what it chose.

        Returns:
            The run at the commit, or at the head where there was nothing to say.

        Raises:
            Conflict: Sweeps, or other writers, came between too often.
        """

        def composed(state: RunManifest) -> list[Sequence[Action]] | None:
            actions = compose(state)
            return None if actions is None else [actions]

        return self.commit_several(composed, plan)

    def commit_several(
        self, compose: Callable[[RunManifest], list[Sequence[Action]] | None], plan: Plan = tuple
    ) -> RunManifest:
        """Put several commits into one slot; otherwise as `commit`."""
        # What writes no objects need not wait for a save that does.
        with nullcontext() if plan is tuple else self._lock:
            for _ in range(_PLANS):
                read = self.log.state.next_slot
                look = self.log.look()  # beside what is sent
                try:
                    written = self._planned(plan)
                except MissingObject:
                    look.outcome.result()
                    # Let go and collected meanwhile? Then it is for `compose` to say so.
                    state = self.log.refresh()
                    if state.next_slot == read:
                        raise
                    with suppress(Stale):
                        try:
                            compose(state)
                        except Forgotten:
                            compose(self.log.history())
                    continue
                choice = reduce(Choice.__or__, [one.choice for one in written], Choice())
                try:
                    state = self.writer.commit(partial(_lines, written, compose), choice, look)
                except Condemned:
                    # A sweep passed between choosing and committing: choose anew.
                    self._bases.clear()
                    continue
                except Stale:
                    continue
                for one in written:
                    if state.is_placed(one.base.place):
                        self._keep(one.base)
                return state
            raise Conflict(
                f"sweeps or other writers overtook this commit {_PLANS} times in a row",
                where=self.log.run_id,
                hint="Nothing was committed; try again, and let collectors run less often.",
            )

    def _planned(self, plan: Plan) -> Sequence[Written]:
        for _ in range(_PLANS):
            with suppress(Forgotten):
                return plan()
            # Once is enough, unless another thread reads on and has the run compact again.
            self.log.recall()
        return plan()

    def write(
        self,
        state: FlatState,
        bases: Sequence[Base],
        compression: Compression | None = None,
        keyframe_every: int | None = None,
        watched: Sequence[str] = (),
    ) -> Written:
        """Put a state on the store.

        Args:
            state: The state.
            bases: States that hold chunks of it already.
            compression: `none`, `zstd` or `lz4`; the registry's own without it.
            keyframe_every: How often a chunk that goes on changing is stored whole; as the registry
                has it without it. Deltas are compressed, by `zstd` where nothing else is said.
            watched: Patterns of the paths of tensors that are checked for NaN and infinity.

        Raises:
            StoreFull: It cannot fit.
        """
        config = self.store.config
        every = keyframe_every or config.keyframe_every or 1
        codec = compression or config.compression or ("none" if every == 1 else "zstd")
        check_state_fits(self.store, self.writer, state, bases, COMPRESSIONS[codec])
        return write_state(
            self.store,
            self.writer,
            state,
            bases,
            COMPRESSIONS[codec],
            every,
            self._trials,
            watched,
        )

    def write_plain(self, state: object) -> Written:
        """Put a state on the store that is like none of the checkpoints."""
        with allocation_burst():
            flat = state if isinstance(state, FlatState) else pytree.flatten(state)
        pytree.await_devices(flat)
        return self.write(flat, ())

    def adopt(self, source: Store, places: Sequence[Place]) -> list[Written]:
        """Take over states that another run, another registry or an eviction left behind.

        Raises:
            IntegrityError: Something of them is damaged or gone.
        """
        adopted, choice = adopt(source, self.store, self.writer, places)
        return [Written(self._placed(place), choice, 0) for place in adopted]

    def _placed(self, place: Place) -> Base:
        manifest = self.store.manifest(place.manifest_key)
        placement = self.store.placement(place.placement_key)
        return Base(place, manifest, placement, read_lists(self.store, manifest, placement))

    def cut(self, manifest: Digest, names: Sequence[str]) -> Written:
        """Make a state of some components of one that the run holds; no chunk is stored again.

        Raises:
            IntegrityError: Its manifest or placement is damaged or gone.
        """
        base = self.base(manifest)
        return cut_state(self.store, self.writer, base, names)

    def base(self, manifest: Digest) -> Base:
        """Return what a state of the run is and where.

        Raises:
            IntegrityError: Its manifest or placement is damaged or gone.
        """
        reader = StateReader(self.store, self.log, manifest, f"{self.log.run_id}/{manifest.short}")
        kept = self._bases.get(manifest)
        if kept is None or kept.place != reader.place:
            kept = reader.base()
        self._keep(kept)
        return kept

    def _keep(self, base: Base) -> None:
        self._bases.pop(base.manifest.digest, None)
        self._bases[base.manifest.digest] = base
        while len(self._bases) > _KEPT_BASES:
            del self._bases[next(iter(self._bases))]

    def choose_bases(self, wanted: Iterable[Digest]) -> list[Base]:
        """Return the first `MAX_BASES` states that another one can be stored against."""
        held = self.log.state.held
        bases: dict[Digest, Base] = {}
        for manifest in wanted:
            if len(bases) == MAX_BASES:
                break
            if manifest in bases or manifest not in held:
                continue
            try:
                bases[manifest] = self.base(manifest)
            except IntegrityError:
                # A damaged state saves nothing; what it held is stored again.
                continue
        return list(bases.values())


def preview(state: RunManifest, actions: Sequence[Action]) -> RunManifest:
    """Return the run as it is after a commit of these actions."""
    return foresee(state, [commit_line(state, actions)]) if actions else state


def _lines(
    written: Sequence[Written],
    compose: Callable[[RunManifest], list[Sequence[Action]] | None],
    state: RunManifest,
) -> list[Line] | None:
    commits = compose(state)
    if commits is None:
        return None
    if any(commits):
        check_not_dropped(state)
    places = dict.fromkeys(one.base.place for one in written)
    lines: list[Line] = [p for p in places if state.by_manifest.get(p.manifest) != p]
    for number, actions in enumerate(commits):
        if not actions:
            continue
        commit = commit_line(state, actions)
        lines.append(commit)
        if number + 1 < len(commits):
            state = foresee(state, [commit])
    return lines or None
