"""Evict checkpoints by hand, bring them back (undo), and drop a whole run."""

from __future__ import annotations

import time
from collections.abc import Sequence

from holdfast.registry.curation.pins import kept, own
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
    has_policies,
    plan_retention,
    protections,
    warn_of_unrated,
)
from holdfast.registry.history.actions import (
    Action,
    DropRun,
    Evict,
    Eviction,
    Place,
    Recover,
)
from holdfast.registry.history.replay import CheckpointRecord, RunManifest
from holdfast.registry.loading import Checkpoint
from holdfast.registry.spec import Retention
from holdfast.registry.store import Store
from holdfast.registry.values import Digest
from holdfast.registry.writing import Committer, Composed, Stale, Written


def prune(
    committer: Committer, retention: Retention | None = None, *, dry_run: bool = False
) -> RetentionPlan:
    """Evict the checkpoints that retention does not keep; see `Run.prune`.

    A full store's reserve may be used.
    """
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
    plan = plan_retention(run, _now_ms(), retention)
    if dry_run:
        return plan

    def compose(run: RunManifest) -> Sequence[Action]:
        nonlocal plan
        plan = plan_retention(run, _now_ms(), retention)
        return plan.actions()

    committer.store.with_reserve(lambda: committer.commit(compose))
    warn_of_unrated(run.run_id, plan.unrated, set())
    return plan


def evict(committer: Committer, checkpoint: Checkpoint, reason: str) -> None:
    """Evict one checkpoint; see `Run.evict`. A full store's reserve may be used."""
    n = own(committer, checkpoint, "run.evict")
    _check_reason(committer, reason, "evicting a checkpoint")

    def compose(run: RunManifest) -> Sequence[Action]:
        record = kept(run, n, checkpoint.ref)
        protected = protections(run, record, _now_ms())
        if protected:
            raise Conflict(
                "this checkpoint is protected: no eviction may take it",
                where=checkpoint.ref,
                found=", ".join(protected),
            )
        return [Evict(evictions=(Eviction(checkpoint=n, reason=reason),))]

    committer.store.with_reserve(lambda: committer.commit(compose))


def undo(committer: Committer, checkpoints: Sequence[int]) -> list[CheckpointRecord]:
    """Bring evicted checkpoints back; see `Run.undo`."""
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
        places = [_place(run, digest) for digest in sorted(adopted)]
        try:
            # A run has proven the packs of its states, but not those that a fork inherits.
            is_fork = run.created is not None and run.created.parent is not None
            return committer.writer.adopt(committer.store, places, proves=is_fork)
        except MissingObject as error:
            collected = [n for n in checkpoints if _is_collected(committer.store, run, n)]
            named = ", ".join(run.by_n[n].manifest.short for n in collected)
            raise MissingObject(
                "evicted, and collected since",
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


def _is_collected(store: Store, run: RunManifest, n: int) -> bool:
    """Return whether an object of an evicted checkpoint is gone."""
    record = _evicted(run, n)
    try:
        for digest in (record.manifest, *record.companions.values()):
            place = _place(run, digest)
            store.backend.stat(str(place.manifest_key))
            for pack in store.placement(place.placement_key).packs:
                store.backend.stat(str(pack.key))
    except (MissingObject, ObjectNotFound):
        return True
    return False


def _not_held(run: RunManifest, checkpoints: Sequence[int]) -> set[Digest]:
    """Return the states of evicted checkpoints that the run holds for no other reason."""
    records = [_evicted(run, n) for n in checkpoints]
    wanted = {digest for one in records for digest in (one.manifest, *one.companions.values())}
    return wanted - run.held


def _place(run: RunManifest, digest: Digest) -> Place:
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
    back = [record for n in checkpoints if not (record := _evicted(run, n)).superseded]
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
                    "`run.evicted()` returns the evicted one: until it is collected it can be "
                    "loaded, and saved at another step.",
                    "Name those that shall come back, without this one.",
                ),
            )


def last_evicted(run: RunManifest, commits: Sequence[Evict]) -> list[int]:
    """Return the checkpoints of the newest eviction that are still evicted."""
    for action in reversed(commits):
        found = [
            one.checkpoint
            for one in action.evictions
            if run.by_n[one.checkpoint].evicted is not None
        ]
        if found:
            return found
    return []


def drop(committer: Committer, reason: str) -> None:
    """Give up everything that a run holds, pins included; see `Run.drop`."""
    _check_reason(committer, reason, "dropping a run")
    committer.store.with_reserve(lambda: committer.commit(lambda _: [DropRun(reason=reason)]))


def _check_reason(committer: Committer, reason: str, act: str) -> None:
    if not isinstance(reason, str) or not reason.strip():
        raise InvalidInput(f"{act} needs a reason", where=committer.log.run_id)
    try:
        reason.encode()
    except UnicodeEncodeError as error:  # a lone surrogate
        raise InvalidInput(
            "the reason is not valid Unicode",
            where=committer.log.run_id,
            found=ascii(reason),
        ) from error


def _evicted(run: RunManifest, n: int) -> CheckpointRecord:
    if not run.is_evicted(n) or run.dropped is not None:
        raise NotFound(
            "this checkpoint is not evicted" if run.dropped is None else "the run was dropped",
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
