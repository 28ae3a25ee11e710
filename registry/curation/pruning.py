"""Evict checkpoints by hand and bring them back (undo); drop a whole run and take that back."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from datetime import datetime
from functools import partial
from typing import Any

from holdfast.registry.curation import dropping, holding
from holdfast.registry.curation.pins import check_reason, kept, own
from holdfast.registry.curation.thinning import (
    PER_SLOT,
    PlacedThinnings,
    check_names,
    place,
    place_thinnings,
)
from holdfast.registry.errors import (
    Conflict,
    Hint,
    InvalidInput,
    MissingObject,
    NotFound,
    ObjectNotFound,
)
from holdfast.registry.history import (
    RetentionPlan,
    ended_holds,
    has_policies,
    plan_retention,
    protections,
    store_time_ms,
    warn_of_unrated,
)
from holdfast.registry.history.actions import (
    Action,
    Evict,
    Eviction,
    Place,
    Recover,
    RemoveHold,
    Thin,
    Thinning,
)
from holdfast.registry.history.replay import CheckpointRecord, Hold, RunManifest
from holdfast.registry.loading import Checkpoint
from holdfast.registry.objects import thinned
from holdfast.registry.spec import Retention
from holdfast.registry.store import Address, open_store
from holdfast.registry.values import Digest
from holdfast.registry.writing import Committer, Composed, Stale, Written, after_commit


class RunRetention:
    """The retention of a run; each save also prunes by the preset's policy.

    An eviction only adds a line to the log: `undo` takes it back until `reg.gc` has collected the
    objects.
    """

    def __init__(self, committer: Committer, settle: Callable[[], None]) -> None:
        self._committer = committer
        self._log = committer.log
        self._settle = settle

    def prune(self, retention: Retention | None = None, *, dry_run: bool = False) -> RetentionPlan:
        """Evict the checkpoints that retention does not keep; each save does it, too.

        Args:
            retention: A policy. Default: the preset's.
            dry_run: Only plan.

        Returns:
            The checkpoints that stay and those that go, each with its reasons.

        Raises:
            InvalidInput: The run has no policy, and none is given; or the policy keeps the best,
                and there is no monitor.
            Conflict: The run was dropped.
        """
        committer = self._committer
        run = committer.log.refresh()
        if retention is None and not has_policies(run.spec):
            raise InvalidInput(
                "the run has no retention policy: it keeps everything",
                where=run.run_id,
                hint=Hint(
                    "Give a policy, such as Retention(last=3, best=1).",
                    "Give a policy, such as `--last 3`.",
                ),
            )
        if retention is not None and retention.best:
            _check_monitors(run)
        plan = plan_retention(after_commit(run, self._ended(run)), _now_ms(), retention)
        if dry_run:
            return plan
        done, placed = plan, PlacedThinnings()

        def write() -> list[Written]:
            nonlocal placed
            now = committer.log.run
            now = after_commit(now, self._ended(now))
            placed = place_thinnings(
                committer.writer, now, plan_retention(now, _now_ms(), retention), PER_SLOT
            )
            return placed.states

        def compose(run: RunManifest) -> Sequence[Action]:
            nonlocal done
            ended = self._ended(run)
            run = after_commit(run, ended)
            done = plan_retention(run, _now_ms(), retention)
            return [*ended, *done.actions(), *placed.actions(run, done)]

        # A prune that only evicts writes no objects: it works on a full disk.
        change = Composed(compose, write if plan.thinned else None)
        committer.store.with_reserve(lambda: committer.commit(change))
        first = done
        while len(placed.thinnings) == PER_SLOT:
            committer.commit(Composed(compose, write))
        warn_of_unrated(run.run_id, first.unrated, set())
        return first

    def evict(self, checkpoint: Checkpoint, reason: str) -> None:
        """Evict one checkpoint; `undo` brings it back until it is collected.

        Args:
            checkpoint: Of this run. It may be superseded, or one that was brought back before.
            reason: Why, for readers of the log.

        Raises:
            Conflict: It is protected (the newest of its phase, the best by a monitor, named by a
                gate or a tag, held by a follower or a hold), or it is evicted already.
            InvalidInput: It is another run's, or the reason is empty or cannot be stored.
        """
        n = own(self._committer, checkpoint, "run.retention.evict")
        check_reason(self._committer, reason, "evicting a checkpoint")

        def compose(run: RunManifest) -> Sequence[Action]:
            record = kept(run, n, checkpoint.ref)
            ended = self._ended(run)
            protected = protections(after_commit(run, ended), record, _now_ms())
            if protected:
                raise Conflict(
                    "this checkpoint is protected: no eviction may take it",
                    where=checkpoint.ref,
                    found=", ".join(protected),
                )
            return [*ended, Evict(evictions=(Eviction(checkpoint=n, reason=reason),))]

        self._committer.store.with_reserve(lambda: self._committer.commit(compose))

    def thin(
        self, checkpoint: Checkpoint, keep: str | Iterable[str], reason: str = "thinned by hand"
    ) -> None:
        """Keep only some components of a checkpoint; `undo` brings the others back.

        Its id stays, and `load(only=...)` reads what was kept. Collection deletes the data of the
        other components, unless something else needs it.

        Args:
            checkpoint: Of this run; not evicted. It may have been thinned before.
            keep: The components that stay.
            reason: Why, for readers of the log.

        Raises:
            Conflict: It was evicted, or is protected as in `evict`; but the best may be thinned.
            InvalidInput: It is another run's, `keep` is empty or names no component, or the reason
                is empty or cannot be stored.
            Thinned: A component of `keep` was given up before.
        """
        committer = self._committer
        n = own(committer, checkpoint, "run.retention.thin")
        check_reason(committer, reason, "thinning a checkpoint")
        wanted = [keep] if isinstance(keep, str) else list(keep)
        known = list(checkpoint.manifest.components)
        check_names(wanted, known, checkpoint.ref)
        names = tuple(name for name in known if name in wanted)
        placed = PlacedThinnings()

        def check(run: RunManifest) -> list[RemoveHold]:
            record = kept(run, n, checkpoint.ref)
            ended = self._ended(run)
            found = protections(after_commit(run, ended), record, _now_ms())
            protected = [one for one in found if not one.startswith("best/")]
            if protected:
                raise Conflict(
                    "this checkpoint is protected: it stays whole",
                    where=checkpoint.ref,
                    found=", ".join(protected),
                )
            if record.parts is not None and not set(names) <= set(record.parts):
                raise thinned(record.parts, checkpoint.ref, names)  # its place may cover more
            return ended

        def write() -> list[Written]:
            nonlocal placed
            run = committer.log.run
            run = after_commit(run, check(run))
            thinning = Thinning(checkpoint=n, keep=names, reason=reason)
            placed = place(committer.writer, run, [thinning])
            return placed.states

        def compose(run: RunManifest) -> Sequence[Action]:
            ended = check(run)
            return [*ended, *placed.actions(after_commit(run, ended))]

        committer.commit(Composed(compose, write))

    def hold(self, checkpoint: Checkpoint | None = None, *, until: datetime, reason: str) -> None:
        """Hold a checkpoint, or the whole run: until a time nothing evicts, thins or drops it.

        Until then, by the store's clock, no save may supersede it either. A hold can be made
        longer. It binds programs that keep the rules; against others, the bucket needs Object Lock.

        Args:
            checkpoint: Of this run; not evicted. Default: everything that the run holds.
            until: The end, with a time zone.
            reason: Why, for readers of the log and of the errors.

        Raises:
            InvalidInput: The checkpoint is another run's, or the time or the reason is not legal.
            Conflict: It is evicted, the run is dropped, or it is held for longer already.
        """
        n, where = self._held(checkpoint, "run.retention.hold")
        check_reason(self._committer, reason, "a hold")
        holding.hold(self._committer, n, until, reason, where)

    def unhold(self, checkpoint: Checkpoint | None = None, *, reason: str) -> None:
        """End a hold before its time, with the rights of a collector.

        Args:
            checkpoint: The checkpoint that is held. Default: the hold on the whole run.
            reason: Why, for readers of the log.

        Raises:
            NotFound: It is not held.
            InvalidInput: It is another run's, or the reason is empty or cannot be stored.
            AccessDenied: This program has not the rights of a collector; the hold stays.
        """
        n, where = self._held(checkpoint, "run.retention.unhold")
        check_reason(self._committer, reason, "ending a hold")
        holding.unhold(self._committer, n, reason, where)

    def holds(self) -> list[Hold]:
        """Return the holds of the run as of now.

        Each has the commit number of its `checkpoint` (`None`: the whole run), its end `until_ms`
        in milliseconds since 1970, its `reason`, and its `author`, a claim. One whose time is over
        stays until the next eviction, thinning or drop removes it.
        """
        return list(self._log.refresh().holds or ())

    def evicted(self) -> list[Checkpoint]:
        """Return the checkpoints that are evicted now, oldest first.

        This reads the log from its beginning.
        """
        self._log.refresh()
        return [self._checkpoint(one) for one in self._log.history().evicted]

    def undo(self, *checkpoints: Checkpoint) -> list[Checkpoint]:
        """Bring evicted or thinned checkpoints back: the given ones, or those of the last time.

        Args:
            *checkpoints: Of this run: from `evicted`, or thinned ones, which become whole.

        Returns:
            The checkpoints. Retention does neither evict nor thin them again.

        Raises:
            NotFound: One of them is neither evicted nor thinned, or nothing is.
            Conflict: Another checkpoint holds its step now.
            MissingObject: Its objects were collected, or this mirror never had them.
        """
        chosen = [own(self._committer, one, "undo") for one in checkpoints]
        self._committer.await_earlier()  # those saves may evict
        back = _bring_back(self._committer, chosen or self._last_evicted())
        return [self._checkpoint(record) for record in back]

    def drop(self, reason: str, *, now: bool = False) -> None:
        """Drop the run, gates and releases included: nothing finds it from here on.

        It holds its checkpoints until a collection frees it, after the delay of the registry
        (`Registry.drop_rules`, 7 days by default). Until then `undrop` brings it back.

        Args:
            reason: Why, for readers of the log.
            now: Free it at once, also if it was dropped before. It takes the rights of a collector.

        Raises:
            InvalidInput: The reason is empty or cannot be stored.
            Conflict: The run was dropped before, or it or a checkpoint is held.
            AccessDenied: `now` was given without these rights; nothing was dropped.
        """
        self._settle()
        check_reason(self._committer, reason, "dropping a run")
        dropping.drop(self._committer, reason, now=now)

    def undrop(
        self,
        mirror: str | os.PathLike[str] | None = None,
        *,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        """Bring the run back after a drop, with everything that it held.

        Args:
            mirror: A registry that still has the objects of the run, if it was freed since. Its own
                URL does while nothing was collected.
            storage_options: Options of the file system at that URL.

        Raises:
            NotFound: The run is not dropped; or there is no registry at that URL.
            Conflict: It was freed since, and no mirror is given; or it was dropped for good.
            MissingObject: The mirror does not have all objects either; nothing was brought back.
        """
        with ExitStack() as stack:
            source = None
            if mirror is not None:
                source = open_store(Address(mirror, storage_options), read_only=True)
                stack.callback(source.close)
            dropping.undrop(self._committer, source)

    def _held(self, checkpoint: Checkpoint | None, act: str) -> tuple[int | None, str]:
        """Return the commit number of a checkpoint, or `None` for the run, and its name."""
        if checkpoint is None:
            return None, self._log.run_id
        return own(self._committer, checkpoint, act), checkpoint.ref

    def _ended(self, run: RunManifest) -> list[RemoveHold]:
        """Return the actions that remove the holds whose time is over."""
        return ended_holds(run, partial(store_time_ms, self._committer.store, self._log))

    def _checkpoint(self, record: CheckpointRecord) -> Checkpoint:
        return Checkpoint(self._committer.store, self._log, record)

    def _last_evicted(self) -> list[int]:
        """Return the checkpoints of the newest eviction or thinning that are still so."""
        commits = list(self._log.commits())
        self._log.refresh()  # those commits may be newer than what this handle has read
        run = self._log.history()
        for action in reversed([one for commit in commits for one in commit.actions]):
            found: list[int] = []
            if isinstance(action, Evict):
                evicted = [one.checkpoint for one in action.evictions]
                found = [n for n in evicted if run.by_n[n].evicted is not None]
            elif isinstance(action, Thin):
                records = [run.by_n[one.checkpoint] for one in action.thinnings]
                found = [one.n for one in records if one.evicted is None and one.parts is not None]
            if found:
                return found
        return []


def _bring_back(committer: Committer, checkpoints: Sequence[int]) -> list[CheckpointRecord]:
    """Bring evicted checkpoints back."""
    log = committer.log
    log.refresh()
    checkpoints = tuple(dict.fromkeys(checkpoints))
    if not checkpoints:
        raise NotFound("nothing was evicted", where=log.run_id)

    adopted: set[Digest] = set()

    def plan() -> list[Written]:
        nonlocal adopted
        run = log.history()
        _check_steps_are_free(run, checkpoints)
        adopted = _not_held(run, checkpoints)
        back = after_commit(run, [Recover(checkpoints=checkpoints)])
        for digest in sorted(adopted):
            _last_place(run, digest)
        try:
            places = [_place(committer, run, digest, back) for digest in sorted(adopted)]
            # A run has verified the packs of its states, but not those that a fork inherits.
            is_fork = run.created is not None and run.created.parent is not None
            return committer.writer.adopt(committer.store, places, verifies=is_fork)
        except MissingObject as error:
            collected = [n for n in checkpoints if _is_collected(committer, run, n)]
            named = ", ".join(run.by_n[n].manifest.short for n in collected)
            raise MissingObject(
                f"{'evicted' if all(map(run.is_evicted, collected)) else 'thinned'}, and collected "
                "since",
                where=f"{log.run_id}: {named}" if collected else error.where,
                hint="Nothing was brought back. A mirror that was synced before may still hold it; "
                "other checkpoints can be brought back by name.",
            ) from error

    def compose(run: RunManifest) -> Sequence[Action]:
        if _not_held(run, checkpoints) - adopted:
            raise Stale  # the run held a state for another reason, and no longer does
        _check_steps_are_free(run, checkpoints)
        return [Recover(checkpoints=checkpoints)]

    committer.commit(Composed(compose, plan, on_dropped=True))
    return [log.knowing(n).by_n[n] for n in checkpoints]


def _is_collected(committer: Committer, run: RunManifest, n: int) -> bool:
    """Return whether an object of an evicted or thinned checkpoint is gone."""
    store, back = committer.store, after_commit(run, [Recover(checkpoints=(n,))])
    record = _evicted(run, n)
    try:
        for digest in (record.manifest, *record.companions.values()):
            place = _place(committer, run, digest, back)
            store.backend.stat(str(place.manifest_key))
            for pack in store.placement(place.placement_key).packs:
                store.backend.stat(str(pack.key))
    except (MissingObject, ObjectNotFound):
        return True
    return False


def _not_held(run: RunManifest, checkpoints: Sequence[int]) -> set[Digest]:
    """Return the states that come back: of evicted and thinned checkpoints what is not held."""
    records = [_evicted(run, n) for n in checkpoints]
    wanted = {digest for one in records for digest in (one.manifest, *one.companions.values())}
    return {digest for digest in wanted if digest not in run.held or digest in run.thinned}


def _place(committer: Committer, run: RunManifest, digest: Digest, back: RunManifest) -> Place:
    """Return the newest place of a state that covers what the run after an undo holds of it."""
    _last_place(run, digest)
    wanted = set(back.thinned.get(digest, ()))
    return dropping.place_covering(committer.log, committer.store, digest, wanted)


def _last_place(run: RunManifest, digest: Digest) -> Place:
    """Return the place of an evicted state; a mirror may never have had it."""
    place = run.by_manifest.get(digest)
    if place is None:
        raise MissingObject(
            "this checkpoint was evicted, and this registry never held it",
            where=f"{run.run_id}/{digest.short}",
            hint="Undo it in the registry where it was saved, then sync.",
        )
    return place


def _check_steps_are_free(run: RunManifest, checkpoints: Sequence[int]) -> None:
    """Refuse to bring back a second checkpoint for a step of a phase on the current line."""
    records = [_evicted(run, n) for n in checkpoints]
    back = [one for one in records if one.evicted is not None and not one.superseded]
    held = {(record.phase, record.step): record for record in run.live()}
    for record in back:
        other = held.setdefault((record.phase, record.step), record)
        if other is not record:
            raise Conflict(
                "another checkpoint holds this step",
                where=f"{run.run_id}: phase {record.phase}, step {record.step}",
                expected=f"{record.manifest.short} of commit {record.n} alone",
                found=f"{other.manifest.short} of commit {other.n}",
                hint=Hint(
                    "`run.retention.evicted()` returns the evicted one: until it is collected it "
                    "can be loaded, and saved at another step.",
                    "Name those that shall come back, without this one.",
                ),
            )


def _evicted(run: RunManifest, n: int) -> CheckpointRecord:
    is_thinned = n in run.by_n and run.by_n[n].parts is not None
    if not (run.is_evicted(n) or is_thinned) or run.dropped is not None:
        raise NotFound(
            "this checkpoint is not evicted, and not thinned"
            if run.dropped is None
            else "the run was dropped",
            where=f"{run.run_id}: commit {n}",
        )
    return run.record(n)


def _check_monitors(run: RunManifest) -> None:
    for record in run.checkpoints:
        if record.evicted is None and not run.spec.phase(record.phase).monitors:
            raise InvalidInput(
                "the best checkpoints cannot be kept without a monitor",
                where=f"{run.run_id}: phase {record.phase}",
                hint="Create runs with a monitor, or prune by another policy.",
            )


def _now_ms() -> int:
    return int(time.time() * 1000)
