"""Actions of those who follow a run: evaluators share its checkpoints out among themselves."""

from __future__ import annotations

from typing import Literal

from holdfast.registry.values.records import Name, Record


class Claim(Record):
    """Take a checkpoint to work on. Until `until_ms` nobody else of the group takes it.

    Attributes:
        group: The group of followers.
        checkpoint: Commit number of the checkpoint.
        follower: Random id of who took it.
        until_ms: Milliseconds since the epoch by the follower's clock; retention lets the
            checkpoint alone until then. An expired claim costs a second evaluation at most.
    """

    action: Literal["watch.claim"] = "watch.claim"
    group: Name
    checkpoint: int
    follower: str
    until_ms: int


class Acknowledge(Record):
    """Say that a checkpoint was worked on with success: the group is done with it."""

    action: Literal["watch.ack"] = "watch.ack"
    group: Name
    checkpoint: int
    follower: str
