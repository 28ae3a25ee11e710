"""Fold further slots into a run, and check the rules of the history."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from holdfast.registry.history import actions
from holdfast.registry.history.actions import (
    Commit,
    CreateRun,
    Forget,
    Mark,
    Place,
    line_digest,
)
from holdfast.registry.history.replay import apply, apply_pool
from holdfast.registry.history.replay.draft import Draft
from holdfast.registry.history.replay.run_manifest import RunManifest
from holdfast.registry.history.replay.slot import Slot


def advance(run: RunManifest, slots: Iterable[Slot]) -> RunManifest:
    """Fold further slots into a run. A compact one stays compact."""
    draft = Draft(run)
    for slot in slots:
        _fold(draft, slot)
    return draft.freeze()


def foresee(run: RunManifest, commits: Iterable[Commit]) -> RunManifest:
    """Return the run after commits that are not put yet, and whose manifests are not placed yet."""
    run.prepare()
    draft = Draft(run)
    draft.where = f"{run.run_id}: slot {run.next_slot}"
    for commit in commits:
        _commit(draft, commit.encode(), commit)
    draft.next_slot += 1
    draft.end_slot(is_placed=False)
    return draft.freeze()


def _fold(draft: Draft, slot: Slot) -> None:
    draft.where = f"{draft.base.run_id}: slot {slot.number}"
    draft.require(slot.number == draft.next_slot, f"a gap before it at {draft.next_slot}")
    for raw, line in slot.lines:
        match line:
            case Commit():
                _commit(draft, raw, line)
            case Place():
                draft.place(line)
            case Mark():
                # Collectors may overlap, so an older mark can follow a newer one.
                draft.epoch = max(draft.epoch, line.epoch)
            case Forget():
                draft.require(draft.commits > 0, "a run that was never created is forgotten")
                draft.fields["dropped"] = "forgotten, by `holdfast gc --forget`"
    draft.next_slot += 1
    draft.end_slot(is_placed=True)


def _commit(draft: Draft, raw: bytes, commit: Commit) -> None:
    draft.time_ms = commit.time_ms
    draft.require(commit.run == draft.base.run_id, f"a commit of run {commit.run}")
    draft.require(commit.n == draft.commits, f"commit {commit.n} instead of {draft.commits}")
    draft.require(commit.prev == draft.head, f"commit {commit.n} does not chain to the one before")
    begins = bool(commit.actions) and isinstance(commit.actions[0], CreateRun)
    draft.require(begins == (commit.n == 0), "a run is created by commit 0 and by no other")
    dropped = draft.fields.get("dropped", draft.base.dropped) is not None
    draft.require(not dropped, "a commit after the run was dropped")
    for action in commit.actions:
        _APPLY[type(action)](draft, action)
    draft.commits += 1
    draft.head = line_digest(raw)


_APPLY: dict[type, Callable[[Draft, Any], None]] = {
    actions.CreateRun: apply.create,
    actions.SetStatus: apply.set_status,
    actions.TakeOver: apply.take_over,
    actions.Rewind: apply.rewind,
    actions.EnterPhase: apply.enter_phase,
    actions.DropRun: apply.drop,
    actions.AddCheckpoint: apply.add,
    actions.ReportMetrics: apply.report,
    actions.Evict: apply.evict,
    actions.Recover: apply.recover,
    actions.Thin: apply.thin,
    actions.SetTag: apply.set_tag,
    actions.RemoveTag: apply.remove_tag,
    actions.SetPin: apply.set_pin,
    actions.PointRelease: apply.point_release,
    actions.Promote: apply_pool.promote,
    actions.RateMatch: apply_pool.rate,
    actions.EvictEntries: apply_pool.evict,
    actions.AppendStream: apply.append_stream,
    actions.ArchiveStream: apply.archive_stream,
    actions.Claim: apply.claim,
    actions.Acknowledge: apply.acknowledge,
}
