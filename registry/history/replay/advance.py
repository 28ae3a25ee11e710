"""The slots of a log: fold further ones into a run, and check the rules of the history."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from holdfast.registry.history import actions
from holdfast.registry.history.replay import apply
from holdfast.registry.history.replay.draft import Draft
from holdfast.registry.history.replay.run_manifest import RunManifest
from holdfast.registry.objects import join_lines, split_lines
from holdfast.registry.values import Digest


class Slot(NamedTuple):
    """One numbered file of a run's log."""

    number: int  # its number in the log, dense from 0
    data: bytes
    lines: tuple[tuple[bytes, actions.Line], ...]  # its lines, each with its exact bytes

    @classmethod
    def build(cls, number: int, lines: Sequence[actions.Line | bytes]) -> Slot:
        """Assemble a slot from records, or from lines that are copied byte for byte."""
        encoded = [line if isinstance(line, bytes) else line.encode() for line in lines]
        return cls.decode(number, join_lines(encoded), where=f"slot {number}")

    @classmethod
    def decode(cls, number: int, data: bytes, *, where: str) -> Slot:
        """Verify and parse a file."""
        lines = split_lines(data, where=where)
        return cls(
            number, data, tuple((line, actions.decode_line(line, where=where)) for line in lines)
        )

    @property
    def commits(self) -> tuple[tuple[bytes, actions.Commit], ...]:
        """The commit lines, each with its exact bytes."""
        return tuple((raw, line) for raw, line in self.lines if isinstance(line, actions.Commit))


def advance(run: RunManifest, slots: Iterable[Slot]) -> RunManifest:
    """Fold further slots into a run. A compact one stays compact."""
    draft = Draft(run)
    for slot in slots:
        _fold(draft, slot)
    return draft.freeze()


def foresee(run: RunManifest, commits: Iterable[actions.Commit]) -> RunManifest:
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
            case actions.Commit():
                _commit(draft, raw, line)
            case actions.Place():
                draft.place(line)
            case actions.Mark():
                # Collectors may overlap, so an older mark can follow a newer one.
                draft.epoch = max(draft.epoch, line.epoch)
            case actions.Forget():
                draft.require(draft.commits > 0, "a run that was never created is forgotten")
                dropped = "forgotten, by `holdfast gc --forget`"
                draft.fields |= {"dropped": dropped, "hidden_at": None, "freed_at": None}
            case actions.Free():
                apply.free(draft)
            case actions.Seal():
                is_alone = all(
                    isinstance(one, actions.Mark | actions.Seal) for _, one in slot.lines
                )
                draft.require(draft.commits > 0 and is_alone, "a seal beside other lines")
                draft.fields["sealed_at"] = slot.number
    draft.next_slot += 1
    draft.end_slot(is_placed=True)


def _commit(draft: Draft, raw: bytes, commit: actions.Commit) -> None:
    draft.time_ms, draft.author = commit.time_ms, commit.author
    draft.require(commit.run == draft.base.run_id, f"a commit of run {commit.run}")
    draft.require(commit.n == draft.commits, f"commit {commit.n} instead of {draft.commits}")
    draft.require(commit.prev == draft.head, f"commit {commit.n} does not chain to the one before")
    begins = bool(commit.actions) and isinstance(commit.actions[0], actions.CreateRun)
    draft.require(begins == (commit.n == 0), "a run is created by commit 0 and by no other")
    undrops = any(isinstance(action, actions.UndropRun) for action in commit.actions)
    if undrops:
        is_so = draft.now("hidden_at") is not None and len(commit.actions) == 1
        draft.require(is_so, "an undrop of a run that is not hidden, or beside other actions")
    else:
        draft.require(draft.now("dropped") is None, "a commit after the run was dropped")
    for action in commit.actions:
        _APPLY[type(action)](draft, action)
    draft.commits += 1
    draft.head = actions.line_digest(raw)


_APPLY: dict[type, Callable[[Draft, Any], None]] = {
    actions.CreateRun: apply.create,
    actions.SetStatus: apply.set_status,
    actions.TakeOver: apply.take_over,
    actions.Rewind: apply.rewind,
    actions.EnterPhase: apply.enter_phase,
    actions.DropRun: apply.drop,
    actions.HideRun: apply.hide,
    actions.UndropRun: apply.undrop,
    actions.RaiseVersion: apply.raise_version,
    actions.AddCheckpoint: apply.add,
    actions.ReportMetrics: apply.report,
    actions.Evict: apply.evict,
    actions.Recover: apply.recover,
    actions.Thin: apply.thin,
    actions.SetHold: apply.set_hold,
    actions.RemoveHold: apply.remove_hold,
    actions.SetNote: apply.set_note,
    actions.SetLabels: apply.set_labels,
    actions.SetTag: apply.set_tag,
    actions.RemoveTag: apply.remove_tag,
    actions.SetPin: apply.set_pin,
    actions.PointRelease: apply.point_release,
    actions.Promote: apply.promote,
    actions.RateMatch: apply.rate,
    actions.EvictEntries: apply.evict_entries,
    actions.AppendStream: apply.append_stream,
    actions.ArchiveStream: apply.archive_stream,
    actions.Claim: apply.claim,
    actions.Acknowledge: apply.acknowledge,
}


def link_after(slots: Iterable[Slot], commits: int) -> Digest | None:
    """Return the digest of the last of a number of commits, from some slots of the log."""
    for slot in slots:
        for raw, commit in slot.commits:
            if commit.n == commits - 1:
                return actions.line_digest(raw)
            if commit.n == commits:
                return commit.prev
    return None
