"""`meta.json`: the description of a stored state, from log and manifest."""

from __future__ import annotations

import json
from typing import Any

from holdfast.registry.curation import Release
from holdfast.registry.curation.pool import PoolEntry
from holdfast.registry.errors import IncompatibleState
from holdfast.registry.history import json_ready
from holdfast.registry.loading import Checkpoint, Stored


def describe(stored: Stored) -> bytes:
    """Return a stored state as one JSON object on one line."""
    fields = {
        "ref": stored.ref,
        "id": str(stored.digest),
        "run": stored.run_id,
        **_record(stored),
        "size_bytes": stored.manifest.nbytes,
        "components": {
            name: {
                "digest": str(part.digest),
                "tensors": len(part.tensors),
                "size_bytes": part.nbytes,
            }
            for name, part in stored.manifest.components.items()
        },
    }
    return json.dumps(json_ready(fields), allow_nan=False).encode() + b"\n"


def _record(stored: Stored) -> dict[str, Any]:
    match stored:
        case Checkpoint():
            return {
                "phase": stored.phase,
                "step": stored.step,
                "created": stored.created.isoformat(timespec="milliseconds"),
                "superseded": stored.superseded,
                "metrics": stored.metrics,
                "meta": _meta(stored),
            }
        case Release():
            return {
                "version": stored.version,
                "published": stored.published.isoformat(timespec="milliseconds"),
                "metrics": stored.metrics,
            }
        case PoolEntry():
            return {
                "version": stored.version,
                "phase": stored.phase,
                "step": stored.step,
                "promoted": stored.promoted.isoformat(timespec="milliseconds"),
                "metrics": {"mu": stored.mu, "sigma": stored.sigma},
                "games": stored.games,
                "wins": stored.wins,
            }
    return {}


def _meta(checkpoint: Checkpoint) -> Any:
    try:
        return checkpoint.meta
    except IncompatibleState:  # only another program can rebuild it
        return checkpoint.record.meta
