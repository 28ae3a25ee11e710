"""How the golden samples of a snapshot with parts were made: a run that keeps 200 checkpoints."""

from __future__ import annotations

from holdfast.backends import Backend
from holdfast.registry.face.factory import open_on
from holdfast.registry.history.actions import AddCheckpoint, ReportMetrics, SetTag
from holdfast.registry.history.authorship import Authorship, commit_line
from holdfast.registry.history.log import RunLog
from holdfast.registry.objects.keys import log_prefix, slot_key, snapshot_prefix, snapshot_slot
from tests.support.lives import creation, digest, place

RUN = "long"
COUNT = 200
SIGNED = Authorship("0" * 16, "me@here", 1_700_000_000_000)


def build(backend: Backend) -> None:
    """Put a log with its snapshots into a registry."""
    with open_on(backend) as reg:
        log = RunLog(reg.handle.store, RUN)
        log.open()
        log.append(lambda run: [commit_line(run, [creation()], SIGNED)])
        for step in range(1, COUNT + 1):
            added = AddCheckpoint(manifest=digest(step), phase="a", step=step, size_bytes=1)
            log.append(
                lambda run, one=added: [place(one.manifest), commit_line(run, [one], SIGNED)]
            )
        # An old checkpoint gets a record of its own in the snapshot.
        for action in (
            SetTag(name="t", checkpoint=3),
            ReportMetrics(checkpoint=5, metrics={"m": 1.0}),
        ):
            for _ in range(4):
                log.append(lambda run, one=action: [commit_line(run, [one], SIGNED)])


def samples(backend: Backend) -> dict[str, bytes]:
    """Return the newest snapshot, its parts, its slot and the slots after it."""
    listed = [one.key for one in backend.list(snapshot_prefix(RUN))]
    least = slot_key(RUN, snapshot_slot(listed[0]))
    slots = [one.key for one in backend.list(log_prefix(RUN)) if one.key >= least]
    parts = [key for key in listed if snapshot_slot(key) < 4]
    return {key: backend.get(key) for key in (listed[0], *parts, *slots)}
