"""Stored states as the values that `--json` prints; `docs/cli.md` lists them."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any

from holdfast.registry.cli import output
from holdfast.registry.curation import checkpoint_marks
from holdfast.registry.history import (
    decode_or_keep,
    hold_ref,
    is_dated,
    moment,
    phase_value,
    step_ref,
)
from holdfast.registry.history.actions import AddCheckpoint, Parent
from holdfast.registry.history.replay import CheckpointRecord, Hold, Note, Pin, RunManifest
from holdfast.registry.store import Store
from holdfast.registry.upkeep import Damage
from holdfast.registry.values import ITEM_SIZES, Digest

if TYPE_CHECKING:  # a list of runs is often made of notes
    from holdfast.registry.face import Run
    from holdfast.registry.loading import Checkpoint, Stored, TensorInfo


def picked(thing: object, names: str) -> dict[str, Any]:
    """Return attributes of a thing by their names; `name=attribute` renames one."""
    pairs = (name.partition("=") for name in names.split())
    return {name: getattr(thing, attribute or name) for name, _, attribute in pairs}


def iso(time_ms: int) -> str | int:
    """Return a time for JSON: ISO 8601, UTC; outside the calendar the log's milliseconds."""
    if not is_dated(time_ms):
        return time_ms
    return moment(time_ms).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def time_ms_of(time: str | int) -> int:
    """Return the time in milliseconds; the reverse of `iso`."""
    return time if isinstance(time, int) else int(datetime.fromisoformat(time).timestamp() * 1000)


def age(time: str | int) -> str:
    """Return how long ago a time of `iso` was."""
    return output.age(time_ms_of(time))


def short(digest: Digest) -> str:
    """Return the beginning of an id."""
    return digest.short


def ref(run_id: str, record: CheckpointRecord | AddCheckpoint) -> str:
    """Return the name that finds a checkpoint."""
    return f"{run_id}/{step_ref(record)}"


def named(stored: Stored) -> str:
    """Return ref, id and size of a stored state on one line."""
    return f"{stored.ref}  {stored.digest.short}  {output.size(stored.size_bytes)}"


def monitored(run: RunManifest) -> list[str]:
    """Return the metrics that decide which checkpoint is best."""
    return [monitor.metric for monitor in run.monitors]


def parent_of(run: RunManifest) -> Parent | None:
    """Return the parent of a run that was forked."""
    return None if run.created is None else run.created.parent


def record_json(run_id: str, record: CheckpointRecord, pointed: list[str]) -> dict[str, Any]:
    """Return a checkpoint."""
    return {
        "ref": ref(run_id, record),
        "id": record.manifest,
        "run": run_id,
        "phase": phase_value(record.phase),
        "step": record.step,
        "created": iso(record.time_ms),
        "size_bytes": record.size_bytes,
        "metrics": record.metrics,
        "meta": decode_or_keep(record.meta),
        "marks": pointed,
        "nonfinite": list(record.nonfinite),
    }


def checkpoint_json(store: Store, run: RunManifest, checkpoint: Checkpoint) -> dict[str, Any]:
    """Return a checkpoint of a run with its components."""
    pointed = checkpoint_marks(run).get(checkpoint.handle.n, [])
    pointed += Damage.of(store).marks(run.run_id, checkpoint.handle.newest_record())
    return {
        **record_json(checkpoint.run_id, checkpoint.handle.newest_record(), pointed),
        "components": components_json(checkpoint),
        "lossy": lossy_json(checkpoint),
    }


def hold_json(run: Run, hold: Hold) -> dict[str, Any]:
    """Return a hold."""
    held = "" if hold.checkpoint is None else f"/{hold_ref(run.manifest, hold)}"
    return {
        "ref": f"{run.id}{held}",
        "until": iso(hold.until_ms),
        **picked(hold, "reason author"),
        "set": iso(hold.time_ms),
    }


def note_json(run: Run, note: Note) -> dict[str, Any]:
    """Return a note."""
    record = None if note.checkpoint is None else run.manifest.by_n.get(note.checkpoint)
    return {
        "ref": run.id if note.checkpoint is None else record and ref(run.id, record),
        **picked(note, "commit=checkpoint text author"),
        "set": iso(note.time_ms),
    }


def components_json(stored: Stored) -> list[dict[str, Any]]:
    """Return the components of a stored state."""
    return [
        {"name": name, "digest": one.digest, "tensors": len(one.tensors), "size_bytes": one.nbytes}
        for name, one in stored.manifest.components.items()
    ]


def lossy_json(stored: Stored) -> list[dict[str, Any]]:
    """Return how many tensors were saved with less precision, by their dtypes before and after.

    Empty for a state that was saved bit for bit.
    """
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for entry in stored.manifest.tensors():
        if entry.original is None:
            continue
        pair = {"original": entry.original, "dtype": entry.dtype}
        none = {"tensors": 0, "size_bytes": 0, "original_size_bytes": 0}
        counts = found.setdefault((entry.original, entry.dtype), {**pair, **none})
        elements = entry.nbytes // ITEM_SIZES[entry.dtype]
        counts["tensors"] += 1
        counts["size_bytes"] += entry.nbytes
        counts["original_size_bytes"] += elements * ITEM_SIZES[entry.original]
    return list(found.values())


def lossy_text(found: list[dict[str, Any]]) -> str:
    """Return in words what `lossy_json` returned; empty if nothing lost precision."""
    return "; ".join(
        f"{output.counted(one['tensors'], 'tensor')} of {one['original']} as {one['dtype']}, "
        f"{output.size(one['size_bytes'])} instead of {output.size(one['original_size_bytes'])}"
        for one in found
    )


def tensor_json(info: TensorInfo) -> dict[str, Any]:
    """Return a tensor."""
    return {
        **picked(info, "path dtype original"),
        "shape": list(info.shape),
        **picked(info, "size_bytes=nbytes content"),
    }


def source(run: Run, n: int | None) -> str | None:
    """Return the name of the checkpoint that something was made from, if the run knows it."""
    return run.history.checkpoint(n).ref if n in run.manifest.by_n else None


def pin_json(run: Run, pin: Pin) -> dict[str, Any]:
    """Return a gate or an artifact that is set."""
    return {
        "ref": f"{run.id}/{pin.ref}",
        "id": pin.manifest,
        "name": pin.name,
        "set": iso(pin.time_ms),
        "source": source(run, pin.checkpoint),
        "metrics": pin.metrics,
    }
