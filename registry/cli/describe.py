"""Runs, checkpoints and commits as the values that `--json` prints; `docs/cli.md` lists them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from registry.actions import Commit
from registry.checkpoint import Checkpoint, TensorInfo, phase_segment, phase_value
from registry.plain import decode_plain
from registry.run import Run
from registry.state import CheckpointRecord, RunManifest

#: Fields of actions that hold encoded plain values.
_ENCODED = ("config", "meta")


def when(time_ms: int) -> datetime:
    """Return a time of the log."""
    return datetime.fromtimestamp(time_ms / 1000, UTC)


def iso(then: datetime) -> str:
    """Return a time as JSON has it: ISO 8601, UTC."""
    return then.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def ref(run_id: str, record: CheckpointRecord) -> str:
    """Return the name by which a checkpoint is found again."""
    return f"{run_id}/{phase_segment(record.phase)}/step{record.step:08d}"


def marks(manifest: RunManifest) -> dict[int, list[str]]:
    """Return what points at each checkpoint: `latest`, `best`, `best/METRIC`, `tags/NAME`."""
    found: dict[int, list[str]] = {}
    latest = manifest.latest()
    if latest is not None:
        found.setdefault(latest.n, []).append("latest")
    for index, monitor in enumerate(manifest.monitors):
        best = manifest.best(monitor)
        if best is not None:
            name = f"best/{monitor.metric}" if index else "best"
            found.setdefault(best.n, []).append(name)
    for name, n in sorted(manifest.tags.items()):
        found.setdefault(n, []).append(f"tags/{name}")
    for record in manifest.checkpoints:
        if record.superseded:
            found.setdefault(record.n, []).append("superseded")
    return found


def record_json(run_id: str, record: CheckpointRecord, pointed: list[str]) -> dict[str, Any]:
    """Return a checkpoint."""
    return {
        "ref": ref(run_id, record),
        "id": record.manifest,
        "run": run_id,
        "phase": phase_value(record.phase),
        "step": record.step,
        "created": iso(when(record.time_ms)),
        "size_bytes": record.size_bytes,
        "metrics": record.metrics,
        "meta": decode_plain(record.meta) if record.meta is not None else None,
        "marks": pointed,
    }


def checkpoint_json(checkpoint: Checkpoint, pointed: list[str]) -> dict[str, Any]:
    """Return a checkpoint with its components."""
    parts = checkpoint.manifest.components
    return {
        **record_json(checkpoint.run_id, checkpoint.record, pointed),
        "components": [
            {
                "name": name,
                "digest": part.digest,
                "tensors": len(part.tensors),
                "size_bytes": part.nbytes,
            }
            for name, part in parts.items()
        ],
    }


def tensor_json(info: TensorInfo) -> dict[str, Any]:
    """Return a tensor."""
    return {
        "path": info.path,
        "dtype": info.dtype,
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
        "created": iso(when(manifest.created_ms)),
        "seed": f"0x{created.seed}" if created else None,
        "config": run.config,
        "config_hash": created.config_hash if created else None,
        "environment": created.environment if created else {},
        "monitors": [{"metric": m.metric, "mode": m.mode} for m in manifest.monitors],
        "checkpoints": len(manifest.live()),
        "superseded": len(manifest.checkpoints) - len(manifest.live()),
        "latest": ref(run.id, latest) if latest else None,
        "best": {
            m.metric: ref(run.id, best) if (best := manifest.best(m)) else None
            for m in manifest.monitors
        },
        "tags": {name: ref(run.id, manifest.by_n[n]) for name, n in sorted(manifest.tags.items())},
        "writer": {"host": writer.host, "since": iso(when(writer.time_ms))} if writer else None,
        "commits": manifest.commits,
        "head": manifest.head,
    }


def commit_json(commit: Commit) -> dict[str, Any]:
    """Return a commit."""
    return {
        "n": commit.n,
        "time": iso(when(commit.time_ms)),
        "author": commit.author,
        "prev": commit.prev,
        "actions": [_action(action.model_dump()) for action in commit.actions],
    }


def _action(values: dict[str, Any]) -> dict[str, Any]:
    for name in _ENCODED:
        if values.get(name) is not None:
            values[name] = decode_plain(values[name])
    return values
