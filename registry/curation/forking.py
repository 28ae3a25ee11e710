"""Forks: a new run that continues from a checkpoint of another one. No data is copied.

Commit 0 names the parent and no state. The commits of slot 1 list the inheritance: each gate with
its checkpoint, then artifacts, streams up to the checkpoint, the checkpoint itself with its
companions, and the pool.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from holdfast.backends.escape import quoted
from holdfast.registry.errors import Conflict, InvalidInput, MissingObject, NotFound
from holdfast.registry.history import RunLog, check_not_dropped
from holdfast.registry.history.actions import (
    Action,
    AddCheckpoint,
    AppendStream,
    Parent,
    Place,
    Promote,
    Rewind,
    SetPin,
    SetStatus,
    Thin,
    Thinning,
    line_digest,
)
from holdfast.registry.history.replay import CheckpointRecord, Pin, RunManifest, Slot, advance
from holdfast.registry.loading import Checkpoint
from holdfast.registry.objects import thinned
from holdfast.registry.store import Store
from holdfast.registry.values import Digest
from holdfast.registry.writing import Committer, NewCommits, StateWriter, Written


@dataclass(frozen=True, slots=True)
class Inheritance:
    """The inheritance of a fork from its parent."""

    source: Checkpoint  # the checkpoint that the fork continues from
    parent: Parent  # the record of it in commit 0
    #: Returns the actions of the later commits for the fork, which has no checkpoint yet.
    commits: Callable[[RunManifest], list[tuple[Action, ...]]]
    places: tuple[Place, ...]  # the places of the states that these commits name


def inheritance(store: Store, source: Checkpoint) -> Inheritance:
    """Return the inheritance of a fork from a checkpoint.

    A fork of a superseded checkpoint begins with empty streams, because the parent's current line
    does not contain the checkpoint.
    """
    if not isinstance(source, Checkpoint):
        raise InvalidInput("a fork continues from a checkpoint", found=quoted(source))
    n, log = source.handle.n, RunLog(store, source.run_id)
    slots = list(log.slots())
    log.recall()  # the records of evicted checkpoints are needed too
    now = log.fold(slots)
    log.make_durable()  # otherwise a loss of power could take the parent and leave the fork
    record = _record(store, now, source)
    check_not_dropped(now)
    if record.evicted is not None:
        raise Conflict(
            "a fork cannot continue from an evicted checkpoint",
            where=source.ref,
            found=source.eviction(),
            hint="Bring it back with `holdfast undo` first.",
        )
    if not now.holds_whole(record.manifest):
        raise thinned(now.thinned[record.manifest], source.ref)
    shared = [raw for slot in slots for raw, commit in slot.commits if commit.n <= n]
    then = advance(RunManifest(run_id=source.run_id), [Slot.build(0, shared)])
    parent = Parent(
        run=source.run_id,
        commit=n,
        head=line_digest(shared[-1]),
        checkpoint=record.manifest,
        phase=record.phase,
        step=record.step,
    )

    def commits(fork: RunManifest) -> list[tuple[Action, ...]]:
        return list(_inherited(then, now, record, fork))

    listed = commits(RunManifest(run_id=source.run_id, commits=1))
    manifests = dict.fromkeys(_manifests(action for actions in listed for action in actions))
    unplaced = manifests.keys() - now.by_manifest.keys()
    if unplaced:
        raise MissingObject(
            "the parent gives no place for a state that it holds",
            where=f"{source.run_id}/{min(unplaced).short}",
            hint="Run `holdfast verify` to see what is affected; a mirror can restore it.",
        )
    return Inheritance(source, parent, commits, tuple(now.by_manifest[m] for m in manifests))


def inherit(committer: Committer, inherited: Inheritance) -> None:
    """Commit the inheritance in one slot, unless the fork has a checkpoint already.

    A fork that broke off keeps artifacts that were added meanwhile; its streams and its status
    become those of the checkpoint.
    """
    committer.commit(_InheritedCommits(committer.writer, inherited))


class _InheritedCommits(NewCommits):
    """The inherited commits of a fork, and the states that they name."""

    def __init__(self, writer: StateWriter, inherited: Inheritance) -> None:
        self._writer = writer
        self._inherited = inherited

    def write_states(self) -> Sequence[Written]:
        writer = self._writer
        return writer.adopt(writer.store, self._inherited.places, verifies=False)

    def commits(self, run: RunManifest) -> Sequence[Sequence[Action]] | None:
        return None if run.has_checkpoints else self._inherited.commits(run)

    def read_again(self) -> bool:
        """Read the parent again: a repack may have moved a missing object."""
        places = self._inherited.places
        self._inherited = inheritance(self._writer.store, self._inherited.source)
        return self._inherited.places != places


def _record(store: Store, now: RunManifest, source: Checkpoint) -> CheckpointRecord:
    """Return this registry's record of a checkpoint; it may come from another registry."""
    record = now.by_n.get(source.handle.n)
    if record is None or record.manifest != source.digest:
        run = f"a run of {now.commits} commits" if now.commits else "no such run"
        raise NotFound(
            "this checkpoint is not in the registry of the fork",
            where=f"{store.backend.url}: {source.ref}",
            expected=source.digest.short,
            found=run if record is None else f"{record.manifest.short} in its place",
            hint="Bring its run here with `holdfast sync` first, or fork it where it is.",
        )
    return record


def _inherited(
    then: RunManifest, now: RunManifest, record: CheckpointRecord, fork: RunManifest
) -> Iterator[tuple[Action, ...]]:
    """Yield the names and states of the checkpoint's commit that the parent still holds."""
    # A gate is always set after its checkpoint, but is still inherited.
    pins = [p for p in now.pins if then.pin(p.kind, p.name) or p.checkpoint == record.n]
    artifacts = [p for p in pins if p.kind == "artifact" and not fork.pin(p.kind, p.name)]
    gates = [pin for pin in pins if pin.kind == "gate"]
    line = {one.n for one in then.checkpoints if not one.superseded}
    others = {pin.checkpoint for pin in gates if pin.checkpoint is not None} - {record.n}
    aside = sorted(others - line)
    rewinds = bool(aside or fork.streams)
    for n, gated in enumerate((*aside, *sorted(others & line), record.n), start=fork.commits):
        own = gated == record.n
        yield (
            # Checkpoints that are not on the line of the source are superseded in the fork too.
            *([Rewind(to=None)] if rewinds and n == fork.commits + len(aside) else []),
            *(_streams(now, record, fork) if own else ()),
            _added(now.by_n[gated]),
            # Of the source another checkpoint may hold the whole state, which the fork then has.
            *(() if own else _thinned(now.by_n[gated], n)),
            *(_pinned(pin, n) for pin in gates if pin.checkpoint == gated),
            *(_pinned(pin, None) for pin in artifacts if own),
            *(_entries(then, now) if own else ()),
            # Somebody may have opened and left the run before it had a checkpoint.
            *([SetStatus(status="running")] if own and fork.status != "running" else []),
        )


def _added(record: CheckpointRecord) -> AddCheckpoint:
    return AddCheckpoint(
        manifest=record.manifest,
        phase=record.phase,
        step=record.step,
        metrics=record.metrics,
        meta=record.meta,
        size_bytes=record.size_bytes,
        tier=record.tier,
        companions=record.companions or None,
        commit_keys=record.commit_keys,
        nonfinite=record.nonfinite or None,
        held_back=record.held_back or None,
    )


def _thinned(record: CheckpointRecord, n: int) -> Iterator[Thin]:
    if record.parts is not None:
        yield Thin(thinnings=(Thinning(checkpoint=n, keep=record.parts, reason="in the parent"),))


def _pinned(pin: Pin, checkpoint: int | None) -> SetPin:
    assert pin.kind in ("gate", "artifact")  # its callers choose these
    return SetPin(
        kind=pin.kind,
        name=pin.name,
        manifest=pin.manifest,
        checkpoint=checkpoint,
        metrics=pin.metrics,
        card=pin.card,
    )


def _streams(
    now: RunManifest, record: CheckpointRecord, fork: RunManifest
) -> Iterator[AppendStream]:
    for stream in now.streams:
        # A superseded checkpoint has no stream entries on the current line.
        mark = None if record.superseded else record.streams.get(stream.name)
        for segment in stream.at(mark):
            yield AppendStream(
                stream=stream.name,
                lifetime=(fork.stream(stream.name) or stream).lifetime,
                manifest=segment.manifest,
                start=segment.start,
                count=segment.count,
                first_step=segment.first_step,
                last_step=segment.last_step,
            )


def _entries(then: RunManifest, now: RunManifest) -> Iterator[Promote]:
    before = {entry.version for entry in then.roster()}
    for entry in now.roster():
        if entry.version in before:
            yield Promote(
                version=entry.version,
                manifest=entry.manifest,
                gate=entry.gate,
                phase=entry.phase,
                step=entry.step,
                mu=entry.mu,
                sigma=entry.sigma,
                frozen=entry.frozen,
            )


def _manifests(actions: Iterable[Action]) -> Iterator[Digest]:
    for action in actions:
        match action:
            case AddCheckpoint():
                yield action.manifest
                yield from (action.companions or {}).values()
            case SetPin():
                yield action.manifest
                if action.card is not None:
                    yield action.card
            case Promote() | AppendStream():
                yield action.manifest
