"""A registry and a run as HTML for notebooks; a run as its handle has read it."""

from __future__ import annotations

from itertools import islice

from holdfast.registry.curation import run_remarks
from holdfast.registry.face.registry_handle import RegistryHandle
from holdfast.registry.history import format_time, hold_in_words, hold_ref, list_runs, step_ref
from holdfast.registry.history.replay import CheckpointRecord, RunManifest
from holdfast.registry.values import markup, size

#: The most metrics that have a column.
_MOST_METRICS = 6


def run_html(run: RunManifest) -> str:
    """Return a run as HTML: its status, its best checkpoints, and the newest ones as a table."""
    live, kinds = run.live(), ("gate", "release", "artifact", "tag")
    bests = [(one.label, run.own_best(one)) for one in run.monitors]
    pins = {kind: [one.name for one in run.pins_of(kind)[: markup.MOST_ROWS]] for kind in kinds}
    facts = {
        "status": run.shown_status if run.dropped is None else f"dropped: {run.dropped}",
        "failed": run.reason,
        "problem": "; ".join(run_remarks(run)),
        "phase": run.phase,
        "created": format_time(run.created_ms),
        "checkpoints": f"{len(live):,}, {size(sum(one.size_bytes for one in live))}",
        "evicted": run.evicted_count or None,
        "superseded": run.superseded_count or None,
        **{f"best {label}": best and step_ref(best) for label, best in bests},
        **{f"{kind}s": ", ".join(names) for kind, names in pins.items()},
        "held": "; ".join(f"{hold_ref(run, one)} {hold_in_words(one)}" for one in run.holds or ()),
        "streams": ", ".join(one.name for one in run.streams[: markup.MOST_ROWS]),
    }
    return markup.describe("Run", run.run_id, facts, _newest(live))


def _newest(live: list[CheckpointRecord]) -> markup.Rows:
    newest = list(islice(reversed(live), markup.MOST_ROWS))
    names = list(dict.fromkeys(name for one in newest for name in one.metrics))[:_MOST_METRICS]
    rows = [
        (
            step_ref(one),
            *(one.metrics.get(name) for name in names),
            size(one.size_bytes),
            format_time(one.time_ms),
        )
        for one in newest
    ]
    return markup.Rows(("checkpoint", *names, "size", "time"), rows, len(live), "checkpoints")


def registry_html(registry: RegistryHandle) -> str:
    """Return a registry as HTML; this asks for the names of the runs, one listing."""
    facts = {"id": registry.store.config.id}
    try:
        names = list_runs(registry.store)
    except Exception as error:  # shown in the place of the runs
        return markup.describe("Registry", registry.url, facts, error)
    rows = ((name,) for name in reversed(names))
    runs = markup.Rows(("run",), rows, len(names), "runs: reg.runs_table() has all")
    return markup.describe("Registry", registry.url, {**facts, "runs": len(names)}, runs)
