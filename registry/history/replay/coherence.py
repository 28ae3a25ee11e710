"""Check that the parts of a run that was read from a snapshot are consistent.

A replay of the log is always consistent. But anybody who can write to the store can make a
snapshot: one that names something it does not hold is ignored, like a damaged one.
"""

from __future__ import annotations

from itertools import pairwise

from holdfast.registry.history.replay.run_manifest import RunManifest


def is_coherent(run: RunManifest) -> bool:
    """Return whether the run was begun, and what is named by number is there, in order."""
    numbers = [checkpoint.n for checkpoint in run.checkpoints]
    versions = [entry.version for entry in run.pool]
    named = {pin.checkpoint for pin in run.pins if pin.kind in ("gate", "tag")}
    return (
        (run.created is not None) == (run.commits > 0)
        and _ascend([0, *numbers, max(run.commits, 1)])
        and _ascend([0, *versions, run.next_version])
        # A log may set a gate on what was evicted before, of which a compact run has the number.
        and all(n in run.by_n or (n is not None and run.is_evicted(n)) for n in named)
    )


def _ascend(numbers: list[int]) -> bool:
    return all(first < second for first, second in pairwise(numbers))
