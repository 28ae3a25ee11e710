"""`run create`, `ls`, `set`, `pivot` and `rm`."""

from __future__ import annotations

import json as json_module
import runpy
import time as clock
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import typer

from holdfast.registry.cli import completing, describe, options, output
from holdfast.registry.cli.columns import Column, Table, numbers
from holdfast.registry.cli.command import Answer, command
from holdfast.registry.cli.describe import iso, ref, source
from holdfast.registry.cli.failures import mark
from holdfast.registry.cli.listing import Listing, sparkline
from holdfast.registry.cli.opening import reads, writes
from holdfast.registry.cli.options import argument, flag, option
from holdfast.registry.curation import run_remarks
from holdfast.registry.errors import InvalidInput
from holdfast.registry.face import Registry, Run
from holdfast.registry.history import (
    decode_or_keep,
    decode_plain,
    json_ready,
    merged_from,
    parent_ref,
    phase_value,
)
from holdfast.registry.history.actions import Parent, RunStatus
from holdfast.registry.saving.loop import LastHeard, failed_saves, last_heard, waited_share
from holdfast.registry.spec import Monitor, Retention
from holdfast.registry.spec.presets import load_preset
from holdfast.registry.tables import RunChoice, kept_fields
from holdfast.registry.upkeep import Damage
from holdfast.registry.values import duration, number

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
#: Form of `summary`; raise it whenever that or `run_json` makes something else.
FORM = 6
_WHERE = "Only runs that fit, such as 'lr < 1e-3 and status=failed and name~vit'."
_OWNER = option("--owner", "NAME", "Its owner; by default the user who creates it.")
_PROJECT = option("--project", "NAME", "The project that it belongs to.")
_LABEL = option("--label", "WORD", "A word to find it by; repeatable.")
_SET = option("--set", "PATH=VALUE", "A value of the preset to replace: retention.last=5.")
_NAME = argument("NAME", "Its name; by default made of date, time and seed.", default=None)


@command(writes)
def create(
    opened: Registry,
    *,
    name: str | None = _NAME,
    seed: str | None = option("--seed", "N", "Master seed, decimal or 0x...; random by default."),
    config: Path | None = option("--config", "FILE", "Configuration, JSON or TOML."),
    input_hash: str | None = option("--input-hash", "TEXT", "A hash of the input data."),
    monitor: list[str] | None = option(
        "--monitor", "METRIC:MODE", "Decides best; mode min or max."
    ),
    preset: str | None = option(
        "--preset", "NAME|FILE", "The preset of the run.", autocompletion=completing.PRESETS
    ),
    overrides: list[str] | None = _SET,
    last: int | None = options.LAST,
    best: int | None = options.BEST,
    every: int | None = options.EVERY,
    days: int | None = options.DAYS,
    thin: list[str] | None = options.THIN,
    owner: str | None = _OWNER,
    project: str | None = _PROJECT,
    label: list[str] | None = _LABEL,
    total_steps: int | None = option(
        "--total-steps", "N", "The step at which training is planned to end.", min=1
    ),
    source: str | None = option(
        "--from",
        "REF",
        "Continue from this checkpoint of another run; no data is copied.",
        autocompletion=completing.REFS,
    ),
) -> Answer:
    """Create a run and print its name.

    Without --preset, --last, --best, --every and --days it keeps every checkpoint. A checkpoint
    stays if any of them keeps it. With --thin the others are thinned, not evicted. With --from the
    run has the preset, seed, configuration and project of its parent, unless they are given.
    """
    words = {"input_hash": input_hash, "owner": owner, "project": project, "labels": label}
    given = _options(seed, config, preset, **words) | _overrides(overrides)
    if total_steps is not None:
        given["total_steps"] = total_steps
    if monitor:
        given["monitor"] = [_monitor(text) for text in monitor]
    retention = options.retention(last, best, every, days, thin)
    if retention is not None:
        given["retention"] = retention
        if source is None:
            _check_best(retention, preset, monitor)
    run = opened.create_run(name, **given) if source is None else opened.fork(source, name, **given)
    return Answer(lambda: run_json(run, []), lambda: [run.id])


@command(reads, table=True)
def ls(
    opened: Registry,
    *,
    where: str = option("--where", "FILTER", _WHERE, default=""),
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
        return listing.by_name(
            {row["run"]: row for row in rows},
            lambda name, error: {"run": name, "status": mark(error), "error": error.summary},
        )

    shown = [{**row, **_for_people(row, found[row["run"]])} for row in rows]
    none = "no run fits" if found else "no runs yet"
    return Answer(
        lambda: listed(rows),
        lambda: [Table(_LS, listed(shown), none=none, sorts={"best": "best_order"})],
        notes=listing.notes,
        damaged=listing.damaged,
    )


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


def _waited_json(run: Run) -> float | None:
    """Return the share of the time in which training waited for saves, as of the latest one."""
    latest = run.manifest.latest()
    return None if latest is None else waited_share(decode_plain(latest.meta))


def run_json(run: Run, forks: list[str] | None, damage: Damage | None = None) -> dict[str, Any]:
    """Return a run; `forks` are its forks' names, `None` where nobody looked for them."""
    manifest, damage = run.manifest, damage or Damage.of(run.handle.store)
    created, latest, writer = manifest.created, manifest.latest(), manifest.writer
    backlog = run.backlog()
    bests = {monitor.metric: manifest.best(monitor) for monitor in manifest.monitors}
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
        "waited_share": _waited_json(run),
        "failed_saves": failed_saves(decode_plain(latest.meta)) if latest else 0,
        "seed": f"0x{created.seed}" if created else None,
        "config": decode_or_keep(manifest.config),
        "config_hash": created.config_hash if created else None,
        "environment": created.environment if created else {},
        "monitors": [{"metric": m.metric, "mode": m.mode} for m in manifest.monitors],
        "checkpoints": len(manifest.live()),
        "superseded": manifest.superseded_count,
        "evicted": manifest.evicted_count,
        "latest": ref(run.id, latest) if latest else None,
        "total_steps": created and created.total_steps,
        "best": {metric: ref(run.id, best) if best else None for metric, best in bests.items()},
        "best_values": {m: best.metrics[m] if best else None for m, best in bests.items()},
        "best_steps": {metric: best.step if best else None for metric, best in bests.items()},
        "best_step": next((best.step for best in [*bests.values()][:1] if best), None),
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


@command(writes)
def change(
    opened: Registry,
    *,
    run: options.NamedRun,
    status: str | None = option("--status", "STATUS", "running, interrupted, completed or failed."),
    label: list[str] | None = option(
        "--label", "WORD", "A label, in place of all that it has; repeatable. '' removes them."
    ),
    versions: str | None = option(
        "--schema-version", "FROM:TO", "The schema version of its states today, and the new one."
    ),
    migration: str | None = option(
        "--migration", "FILE:NAME", "With --schema-version: the function that migrates a state."
    ),
) -> Answer:
    """Set the status or the labels of a run, or its schema version.

    A completed run takes no checkpoint, and ends what follows it: `watch`, `pull --watch`. Stop the
    trainer before you raise the version. The migration is tried on the newest checkpoint; this runs
    FILE, a program of yours. Programs that load older states register the same function.
    """
    is_one = [status is None, not label, versions is None].count(False) == 1
    if not is_one or (versions is None) != (migration is None):
        raise typer.BadParameter("give --status, --label, or --schema-version with --migration")
    found = opened.run(run)
    if label:
        found.history.set_labels([] if label == [""] else label)
        said = f"{run}: labels {', '.join(found.manifest.labels_now) or 'none'}"
        return Answer(lambda: run_json(found, None), lambda: [said])
    if status is not None:
        found.status = cast("RunStatus", status)
    if versions is None or migration is None:
        return Answer(lambda: run_json(found, None), lambda: [f"{run}: {status}"])
    path, _, name = migration.rpartition(":")
    migrate = runpy.run_path(path).get(name) if path else None
    if not callable(migrate):
        raise typer.BadParameter(f"{migration!r} is not FILE:NAME of a function in a file")
    before, after = (int(one) if one.isdigit() else one for one in _pair(versions))
    found.phases.raise_version(before, after, migrate)
    return Answer(lambda: run_json(found, None), lambda: [f"{run}: schema version {after}"])


def _pair(text: str) -> tuple[str, str]:
    before, colon, after = text.partition(":")
    if not (before and colon and after):
        raise typer.BadParameter(f"{text!r} is not of the form FROM:TO, as in 1:2")
    return before, after


@command(writes)
def pivot(
    opened: Registry,
    *,
    run: options.Run,
    name: str = argument("NAME", "Name of the pivot."),
    config: Path | None = option("--config", "FILE", "The configuration from here on."),
    meta: list[str] | None = option("--meta", "NAME=TEXT", "A text to note with it; repeatable."),
) -> Answer:
    """Change the policy of a run within its phase.

    Stop its trainer before. Resettable streams are archived, and best begins again. The next
    `restore` returns the newest checkpoint, changed by the preset's table. The same name again
    changes nothing.
    """
    found = opened.run(run)
    before, status = len(found.manifest.pivots), found.status
    given = None if config is None else _read_config(config)
    texts = options.pairs(meta or ()) or None
    pivoted = found.phases.pivot(name, config=given, meta=texts)
    if found.status != status:
        found.status = status  # nobody trains yet
    is_new = len(found.manifest.pivots) > before
    changes = [{"part": one.part, "change": one.change, "to": one.to} for one in pivoted.report]
    return Answer(
        lambda: {
            "run": run,
            "pivot": name,
            "new": is_new,
            "from": pivoted.checkpoint.ref,
            "id": pivoted.checkpoint.digest,
            "rows": changes,
        },
        lambda: [
            f"pivoted: {run} at {pivoted.checkpoint.ref}"
            if is_new
            else f"{run} pivoted to {name} before: nothing was changed"
        ],
    )


@command(writes)
def rm(
    opened: Registry,
    *,
    run: options.Run,
    reason: str = options.REASON,
    now: bool = flag("--now", "Free it at once; it takes the rights of a collector."),
    yes: bool = flag("--yes", "Do not ask."),
) -> Answer:
    """Drop a run; `undo` takes that back.

    It is hidden at once, gates and releases included. After the delay of the registry (`drops`), 7
    days by default, `gc` frees it. On a terminal you must type the name of the run; elsewhere --yes
    is needed.
    """
    dropped = opened.run(run)
    if not yes:
        held = output.counted(len(dropped.manifest.live()), "checkpoint")
        end = "They cannot be brought back." if now else "`undo` brings them back for a while."
        output.confirm_name(run, "drop", f"{run} holds {held}. {end}")
    dropped.retention.drop(reason, now=now)
    return Answer(lambda: run_json(dropped, None), lambda: [_dropped_text(opened, run, now=now)])


def _dropped_text(opened: Registry, run: str, *, now: bool) -> str:
    if now:
        return f"dropped: {run}; the next gc after the grace deletes what no other run needs"
    delay = duration(opened.drop_rules().delay_s)
    return f"dropped: {run}; for {delay} `holdfast undo {run}` brings it back"


def _forks_among(summaries: Mapping[str, Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return the names of the forks of each run that has some."""
    found: dict[str, list[str]] = {}
    for name, one in summaries.items():
        if one["row"]["parent"] is not None:
            found.setdefault(one["row"]["parent"]["run"], []).append(name)
    return found


def parent_of(run: Run) -> Parent | None:
    """Return the parent of a run that was forked."""
    created = run.manifest.created
    return None if created is None else created.parent


def lineage_json(run: Run, forks: list[str] | None) -> dict[str, Any]:
    """Return the parent, forks and phases of a run, and why it was dropped."""
    manifest, parent = run.manifest, parent_of(run)
    latest = manifest.latest()
    return {
        "preset": run.manifest.spec.name or None,
        "phase": run.phases.current,
        "phases": [
            {
                "phase": phase_value(record.to_phase),
                "from": phase_value(record.from_phase),
                "pivot": record.name,
                "source": record.source,
                "commit": record.n,
                "superseded": record.superseded,
                "config": decode_or_keep(record.config),
                "meta": decode_or_keep(record.meta),
            }
            for record in manifest.phases
        ],
        "parent": None if parent is None else _parent_json(parent),
        "merged_from": [] if latest is None else merged_from(decode_or_keep(latest.meta)),
        "forks": forks,
        "dropped": manifest.dropped,
        "freed": None if manifest.dropped is None else manifest.holds_nothing,
    }


def _parent_json(parent: Parent) -> dict[str, Any]:
    return {
        "run": parent.run,
        "commit": parent.commit,
        "ref": parent_ref(parent),
        "id": parent.checkpoint,
    }


# Arguments


def _options(
    seed: str | None, config: Path | None, preset: str | None, **words: object
) -> dict[str, Any]:
    given: dict[str, Any] = {name: value for name, value in words.items() if value}
    if seed is not None:
        given["seed"] = _seed(seed)
    if config is not None:
        given["config"] = _read_config(config)
    if preset is not None:
        given["preset"] = preset
    return given


def _overrides(texts: list[str] | None) -> dict[str, Any]:
    """Return the values of a preset that are set, each read as JSON or else as text."""
    found: dict[str, object] = {}
    for text in texts or ():
        path, equals, value = text.partition("=")
        if not equals:
            raise typer.BadParameter(f"{text!r} has no value; write {text}=VALUE")
        if path in found:
            raise typer.BadParameter(f"{path!r} is given twice")
        try:
            found[path] = json_module.loads(value)
        except (ValueError, RecursionError):
            found[path] = value
    return {"overrides": found} if found else {}


def _check_best(retention: Retention, preset: str | None, monitor: list[str] | None) -> None:
    """Refuse to keep the best checkpoints of a run without a monitor."""
    spec = load_preset(preset) if preset else None
    if retention.best and not monitor and not (spec and (spec.monitors or spec.phases)):
        raise InvalidInput(
            "the best are to be kept, and no metric says which they are",
            where=f"--best {retention.best}",
            hint="Add --monitor loss:min, or another METRIC:min or METRIC:max.",
        )


def _monitor(text: str) -> Monitor:
    metric, _, mode = text.rpartition(":")
    match mode:
        case "min" | "max" if metric:
            return Monitor(metric=metric, mode=mode)
    raise typer.BadParameter(f"{text!r} is not of the form METRIC:min or METRIC:max")


def _seed(text: str) -> int:
    try:
        return int(text, 0)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a whole number") from None


def _read_config(path: Path) -> object:
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix.lower() == ".toml":
            return tomllib.loads(text)
        return json_module.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidInput(
            "the configuration cannot be read",
            where=path,
            expected="a file of JSON, or of TOML where its name ends in .toml",
            found=getattr(error, "strerror", None) or error,
        ) from error
