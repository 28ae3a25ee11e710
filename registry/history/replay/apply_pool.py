"""Replay of actions on the opponent pool."""

from __future__ import annotations

from holdfast.registry.history.actions import EntryFields, EvictEntries, Promote, RateMatch
from holdfast.registry.history.replay.draft import Draft
from holdfast.registry.history.replay.run_parts import PoolRecord

#: Matches that are remembered: a match is recorded again after a lost answer.
MATCHES_KEPT = 256


def promote(draft: Draft, action: Promote) -> None:
    """Add a model to the pool."""
    # Not "equal": a fork continues the version numbers of its parent.
    draft.require(action.version >= draft.next_version, f"pool version {action.version} again")
    draft.next_version = action.version + 1
    entry = PoolRecord(**action.shared(EntryFields), version=action.version, time_ms=draft.time_ms)
    draft.set_entry(entry)


def rate(draft: Draft, action: RateMatch) -> None:
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


def evict(draft: Draft, action: EvictEntries) -> None:
    """Evict entries."""
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
