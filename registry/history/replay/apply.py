"""Replay of actions: on checkpoints and their names, on phases, streams and the pool."""

from __future__ import annotations

from collections.abc import Mapping

from holdfast.registry.history import actions
from holdfast.registry.history.replay.draft import Draft
from holdfast.registry.history.replay.run_parts import (
    Archive,
    CheckpointRecord,
    ClaimRecord,
    Hold,
    Note,
    PhaseRecord,
    Pin,
    PoolRecord,
    Segment,
    StreamMark,
    StreamRecord,
    WriterRecord,
)

#: Matches that are remembered: a match is recorded again after a lost answer.
MATCHES_KEPT = 256


def add(draft: Draft, action: actions.AddCheckpoint) -> None:
    """Add a checkpoint."""
    n = draft.commits
    draft.require(n > 0, "commit 0 references a manifest")
    draft.phase = action.phase
    record = CheckpointRecord(
        **action.shared(actions.CheckpointFields),
        n=n,
        time_ms=draft.time_ms,
        companions=action.companions or {},
        nonfinite=action.nonfinite or (),
        held_back=bool(action.held_back),
        streams={name: stream.mark for name, stream in draft.streams.items()},
    )
    draft.add(record)


def report(draft: Draft, action: actions.ReportMetrics) -> None:
    """Add or replace metrics."""
    if draft.gone is not None and draft.is_forgotten(action.checkpoint):
        rates = any(name in action.metrics for name in draft.rating_metrics)
        draft.gone.report(action.checkpoint, action.tier, rates=rates)
        return
    checkpoint = draft.checkpoint(action.checkpoint)
    changed: dict[str, object] = {"metrics": {**checkpoint.metrics, **action.metrics}}
    if action.tier is not None:
        changed["tier"] = action.tier
    draft.change(checkpoint.n, **changed)


def evict(draft: Draft, action: actions.Evict) -> None:
    """Evict checkpoints."""
    for eviction in action.evictions:
        record = draft.checkpoint(eviction.checkpoint)
        draft.require(record.evicted is None, f"checkpoint {record.n} is evicted twice")
        draft.require(not draft.is_pinned(record.n), f"checkpoint {record.n} is evicted, a pin")
        draft.require_free(record.n, "evicted")
        draft.evict(record, eviction.reason)


def recover(draft: Draft, action: actions.Recover) -> None:
    """Recover evicted checkpoints, and thinned ones that are not evicted."""
    for n in action.checkpoints:
        record = draft.checkpoint(n)
        if record.evicted is None:
            draft.require(record.parts is not None, f"checkpoint {n} is not evicted")
            draft.change(n, parts=None, recovered=True)
        else:
            draft.recover(record)


def thin(draft: Draft, action: actions.Thin) -> None:
    """Thin checkpoints."""
    for one in action.thinnings:
        record = draft.checkpoint(one.checkpoint)
        draft.require(record.evicted is None, f"checkpoint {record.n} is thinned, evicted")
        draft.require(not draft.is_pinned(record.n), f"checkpoint {record.n} is thinned, a pin")
        draft.require_free(record.n, "thinned")
        fits = record.parts is None or set(one.keep) <= set(record.parts)
        draft.require(fits, f"checkpoint {record.n} is thinned, and keeps what it does not have")
        draft.change(record.n, parts=one.keep)


def set_tag(draft: Draft, action: actions.SetTag) -> None:
    """Point a movable name at a checkpoint."""
    checkpoint = draft.checkpoint(action.checkpoint)
    draft.require(checkpoint.evicted is None, f"a tag names checkpoint {checkpoint.n}, evicted")
    pin = Pin(
        kind="tag",
        name=action.name,
        manifest=checkpoint.manifest,
        checkpoint=checkpoint.n,
        time_ms=draft.time_ms,
    )
    draft.set_pin(pin)


def remove_tag(draft: Draft, action: actions.RemoveTag) -> None:
    """Take a movable name away."""
    draft.require(("tag", action.name) in draft.pins, f"there is no tag {action.name} to remove")
    draft.remove_tag(action.name)


def set_pin(draft: Draft, action: actions.SetPin) -> None:
    """Give an immutable name to a stored state."""
    before = draft.pins.get((action.kind, action.name))
    replaced = () if before is None else before.replaced
    if before is not None:
        replaces = action.kind == "gate" and action.replaces == before.manifest
        draft.require(replaces, f"{before.ref} is set twice")
        replaced = (*replaced, before.manifest)
    if action.kind == "gate":
        same = action.checkpoint is not None and (
            draft.checkpoint(action.checkpoint).manifest == action.manifest
        )
        draft.require(same, f"{action.kind} {action.name} is no checkpoint")
    elif action.checkpoint is not None and not draft.is_forgotten(action.checkpoint):
        draft.checkpoint(action.checkpoint)
    pin = Pin(
        **action.shared(actions.PinFields),
        kind=action.kind,
        name=action.name,
        time_ms=draft.time_ms,
        replaced=replaced,
    )
    draft.set_pin(pin)
    if action.kind == "release":
        draft.fields["release"] = action.name


def point_release(draft: Draft, action: actions.PointRelease) -> None:
    """Set the release that is the latest."""
    draft.require(("release", action.version) in draft.pins, f"no release {action.version}")
    draft.fields["release"] = action.version


def set_hold(draft: Draft, action: actions.SetHold) -> None:
    """Hold a checkpoint or the run; a later date replaces an earlier one."""
    before = draft.hold(action.checkpoint)
    if action.checkpoint is not None:
        record = draft.checkpoint(action.checkpoint)
        draft.require(record.evicted is None, f"checkpoint {record.n} is held, evicted")
    is_longer = before is None or before.until_ms <= action.until_ms
    draft.require(is_longer, "a hold is made shorter")
    held = Hold(**action.shared(actions.HoldFields), time_ms=draft.time_ms, author=draft.author)
    draft.replace_hold(action.checkpoint, held)


def remove_hold(draft: Draft, action: actions.RemoveHold) -> None:
    """Remove a hold."""
    draft.require(draft.hold(action.checkpoint) is not None, "there is no such hold to remove")
    draft.replace_hold(action.checkpoint, None)


def set_note(draft: Draft, action: actions.SetNote) -> None:
    """Write or remove a note."""
    if action.checkpoint is not None:
        record = draft.checkpoint(action.checkpoint)
        draft.require(record.evicted is None, f"a note on checkpoint {record.n}, evicted")
    before: tuple[Note, ...] = draft.now("notes") or ()
    others = tuple(one for one in before if one.checkpoint != action.checkpoint)
    draft.require(bool(action.text) or others != before, "there is no such note to remove")
    note = Note(**action.shared(actions.NoteFields), time_ms=draft.time_ms, author=draft.author)
    draft.fields["notes"] = (*others, *([note] if note.text else [])) or None


def set_labels(draft: Draft, action: actions.SetLabels) -> None:
    """Replace the labels."""
    draft.fields["labels"] = action.labels


def claim(draft: Draft, action: actions.Claim) -> None:
    """Claim a checkpoint; a later claim of the same one replaces this one."""
    group = draft.group(action.group)
    if draft.is_forgotten(action.checkpoint):
        return
    draft.checkpoint(action.checkpoint)
    group.claims.pop(action.checkpoint, None)
    group.claims[action.checkpoint] = ClaimRecord(**action.shared(actions.ClaimFields))


def acknowledge(draft: Draft, action: actions.Acknowledge) -> None:
    """Acknowledge a checkpoint: the group is done with it."""
    group = draft.group(action.group)
    if draft.is_forgotten(action.checkpoint):
        return
    draft.checkpoint(action.checkpoint)
    group.claims.pop(action.checkpoint, None)
    group.done.add(action.checkpoint)


# Replay of actions on the run as a whole, and on its streams.


def create(draft: Draft, action: actions.CreateRun) -> None:
    """Create the run."""
    draft.require(draft.created is None, "the run is created twice")
    draft.created = action
    draft.fields["created_ms"] = draft.time_ms


def set_status(draft: Draft, action: actions.SetStatus) -> None:
    """Set the status."""
    draft.fields |= {"status": action.status, "reason": action.reason}


def take_over(draft: Draft, action: actions.TakeOver) -> None:
    """Set the trainer that may save."""
    draft.fields["writer"] = WriterRecord(
        **action.shared(actions.WriterFields), time_ms=draft.time_ms
    )


def rewind(draft: Draft, action: actions.Rewind) -> None:
    """Supersede later checkpoints and phases; take later entries out of the streams."""
    to = None if action.to is None else draft.checkpoint(action.to)
    draft.supersede(-1 if to is None else to.n)
    draft.phase = None if to is None else to.phase
    _cut_streams(draft, {} if to is None else to.streams)


def enter_phase(draft: Draft, action: actions.EnterPhase) -> None:
    """Enter a phase."""
    draft.enter(PhaseRecord(**action.shared(actions.PhaseFields), n=draft.commits))
    draft.phase = action.to_phase


def drop(draft: Draft, action: actions.DropRun) -> None:
    """Release everything that the run holds."""
    draft.require_free(None, "dropped")
    draft.fields["dropped"] = action.reason


def hide(draft: Draft, action: actions.HideRun) -> None:
    """Hide the run."""
    draft.require_free(None, "dropped")
    draft.fields |= {"dropped": action.reason, "hidden_at": draft.next_slot}


def free(draft: Draft) -> None:
    """Release everything that the hidden run holds."""
    is_hidden = draft.now("hidden_at") is not None and draft.now("freed_at") is None
    draft.require(is_hidden, "a run that is not hidden is freed")
    draft.fields["freed_at"] = draft.next_slot


def undrop(draft: Draft, _: actions.UndropRun) -> None:
    """Bring the run back; a freed one needs a place for everything again."""
    draft.come_back()


def raise_version(draft: Draft, action: actions.RaiseVersion) -> None:
    """Change the specification to the new version of states."""
    created = draft.created
    spec = None if created is None else created.spec
    draft.require(spec is not None and spec.version_key is not None, "the run has no versions")
    assert created is not None
    assert spec is not None
    draft.created = created.changed(spec=spec.changed(version=action.version))


def append_stream(draft: Draft, action: actions.AppendStream) -> None:
    """Append a segment; it replaces the entries from its start on."""
    stream = draft.streams.get(action.stream)
    if stream is None:
        stream = StreamRecord(name=action.stream, lifetime=action.lifetime)
    draft.require(
        stream.lifetime == action.lifetime, f"stream {stream.name} is {stream.lifetime} already"
    )
    draft.require(
        action.start <= stream.count < action.start + action.count,
        f"entries {action.start} to {action.start + action.count} of stream {stream.name}, which "
        f"has {stream.count}",
    )
    before = stream.at(stream.mark.changed(count=action.start))
    segments = (*before, Segment(**action.shared(actions.SegmentFields)))
    draft.set_stream(stream.changed(segments=segments))


def archive_stream(draft: Draft, action: actions.ArchiveStream) -> None:
    """Archive the entries of a stream, and empty it."""
    draft.require(action.stream in draft.streams, f"no stream {action.stream}")
    stream = draft.streams[action.stream]
    draft.require(stream.lifetime != "forever", f"stream {stream.name} is kept for ever")
    draft.require(stream.archive(action.label) is None, f"archive {action.label} exists already")
    archives = (*stream.archives, Archive(label=action.label, segments=stream.segments))
    draft.set_stream(stream.changed(segments=(), archives=archives))


def _cut_streams(draft: Draft, marks: Mapping[str, StreamMark]) -> None:
    """Take every stream back to its entries at a checkpoint; archives do not change."""
    for name, stream in list(draft.streams.items()):
        segments = stream.at(marks.get(name))
        draft.set_stream(stream.changed(segments=segments))


def promote(draft: Draft, action: actions.Promote) -> None:
    """Add a model to the pool."""
    # Not "equal": a fork continues the version numbers of its parent, an import those of a folder.
    draft.require(action.version >= draft.next_version, f"pool version {action.version} again")
    draft.next_version = action.version + 1
    promoted = draft.time_ms if action.promoted_ms is None else action.promoted_ms
    entry = PoolRecord(
        **action.shared(actions.EntryFields), version=action.version, time_ms=promoted
    )
    draft.set_entry(entry)


def rate(draft: Draft, action: actions.RateMatch) -> None:
    """Record a match."""
    matches = draft.fields.get("matches", draft.base.matches)
    draft.require(action.match not in matches, f"match {action.match} is recorded twice")
    draft.fields["matches"] = (*matches, action.match)[-MATCHES_KEPT:]
    for rated in action.ratings:
        if draft.gone is not None and draft.gone.has_version(rated.version):
            continue  # frozen entries are never evicted, so this one may be rated
        entry = _entry(draft, rated.version)
        is_same = (entry.mu, entry.sigma) == (rated.mu, rated.sigma)
        draft.require(is_same or not entry.frozen, f"pool version {entry.version} is frozen")
        changed = entry.changed(
            mu=rated.mu,
            sigma=rated.sigma,
            games=entry.games + rated.games,
            wins=entry.wins + rated.wins,
        )
        draft.set_entry(changed)


def evict_entries(draft: Draft, action: actions.EvictEntries) -> None:
    """Evict entries."""
    draft.require(draft.hold(None) is None, "an entry of the pool is evicted, the run held")
    for version in action.versions:
        is_evicted = draft.gone is not None and draft.gone.has_version(version)
        draft.require(not is_evicted, f"pool version {version} is evicted twice")
        entry = _entry(draft, version)
        draft.require(not entry.frozen, f"pool version {version} is frozen")
        draft.require(entry.evicted is None, f"pool version {version} is evicted twice")
        draft.evict_entry(entry, action.reason)


def _entry(draft: Draft, version: int) -> PoolRecord:
    draft.require(version in draft.pool, f"pool version {version} does not exist")
    return draft.pool[version]
