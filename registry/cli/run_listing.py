"""`run ls`, and what it and other commands say of a run."""

from __future__ import annotations

import time as clock
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from holdfast.registry.cli import describe, options
from holdfast.registry.cli.columns import Column, Table, numbers
from holdfast.registry.cli.command import Answer, command
from holdfast.registry.cli.describe import iso, parent_of, picked, ref, source
from holdfast.registry.cli.failures import mark
from holdfast.registry.cli.listing import Listing, sparkline
from holdfast.registry.cli.opening import reads
from holdfast.registry.cli.options import option
from holdfast.registry.curation import run_remarks
from holdfast.registry.face import Registry
from holdfast.registry.history import (
    decode_or_keep,
    decode_plain,
    json_ready,
    merged_from,
    parent_ref,
    phase_value,
)
from holdfast.registry.saving.loop import LastHeard, failed_saves, last_heard, waited_share
from holdfast.registry.tables import RunChoice, kept_fields
from holdfast.registry.upkeep import Damage
from holdfast.registry.values import abridged, number

if TYPE_CHECKING:
    from holdfast.registry.errors import RegistryError
    from holdfast.registry.face import Run

_LS = (
    Column("run"),
    Column("status"),
    Column("phase", none="-", drop=2),
    *numbers("checkpoints", none="-", drop=4),
    Column("latest", text=lambda ref: ref.partition("/")[2], none="-", drop=3),
    Column("best_values", text=number, is_number=True, none="-", drop=1, spreads=True),
    *numbers("best_step", none="-", drop=2),
    Column("trend", text=sparkline, is_picture=True, drop=1),
    *numbers("heard=last_heard.time", text=describe.age, none="-", drop=5),
    *numbers("age=created", text=describe.age, none="-", drop=6),
    Column("owner", none="-", drop=7),
)
_BESTS = (*map(Column, ("run", "ref", "metric", "mode")), *numbers("step"))
_BESTS += numbers("value", text=number)
#: Form of `summary`; raise it whenever that or `run_json` makes something else.
FORM = 10


@command(reads, table=True)
def ls(
    opened: Registry,
    *,
    where: str = options.WHERE,
    since: str | None = option(
        "--since", "TIME", "Only runs with a save in that time, such as 12h or 7d."
    ),
    limit: int | None = option("-n", "COUNT", "Only the COUNT runs with the newest saves.", min=1),
    max_age: str = option(
        "--max-age", "TIME", "Do not ask for runs that were listed here so recently.", default="0"
    ),
) -> Answer:
    """List the runs by name.

    Runs that did not change since this machine listed them last are not opened again.
    """
    choice = RunChoice(where, None if since is None else options.seconds(since), limit)
    listing = Listing(opened)
    found = listing.summaries(summary, FORM, max_age_s=options.seconds(max_age))
    forks, damage = _forks_among(found), Damage.of(opened.handle.store)
    now_ms = int(clock.time() * 1000)
    rows = [_row(one, forks, damage, now_ms) for one in listing.chosen(found, choice)]

    def listed(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        damaged = [
            {"run": name, "status": mark(error), "error": error.summary}
            for name, error in listing.damaged.items()
        ]
        return sorted([*rows, *damaged], key=lambda row: str(row["run"]))

    shown = [{**row, **_for_people(row, found[row["run"]])} for row in rows]
    none = "no run fits" if found else "no runs yet"
    return Answer(
        lambda: listed(rows),
        lambda: [Table(_LS, listed(shown), none=none, sorts={"best": "best_order"})],
        notes=listing.notes,
        damaged=listing.damaged,
    )


def fitting(
    opened: Registry, names: list[str], where: str
) -> tuple[list[str], dict[str, RegistryError]]:
    """Return the runs of these names and patterns that fit a filter, and those that are damaged."""
    found = options.matching(names, opened.run_names)
    if not where:
        return found, {}
    listing = Listing(opened)
    rows = listing.chosen(listing.summaries(summary, FORM), RunChoice(where))
    fits = {one["row"]["run"] for one in rows}
    damaged = {name: error for name, error in listing.damaged.items() if name in found}
    return [name for name in found if name in fits], damaged


def bests(opened: Registry, pattern: str) -> Answer:
    """Return the best checkpoint that each run has by itself, by its first monitor."""
    listing = Listing(opened)
    found, blocks = listing.summaries(summary, FORM), dict[str, list[dict[str, Any]]]()
    names = options.matching([pattern], lambda: [*found, *listing.damaged])
    for best in (_best_json(found[name]["row"]) for name in names if name in found):
        if best is not None:
            blocks.setdefault(f"{best['metric']}:{best['mode']}", []).append(best)
    for label, some in blocks.items():
        some.sort(key=lambda best: best["value"], reverse=label.endswith(":max"))
    rows = [best for some in sorted(blocks.values(), key=len, reverse=True) for best in some]
    owned = {best["run"] for best in rows}
    left = abridged([name for name in names if name not in owned], ", ")
    mixed = f"{', '.join(blocks)} are not compared: each is sorted by itself"
    notes = [mixed] * (len(blocks) > 1) + [
        f"without a best checkpoint of their own: {left}"
    ] * bool(left)
    damaged = {name: error for name, error in listing.damaged.items() if name in names}
    return Answer(lambda: rows, lambda: [Table(_BESTS, rows, none="none")], notes, damaged=damaged)


def summary(run: Run) -> dict[str, Any]:
    """Return a row of `run ls`, without the parts that depend on the time or this machine."""
    manifest = run.manifest
    monitors, records = manifest.monitors, manifest.live()
    row = run_json(run, None, Damage({}, {}))
    return {
        "row": json_ready(row) | {"best_values": row["best_values"]},
        "status": manifest.shown_status,
        "trend": [one.measured(record.metrics) for one in monitors[:1] for record in records],
        "remarks": [one.partition(":")[0] for one in run_remarks(manifest)],
        "due_ms": heard_of(run).due_ms,
        "fields": kept_fields(run.handle.log),
    }


def _row(
    one: Mapping[str, Any], forks: Mapping[str, list[str]], damage: Damage, now_ms: int
) -> dict[str, Any]:
    row, due_ms = one["row"], one["due_ms"]
    name, is_overdue = row["run"], due_ms is not None and now_ms > due_ms
    return {
        **row,
        "forks": forks.get(name, []),
        "last_heard": {**row["last_heard"], "overdue": is_overdue},
        "damaged": [f"{name}/{ref}" for ref in damage.in_run(name)],
    }


def _for_people(row: Mapping[str, Any], one: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a row that `--json` has in another form, or does not have."""
    status = ", ".join(_status(row, one["status"], one["remarks"]))
    return {"status": status, "trend": one["trend"], "best_order": _best_order(row)}


def _best_json(row: Mapping[str, Any]) -> dict[str, Any] | None:
    for monitor in row["monitors"][:1]:
        names = {"step": "best_steps", "value": "best_values", "ref": "best"}
        found = {name: row[field][monitor["metric"]] for name, field in names.items()}
        return {"run": row["run"], **monitor, **found} if found["ref"] else None
    return None


def _best_order(row: Mapping[str, Any]) -> tuple[str, float] | None:
    """Return the key that sorts runs by best value, best first; metrics are never mixed."""
    for monitor in row["monitors"][:1]:
        value = row["best_values"][monitor["metric"]]
        if value is not None:
            return monitor["metric"], value if monitor["mode"] == "min" else -value
    return None


def heard_of(run: Run) -> LastHeard:
    """Return when a run was last heard of."""
    return last_heard(run.manifest, int(clock.time() * 1000))


def _status(row: Mapping[str, Any], status: str, remarks: Iterable[str]) -> Iterator[str]:
    """Yield the status of a run, and its problems."""
    if row["dropped"] is not None:
        yield "dropped"
        if row["freed"]:
            yield "freed"
        return
    yield status
    if row["last_heard"]["overdue"]:
        yield "overdue"
    if row["damaged"]:
        yield "damaged"
    yield from remarks


def _heard_json(run: Run) -> dict[str, Any]:
    heard = heard_of(run)
    every_s = None if heard.interval_ms is None else heard.interval_ms / 1000
    return {"time": iso(heard.time_ms), "interval_s": every_s, "overdue": heard.is_overdue}


def run_json(run: Run, forks: list[str] | None, damage: Damage | None = None) -> dict[str, Any]:
    """Return a run; `forks` are its forks' names, `None` where nobody looked for them."""
    manifest, damage = run.manifest, damage or Damage.of(run.handle.store)
    created, latest, writer = manifest.created, manifest.latest(), manifest.writer
    meta, backlog = decode_plain(latest.meta) if latest else None, run.backlog()
    bests = [(one, manifest.own_best(one), manifest.best(one)) for one in manifest.monitors]
    return {
        "run": run.id,
        "status": manifest.status,
        "reason": manifest.reason,
        **lineage_json(run, forks),
        "created": iso(manifest.created_ms),
        "owner": run.handle.log.owner(),
        "project": created and created.project,
        "labels": [*manifest.labels_now],
        "notes": [describe.note_json(run, one) for one in manifest.notes or ()],
        "last_heard": _heard_json(run),
        "damaged": [f"{run.id}/{ref}" for ref in damage.in_run(run.id)],
        "waited_share": waited_share(meta),
        "failed_saves": failed_saves(meta),
        "seed": f"0x{created.seed}" if created else None,
        "config": decode_or_keep(manifest.config),
        "config_hash": created.config_hash if created else None,
        "environment": created.environment if created else {},
        "monitors": [picked(one, "metric mode") for one in manifest.monitors],
        "checkpoints": len(manifest.live()),
        "superseded": manifest.superseded_count,
        "evicted": manifest.evicted_count,
        "latest": ref(run.id, latest) if latest else None,
        "total_steps": created and created.total_steps,
        "best": {one.metric: ref(run.id, best) if best else None for one, best, _ in bests},
        "best_values": {
            one.metric: one.measured(best.metrics) if best else None for one, best, _ in bests
        },
        "best_steps": {one.metric: best.step if best else None for one, best, _ in bests},
        "best_step": next((best.step for _, best, _ in bests[:1] if best), None),
        "inherited": {
            one.metric: one.measured(found.metrics)
            for one, best, found in bests
            if found is not None and found is not best
        },
        "tags": {name: ref(run.id, manifest.by_n[n]) for name, n in sorted(manifest.tags.items())},
        "gates": {pin.name: source(run, pin.checkpoint) for pin in manifest.pins_of("gate")},
        "releases": [pin.name for pin in manifest.pins_of("release")],
        "artifacts": [pin.name for pin in manifest.pins_of("artifact")],
        "holds": [describe.hold_json(run, one) for one in manifest.holds or ()],
        "streams": {stream.name: stream.count for stream in manifest.streams},
        "pool": len(manifest.roster()),
        "writer": {"host": writer.host, "since": iso(writer.time_ms)} if writer else None,
        "commits": manifest.commits,
        "head": manifest.head,
        "journal": None if backlog is None else asdict(backlog),
    }


def _forks_among(summaries: Mapping[str, Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return the names of the forks of each run that has some."""
    found: dict[str, list[str]] = {}
    for name, one in summaries.items():
        if one["row"]["parent"] is not None:
            found.setdefault(one["row"]["parent"]["run"], []).append(name)
    return found


def lineage_json(run: Run, forks: list[str] | None) -> dict[str, Any]:
    """Return the parent, forks and phases of a run, and why it was dropped."""
    manifest, parent = run.manifest, parent_of(run.manifest)
    latest = manifest.latest()
    return {
        "preset": run.manifest.spec.name or None,
        "phase": run.phases.current,
        "phases": [
            {
                "phase": phase_value(record.to_phase),
                "from": phase_value(record.from_phase),
                **picked(record, "pivot=name source commit=n superseded"),
                "config": decode_or_keep(record.config),
                "meta": decode_or_keep(record.meta),
            }
            for record in manifest.phases
        ],
        "parent": None
        if parent is None
        else {**picked(parent, "run commit"), "ref": parent_ref(parent), "id": parent.checkpoint},
        "merged_from": [] if latest is None else merged_from(decode_or_keep(latest.meta)),
        "forks": forks,
        "dropped": manifest.dropped,
        "freed": None if manifest.dropped is None else manifest.holds_nothing,
    }
