"""The descent of runs: parents, forks and phases."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from holdfast.registry.history.actions import Parent
from holdfast.registry.history.step_names import parent_ref, phase_value
from holdfast.registry.runs.run import Run


def forks_among(runs: Iterable[Run]) -> dict[str, list[str]]:
    """Return the names of the forks of each of these runs that has some."""
    found: dict[str, list[str]] = {}
    for run in runs:
        parent = parent_of(run)
        if parent is not None:
            found.setdefault(parent.run, []).append(run.id)
    return found


def parent_of(run: Run) -> Parent | None:
    """Return the parent of a run that was forked."""
    created = run.manifest.created
    return None if created is None else created.parent


def lineage_json(run: Run, forks: list[str]) -> dict[str, Any]:
    """Return the parent, forks and phases of a run, and why it was dropped."""
    manifest, parent = run.manifest, parent_of(run)
    return {
        "preset": run.spec.name or None,
        "phase": run.phase,
        "phases": [
            {
                "phase": phase_value(record.to_phase),
                "from": phase_value(record.from_phase),
                "pivot": record.name,
                "source": record.source,
                "commit": record.n,
                "superseded": record.superseded,
            }
            for record in manifest.phases
        ],
        "parent": None if parent is None else _parent_json(parent),
        "forks": forks,
        "dropped": manifest.dropped,
    }


def _parent_json(parent: Parent) -> dict[str, Any]:
    return {
        "run": parent.run,
        "commit": parent.commit,
        "ref": parent_ref(parent),
        "id": parent.checkpoint,
    }
