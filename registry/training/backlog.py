"""How far the registry is behind the journal of a machine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Backlog:
    """What of a run is only in the journal of this machine.

    Attributes:
        entries: Saves, and changes of the status, that wait.
        size_bytes: Bytes of their states.
        oldest_ms: When the oldest of them was acknowledged, milliseconds since the epoch.
        refused: Saves that the run does not allow.
        stranded: Saves behind another machine's takeover.
        damaged: Saves whose bytes here are damaged.
    """

    entries: int
    size_bytes: int
    oldest_ms: int | None
    refused: int
    stranded: int
    damaged: int
