"""Runs, checkpoints and commits as the values that `--json` prints; `docs/cli.md` lists them."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from backends.escape import shown
from registry.actions import AddCheckpoint, Commit
from registry.checkpoint import Checkpoint, TensorInfo, phase_segment, phase_value
from registry.cli import output
from registry.dtypes import ITEM_SIZES
from registry.errors import IncompatibleState
from registry.merging.merge import MERGE
from registry.plain import decode_plain, is_dated, moment
from registry.releases import Release
from registry.run import Run
from registry.state import CheckpointRecord, Pin, RunManifest, StreamRecord
from registry.stored import Stored

#: Fields of actions that hold encoded plain values.
_ENCODED = ("config", "meta")


def iso(time_ms: int) -> str | int:
    """Return a time for JSON: ISO 8601, UTC; outside the calendar the log's milliseconds."""
    if not is_dated(time_ms):
        return time_ms
    return moment(time_ms).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def time_ms_of(said: str | int) -> int:
    """Return the time in milliseconds; the reverse of `iso`."""
    return said if isinstance(said, int) else int(datetime.fromisoformat(said).timestamp() * 1000)


def ref(run_id: str, record: CheckpointRecord | AddCheckpoint) -> str:
    """Return the name by which a checkpoint is found again."""
    return f"{run_id}/{phase_segment(record.phase)}/step{record.step:08d}"


def marks(manifest: RunManifest) -> dict[int, list[str]]:
    """Return what is to be said of each checkpoint: what points at it, and whether it counts.

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
        "meta": _plain(record.meta),
        "marks": pointed,
        "nonfinite": list(record.nonfinite),
    }


def meta_fields(meta: object) -> dict[str, object]:
    """Return the meta of a checkpoint by the names under which people are shown it."""
    if not isinstance(meta, dict):
        return {"meta": meta}
    fields: dict[str, object] = {}
    for key, value in meta.items():
        fields |= (key == MERGE and _merge_fields(value)) or {f"meta.{shown(key)}": value}
    return fields


def _merge_fields(said: Any) -> dict[str, object] | None:
    """Say what a merge was made of; None where this is not what a merge says of itself."""
    try:
        sources = [one["ref"] for one in said["sources"]]
        if "weights" in said:
            pairs = zip(sources, said["weights"], strict=True)
            sources = [f"{ref} (weight {weight})" for ref, weight in pairs]
        picks = [f"{name} from {one['ref']}" for name, one in said.get("pick", {}).items()]
        fields = {"sources": sources, "average": said.get("average", []), "pick": picks}
        return {f"meta.{MERGE}.{name}": ", ".join(some) for name, some in fields.items()}
    except (TypeError, KeyError, ValueError, AttributeError):
        return None


def checkpoint_json(checkpoint: Checkpoint, pointed: list[str]) -> dict[str, Any]:
    """Return a checkpoint with its components."""
    return {
        **record_json(checkpoint.run_id, checkpoint.record, pointed),
        "components": components_json(checkpoint),
        "lossy": lossy_json(checkpoint),
    }


def lossy_json(stored: Stored) -> list[dict[str, Any]]:
    """Return how many tensors were saved with less precision, by what they were and what they are.

    Empty for a state that is what was given, bit for bit.
    """
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for entry in stored.manifest.tensors():
        if entry.original is None:
            continue
        pair = entry.original, entry.dtype
        said = found.setdefault(
            pair,
            {
                "original": entry.original,
                "dtype": entry.dtype,
                "tensors": 0,
                "size_bytes": 0,
                "original_size_bytes": 0,
            },
        )
        said["tensors"] += 1
        said["size_bytes"] += entry.nbytes
        said["original_size_bytes"] += (
            entry.nbytes // ITEM_SIZES[entry.dtype] * ITEM_SIZES[entry.original]
        )
    return list(found.values())


def lossy_text(found: list[dict[str, Any]]) -> str:
    """Say what `lossy_json` returned in words; empty where there is nothing to say."""
    return "; ".join(
        f"{output.counted(one['tensors'], 'tensor')} of {one['original']} as {one['dtype']}, "
        f"{output.size(one['size_bytes'])} instead of {output.size(one['original_size_bytes'])}"
        for one in found
    )


def components_json(stored: Stored) -> list[dict[str, Any]]:
    """Return the components of a stored state."""
    return [
        {
            "name": name,
            "digest": part.digest,
            "tensors": len(part.tensors),
            "size_bytes": part.nbytes,
        }
        for name, part in stored.manifest.components.items()
    ]


def stored_json(run: Run, stored: Stored) -> dict[str, Any]:
    """Return a stored state that is no checkpoint, with its components."""
    origin = _origin(run, stored.ref.removeprefix(f"{run.id}/"))
    return {
        "ref": stored.ref,
        "id": stored.digest,
        "run": run.id,
        **origin,
        "size_bytes": stored.size_bytes,
        "components": components_json(stored),
        "lossy": lossy_json(stored),
    }


def _origin(run: Run, path: str) -> dict[str, Any]:
    """Return what a run says of a stored state that it keeps under this path."""
    manifest, parts = run.manifest, path.split("/")
    match parts:
        case ["releases" | "artifacts" as kinds, name]:
            pin = manifest.pin(kinds[:-1], name)
            assert pin is not None  # it was found by that name
            said = {"created": iso(pin.time_ms), "metrics": pin.metrics}
            return {"kind": pin.kind, **said, "source": source(run, pin.checkpoint)}
        case ["pool", version]:
            (entry,) = (one for one in manifest.pool if one.version == int(version[1:]))
            ratings = {"mu": entry.mu, "sigma": entry.sigma}
            said = {"created": iso(entry.time_ms), "metrics": ratings}
            return {"kind": "pool", **said, "source": source(run, entry.checkpoint)}
    # A companion stands beside its checkpoint, whose id comes first.
    beside = f"{run.id}/{parts[0]}"
    return {"kind": "companion", "created": None, "metrics": {}, "source": beside}


def source(run: Run, n: int | None) -> str | None:
    """Return the name of the checkpoint that something was made from, if the run knows it."""
    return run.find(n).ref if n in run.manifest.by_n else None


def release_json(release: Release) -> dict[str, Any]:
    """Return a release; its card is read for it."""
    return {
        "ref": release.ref,
        "id": release.digest,
        "version": release.version,
        "published": iso(release.record.time_ms),
        "latest": release.is_latest,
        "source": release.source,
        "metrics": release.metrics,
        "card": release.card,
    }


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


def due_gate_json(run: Run, name: str) -> dict[str, Any]:
    """Return a gate that is declared and not set yet."""
    ref = f"{run.id}/gates/{name}"
    return {"ref": ref, "id": None, "name": name, "set": None, "source": None, "metrics": {}}


def stream_json(stream: StreamRecord) -> dict[str, Any]:
    """Return a stream."""
    archives = {archive.label: archive.count for archive in stream.archives}
    return {
        "name": stream.name,
        "lifetime": stream.lifetime,
        "entries": stream.count,
        "segments": len(stream.segments),
        "archives": archives,
    }


def tensor_json(info: TensorInfo) -> dict[str, Any]:
    """Return a tensor."""
    return {
        "path": info.path,
        "dtype": info.dtype,
        "original": info.original,
        "shape": list(info.shape),
        "size_bytes": info.nbytes,
        "content": info.content,
    }


def run_json(run: Run) -> dict[str, Any]:
    """Return a run."""
    manifest = run.manifest
    created, latest, writer = manifest.created, manifest.latest(), manifest.writer
    return {
        "run": run.id,
        "status": manifest.status,
        "created": iso(manifest.created_ms),
        "seed": f"0x{created.seed}" if created else None,
        "config": _plain(created.config if created else None),
        "config_hash": created.config_hash if created else None,
        "environment": created.environment if created else {},
        "monitors": [{"metric": m.metric, "mode": m.mode} for m in manifest.monitors],
        "checkpoints": len(manifest.live()),
        "superseded": manifest.superseded_count,
        "evicted": manifest.evicted_count,
        "latest": ref(run.id, latest) if latest else None,
        "best": {
            m.metric: ref(run.id, best) if (best := manifest.best(m)) else None
            for m in manifest.monitors
        },
        "tags": {name: ref(run.id, manifest.by_n[n]) for name, n in sorted(manifest.tags.items())},
        "gates": {pin.name: source(run, pin.checkpoint) for pin in manifest.pins_of("gate")},
        "releases": [pin.name for pin in manifest.pins_of("release")],
        "artifacts": [pin.name for pin in manifest.pins_of("artifact")],
        "streams": {stream.name: stream.count for stream in manifest.streams},
        "pool": len(manifest.roster()),
        "writer": {"host": writer.host, "since": iso(writer.time_ms)} if writer else None,
        "commits": manifest.commits,
        "head": manifest.head,
    }


def commit_json(commit: Commit) -> dict[str, Any]:
    """Return a commit."""
    return {
        "n": commit.n,
        "time": iso(commit.time_ms),
        "author": commit.author,
        "prev": commit.prev,
        "actions": [_action(action.model_dump()) for action in commit.actions],
    }


def _action(values: dict[str, Any]) -> dict[str, Any]:
    for name in _ENCODED:
        if values.get(name) is not None:
            values[name] = _plain(values[name])
    return values


def _plain(encoded: Any) -> Any:
    """Return a value of the log; in its encoded form if only another program can rebuild it."""
    try:
        return None if encoded is None else decode_plain(encoded)
    except IncompatibleState:
        return encoded
