"""Replay of actions of a run's followers."""

from __future__ import annotations

from registry.actions import Acknowledge, Claim
from registry.state.draft import Draft
from registry.state.records import ClaimRecord, GroupRecord


def claim(draft: Draft, action: Claim) -> None:
    """Take a checkpoint to work on; a later claim of the same one takes it over."""
    draft.checkpoint(action.checkpoint)
    group = draft.groups.get(action.group, GroupRecord(name=action.group))
    others = tuple(held for held in group.claims if held.checkpoint != action.checkpoint)
    taken = ClaimRecord(
        checkpoint=action.checkpoint, follower=action.follower, until_ms=action.until_ms
    )
    draft.groups[group.name] = group.model_copy(update={"claims": (*others, taken)})


def acknowledge(draft: Draft, action: Acknowledge) -> None:
    """Be done with a checkpoint."""
    draft.checkpoint(action.checkpoint)
    group = draft.groups.get(action.group, GroupRecord(name=action.group))
    draft.groups[group.name] = group.model_copy(
        update={
            "claims": tuple(held for held in group.claims if held.checkpoint != action.checkpoint),
            "done": tuple(sorted({*group.done, action.checkpoint})),
        }
    )
