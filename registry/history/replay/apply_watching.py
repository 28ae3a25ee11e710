"""Replay of actions of a run's followers."""

from __future__ import annotations

from holdfast.registry.history.actions import Acknowledge, Claim
from holdfast.registry.history.replay.draft import Draft
from holdfast.registry.history.replay.run_parts import ClaimRecord


def claim(draft: Draft, action: Claim) -> None:
    """Take a checkpoint to work on; a later claim of the same one takes it over."""
    group = draft.group(action.group)
    if draft.is_gone(action.checkpoint):
        return
    draft.checkpoint(action.checkpoint)
    group.claims.pop(action.checkpoint, None)
    group.claims[action.checkpoint] = ClaimRecord(
        checkpoint=action.checkpoint, follower=action.follower, until_ms=action.until_ms
    )


def acknowledge(draft: Draft, action: Acknowledge) -> None:
    """Be done with a checkpoint."""
    group = draft.group(action.group)
    if draft.is_gone(action.checkpoint):
        return
    draft.checkpoint(action.checkpoint)
    group.claims.pop(action.checkpoint, None)
    group.done.add(action.checkpoint)
