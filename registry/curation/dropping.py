"""Drop a whole run, and take that back: `run.hide`, `run.undrop` and the line `free`.

A hidden run holds everything. A collection frees it after the delay of the registry
(`holdfast.registry.upkeep.planning`), `drop` with `now` at once. Specified in docs/spec.md,
section 13.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from holdfast.registry.errors import Conflict, Hint, MissingObject, NotFound, StorageError
from holdfast.registry.history import RunLog, end_all_holds, how_to_undrop, store_time_ms
from holdfast.registry.history.actions import Action, Free, HideRun, Line, Place, UndropRun
from holdfast.registry.history.replay import RunManifest
from holdfast.registry.store import Store, ask_time
from holdfast.registry.values import Digest
from holdfast.registry.writing import Committer, Composed, NewCommit, Stale, Written, after_commit


def drop(committer: Committer, reason: str, *, now: bool) -> None:
    """Hide a run; with `now`, free it as well, also if it is hidden already."""
    store = committer.store
    if now:
        check_may_collect(
            store,
            "Nothing was dropped. To free a run at once takes the rights of a collector.",
            Hint(
                "Without `now` it is hidden, and freed after the delay of the registry.",
                "Without --now it is hidden, and freed after the delay of the registry.",
            ),
        )
        committer.log.refresh()
    change = _Drop(reason, partial(store_time_ms, store, committer.log), now=now)
    store.with_reserve(lambda: committer.commit(change))


def undrop(committer: Committer, mirror: Store | None = None) -> None:
    """Bring a dropped run back; a freed one needs its states from a mirror.

    A hidden run held everything meanwhile, so nothing is written for it. The states of a freed one
    are adopted by rules W1 to W5.
    """
    log, adopted = committer.log, set[Digest]()

    def check(run: RunManifest) -> bool:
        """Return whether the run can come back, and needs its states for that."""
        if run.dropped is None:
            raise NotFound("the run is not dropped", where=run.run_id)
        if run.is_dropped_for_good or (not run.is_hidden and mirror is None):
            raise Conflict(
                "the run was dropped for good, by an older version or by `gc --forget`"
                if run.is_dropped_for_good
                else "the run was dropped, and freed since",
                where=run.run_id,
                hint=how_to_undrop(run),
            )
        return not run.is_hidden

    def plan() -> list[Written]:
        nonlocal adopted
        adopted = set()
        if not check(log.run) or mirror is None:
            return []
        back = after_commit(log.run, [UndropRun()])
        adopted = set(back.held)
        source = RunLog(mirror, log.run_id)
        source.open()
        wanted = {digest: back.thinned.get(digest, ()) for digest in sorted(adopted)}
        try:
            places = [place_covering(source, mirror, d, set(names)) for d, names in wanted.items()]
            return committer.writer.adopt(mirror, places)
        except MissingObject as error:
            error.hints = Hint.of(
                f"Nothing was brought back from {mirror.backend.url}.", error.hints
            )
            raise

    def compose(run: RunManifest) -> Sequence[Action]:
        if check(run) and set(run.uses) != adopted:
            raise Stale  # it was freed meanwhile, or holds something else
        return [UndropRun()]

    log.refresh()
    change = Composed(compose, None if mirror is None else plan, on_dropped=True)
    committer.store.with_reserve(lambda: committer.commit(change))


def place_covering(log: RunLog, store: Store, digest: Digest, wanted: set[str]) -> Place:
    """Return the newest place of a state that covers some components of it; none: the whole."""
    newest = log.history().by_manifest.get(digest)
    if newest is not None and _covers(store, newest, wanted):
        return newest
    lines = [line for slot in log.slots() for _, line in slot.lines if isinstance(line, Place)]
    older = (one for one in reversed(lines) if one.manifest == digest)
    found = next((one for one in older if _covers(store, one, wanted)), None)
    if found is None:
        raise MissingObject("no place covers the state", where=f"{log.run_id}/{digest.short}")
    return found


def _covers(store: Store, place: Place, wanted: set[str]) -> bool:
    """Return whether a place covers these components; none: the whole state."""
    try:
        held = store.placement(place.placement_key).components
    except MissingObject:
        return False
    return held is None or (bool(wanted) and wanted <= set(held))


class _Drop(NewCommit):
    """The drop of a run."""

    noun = "drop"
    writes = False

    def __init__(self, reason: str, now_ms: Callable[[], float], *, now: bool) -> None:
        self._reason, self._now_ms = reason, now_ms
        self._now = now

    def check(self, run: RunManifest) -> None:
        """Refuse a run that was dropped; a hidden one can be freed."""
        if not (self._now and run.is_hidden):
            super().check(run)

    def actions(self, run: RunManifest) -> Sequence[Action] | None:
        """Return the action that hides the run; a hold forbids it."""
        if run.is_hidden:
            return None
        return [*end_all_holds(run, self._now_ms), HideRun(reason=self._reason)]

    def lines(self, run: RunManifest) -> Sequence[Line] | None:
        """Return the commit that hides the run, and the line that frees it."""
        return [*(super().lines(run) or ()), *([Free()] if self._now else [])]


def check_may_collect(store: Store, *hints: Hint | str) -> None:
    """Refuse an act unless this program may put and delete what collectors may."""
    try:
        ask_time(store)
    except StorageError as error:
        error.hints = Hint.of(*hints, error.hints)
        raise
