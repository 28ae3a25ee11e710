"""The names that point at each checkpoint of a run."""

from __future__ import annotations

from holdfast.registry.history.replay import RunManifest


def checkpoint_marks(manifest: RunManifest) -> dict[int, list[str]]:
    """Return the marks of each checkpoint: the names that point at it, and why it may not count.

    That is `latest`, `best`, `best/METRIC`, `gates/NAME`, `tags/NAME`, `superseded`, `evicted`,
    `held back`.
    """
    found: dict[int, list[str]] = {}
    latest = manifest.latest()
    if latest is not None:
        found.setdefault(latest.n, []).append("latest")
    for index, monitor in enumerate(manifest.monitors):
        best = manifest.best(monitor)
        if best is not None:
            name = f"best/{monitor.metric}" if index else "best"
            found.setdefault(best.n, []).append(name)
    for kind in ("gate", "tag"):
        for pin in sorted(manifest.pins_of(kind), key=lambda pin: pin.name):
            if pin.checkpoint is not None:
                found.setdefault(pin.checkpoint, []).append(pin.ref)
    for record in manifest.checkpoints:
        if record.superseded:
            found.setdefault(record.n, []).append("superseded")
        if record.evicted is not None:
            found.setdefault(record.n, []).append("evicted")
        if record.held_back:
            found.setdefault(record.n, []).append("held back")
    return found
