"""Gates, artifacts and tags: names that keep stored states.

All of them are pins. A gate is the checkpoint at the end of a phase: it never changes, and can only
be replaced when it is damaged. An artifact is any state, added once. A tag can move.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from holdfast.registry.errors import (
    BeyondLimit,
    Conflict,
    Hint,
    IntegrityError,
    InvalidInput,
    NotFound,
)
from holdfast.registry.history import check_name
from holdfast.registry.history.actions import Action, SetPin, SetTag
from holdfast.registry.history.replay import CheckpointRecord, Pin, RunManifest
from holdfast.registry.loading import Checkpoint, StateHandle, Stored
from holdfast.registry.values import Digest, counted, near, number
from holdfast.registry.writing import Committer, Composed


def set_tag(committer: Committer, name: str, checkpoint: Checkpoint) -> None:
    """Point a movable name at a checkpoint of the run; see `Run.tag`."""
    n = own(committer, checkpoint, f"a tag ({name})")
    check_name(name, "a tag")

    def compose(run: RunManifest) -> Sequence[Action]:
        kept(run, n, checkpoint.ref)
        return [SetTag(name=name, checkpoint=n)]

    committer.commit(compose)


def set_gate(committer: Committer, name: str, checkpoint: Checkpoint | None) -> Checkpoint:
    """Make a checkpoint a gate; see `Run.set_gate`."""
    check_name(name, "a gate")
    if checkpoint is None:
        committer.await_earlier()  # the best one may be among those saves
    run = committer.log.refresh()
    phase = _gate_phase(run, name)
    record = _best(run, name, phase) if checkpoint is None else checkpoint.record
    if checkpoint is not None:
        own(committer, checkpoint, f"a gate ({name})")
    if phase is not None and record.phase != phase:
        raise InvalidInput(
            f"this gate belongs to phase {phase}",
            where=f"{run.run_id}/gates/{name}",
            found=f"a checkpoint of phase {record.phase}",
        )
    existing = run.pin("gate", name)
    replaces = None
    if existing is not None and existing.manifest != record.manifest:
        replaces = _damaged(committer, existing)

    def compose(run: RunManifest) -> Sequence[Action] | None:
        now = run.pin("gate", name)
        if now is not None and now.manifest == record.manifest:
            return None
        if (now and now.manifest) != replaces:
            raise _taken(run, name, now)
        sound(run, record.n, f"{run.run_id}/{record.manifest.short}")
        return [
            SetPin(
                kind="gate",
                name=name,
                manifest=record.manifest,
                checkpoint=record.n,
                metrics=record.metrics,
                replaces=replaces,
            )
        ]

    now = committer.commit(compose)
    gate = find_pin(now, "gate", name)
    assert gate.checkpoint is not None  # replay makes sure that every gate names one
    return Checkpoint(committer.store, committer.log, now.by_n[gate.checkpoint])


def add_artifact(committer: Committer, name: str, state: object) -> Stored:
    """Add a state under a name that never changes; see `Run.add_artifact`."""
    check_name(name, "an artifact")
    committer.log.refresh()
    written = committer.write_plain(state)
    digest = written.base.manifest.digest

    def compose(run: RunManifest) -> Sequence[Action] | None:
        existing = run.pin("artifact", name)
        if existing is not None and existing.manifest != digest:
            raise Conflict(
                "an artifact of this name exists, with other content",
                where=f"{run.run_id}/artifacts/{name}",
                expected=existing.manifest.short,
                found=digest.short,
                hint="Artifacts are added once; choose another name.",
            )
        return None if existing else [SetPin(kind="artifact", name=name, manifest=digest)]

    first = [written]
    committer.commit(
        Composed(compose, lambda: [first.pop() if first else committer.write_plain(state)])
    )
    return Stored(StateHandle(committer.store, committer.log, digest, f"artifacts/{name}"))


def find_pin(run: RunManifest, kind: str, name: str) -> Pin:
    """Return a pin."""
    pin = run.pin(kind, name)
    if pin is None:
        known = [one.name for one in run.pins_of(kind)]
        raise NotFound(
            f"no such {kind}", where=f"{run.run_id}/{kind}s/{name}", hint=near(name, known)
        )
    return pin


def own(committer: Committer, checkpoint: Checkpoint, what: str) -> int:
    """Return the commit number of a checkpoint of this run."""
    run = committer.log.run
    if isinstance(checkpoint, Checkpoint) and checkpoint.run_id == run.run_id:
        n = checkpoint.n
        if n not in run.by_n and not run.is_evicted(n):
            committer.log.refresh()
        run = committer.log.knowing(n)
        # Another registry may have another run of this name.
        if n in run.by_n and run.by_n[n].manifest == checkpoint.digest:
            return n
    raise InvalidInput(
        f"{what} takes checkpoints of its own run",
        where=run.run_id,
        found=checkpoint.ref if isinstance(checkpoint, Stored) else repr(checkpoint),
    )


def kept(run: RunManifest, n: int, where: str) -> CheckpointRecord:
    """Return a checkpoint that is not evicted."""
    record = run.record(n)
    if record.evicted is not None:
        raise Conflict(
            "this checkpoint was evicted",
            where=where,
            found=record.evicted,
            hint="`holdfast undo` brings an evicted checkpoint back until it is collected.",
        )
    return record


def sound(run: RunManifest, n: int, where: str) -> CheckpointRecord:
    """Return a checkpoint that is not evicted and whose weights are finite."""
    record = kept(run, n, where)
    if record.held_back:
        raise InvalidInput(
            "its weights hold NaN or infinity",
            where=where,
            found=", ".join(record.nonfinite),
            hint=Hint(
                "Save it with allow_nonfinite=True if you want it anyway.",
                "Choose another checkpoint.",
            ),
        )
    return record


def _gate_phase(run: RunManifest, name: str) -> str | None:
    declared = {gate.name: gate.phase for gate in run.spec.gates}
    if declared and name not in declared:
        raise InvalidInput(
            "the run has no such gate",
            where=f"{run.run_id}/gates/{name}",
            expected=", ".join(declared),
            hint=near(name, declared) or "The run's preset declares the gates.",
        )
    return declared.get(name)


def _best(run: RunManifest, name: str, phase: str | None) -> CheckpointRecord:
    monitors = run.spec.phase(phase or run.phase or "").monitors
    for monitor in monitors[:1]:
        found = run.best(monitor, phase)
        if found is not None:
            return found
    raise NotFound(
        "no checkpoint was given for the gate, and its phase has no best one",
        where=f"{run.run_id}/gates/{name}",
        expected=f"the metric {monitors[0].metric}" if monitors else "a monitor",
    )


def _damaged(committer: Committer, gate: Pin) -> Digest:
    """Return the id of a gate that fails verification."""
    stored = StateHandle(committer.store, committer.log, gate.manifest, gate.ref)
    try:
        stored.load()
    except BeyondLimit:
        raise  # the gate may be undamaged
    except IntegrityError:
        return gate.manifest
    raise _taken(committer.log.run, gate.name, gate)


def _taken(run: RunManifest, name: str, gate: Pin | None) -> Conflict:
    return Conflict(
        "a gate is set once",
        where=f"{run.run_id}/gates/{name}",
        found=f"{gate.manifest.short}, which is sound" if gate else "nothing",
        hint="Only a gate that fails verification may be replaced.",
    )


def run_remarks(run: RunManifest) -> list[str]:
    """Return a sentence for each problem with the monitored metrics of a run.

    The newest value of the first monitor is NaN or infinite; or checkpoints were evicted, and none
    that is left has a value by which it could be the best.
    """
    monitors = run.monitors if run.dropped is None else ()
    found = []
    for monitor in monitors[:1]:
        values = (monitor.measured(one.metrics) for one in run.newest_first())
        newest = next((value for value in values if value is not None), 0.0)
        if not math.isfinite(newest):
            found.append(f"{monitor.label} is {number(newest)}")
    if monitors and run.evicted_count and not any(map(run.best, monitors)):
        names = " or ".join(monitor.label for monitor in monitors)
        evicted = counted(run.evicted_count, "checkpoint")
        found.append(f"no best: none has a value of {names}, and {evicted} went without one")
    return found


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
