"""`run create`, `ls`, `pivot`, `fork` and `drop`."""

from __future__ import annotations

import json as json_module
import time as clock
import tomllib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from holdfast.registry.cli import describe, options, output
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
    parent_ref,
    phase_value,
)
from holdfast.registry.history.actions import Parent
from holdfast.registry.saving.loop import LastHeard, failed_saves, last_heard, waited_share
from holdfast.registry.spec import Monitor, Retention
from holdfast.registry.spec.presets import load_preset
from holdfast.registry.tables import RunChoice
from holdfast.registry.upkeep import Damage
from holdfast.registry.values import number

_LS = (
    Column("run"),
    Column("status"),
    Column("phase", none="-", drop=2),
    *numbers("checkpoints", none="-", drop=4),
    Column("latest", text=lambda ref: ref.partition("/")[2], none="-", drop=3),
    Column("best_values", text=number, is_number=True, none="-", drop=1, spreads=True),
    Column("trend", text=sparkline, is_picture=True, drop=1),
    *numbers("heard=last_heard.time", text=describe.age, none="-", drop=5),
    *numbers("age=created", text=describe.age, none="-", drop=6),
)
_WHERE = "Only runs that fit, such as 'lr < 1e-3 and status=failed and name~vit'."
_NAME = argument("NAME", "Its name; by default made of date, time and seed.", default=None)


@command(writes)
def create(
    opened: Registry,
    *,
    name: str | None = _NAME,
    seed: str | None = option("--seed", "N", "Master seed, decimal or 0x...; random by default."),
    config: Path | None = option("--config", "FILE", "Configuration, JSON or TOML."),
    monitor: list[str] | None = option(
        "--monitor", "METRIC:MODE", "Decides best; mode min or max."
    ),
    preset: str | None = option("--preset", "NAME|FILE", "The preset of the run."),
    last: int | None = options.LAST,
    best: int | None = options.BEST,
    every: int | None = options.EVERY,
    days: int | None = options.DAYS,
    thin: list[str] | None = options.THIN,
) -> Answer:
    """Create a run and print its name.

    Without --preset, --last, --best, --every and --days it keeps every checkpoint. A checkpoint
    stays if any of them keeps it. With --thin the others are thinned, not evicted.
    """
    given = _options(seed, config, preset)
    if monitor:
        given["monitor"] = [_monitor(text) for text in monitor]
    retention = options.retention(last, best, every, days, thin)
    if retention is not None:
        given["retention"] = retention
        _check_best(retention, preset, monitor)
    run = opened.create_run(name, **given)
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
) -> Answer:
    """List the runs by name."""
    choice = RunChoice(where, None if since is None else options.seconds(since), limit)
    listing = Listing(opened)
    opened_runs = listing.runs()
    forks, damage = forks_among(opened_runs), Damage.of(opened.handle.store)
    runs = listing.chosen(opened_runs, choice)

    def rows(more: Callable[[Run], dict[str, Any]]) -> list[dict[str, Any]]:
        described = listing.described(
            runs, lambda run: {**run_json(run, forks.get(run.id, []), damage), **more(run)}
        )
        return listing.by_name(
            described,
            lambda name, error: {"run": name, "status": mark(error), "error": error.summary},
        )

    return Answer(
        lambda: rows(lambda run: {}),  # noqa: ARG005
        lambda: [
            Table(
                _LS,
                rows(lambda run: _for_people(run, damage)),
                none="no run fits" if opened_runs else "no runs yet",
            )
        ],
        damaged=listing.damaged,
    )


def _for_people(run: Run, damage: Damage) -> dict[str, Any]:
    """Return the fields of a row that `--json` has in another form, or does not have."""
    monitors, records = run.manifest.monitors, run.manifest.live()
    values = [one.measured(record.metrics) for one in monitors[:1] for record in records]
    return {"status": ", ".join(_status(run, damage)), "trend": values}


def heard_of(run: Run) -> LastHeard:
    """Return when a run was last heard of."""
    return last_heard(run.manifest, int(clock.time() * 1000))


def _status(run: Run, damage: Damage) -> Iterator[str]:
    """Yield the status of a run, and its problems."""
    if run.manifest.dropped is not None:
        yield "dropped"
        return
    yield run.status
    if heard_of(run).is_overdue:
        yield "overdue"
    if damage.in_run(run.id):
        yield "damaged"
    yield from (one.partition(":")[0] for one in run_remarks(run.manifest))


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
        "last_heard": _heard_json(run),
        "damaged": [f"{run.id}/{ref}" for ref in damage.in_run(run.id)],
        "waited_share": _waited_json(run),
        "failed_saves": failed_saves(decode_plain(latest.meta)) if latest else 0,
        "seed": f"0x{created.seed}" if created else None,
        "config": decode_or_keep(created.config if created else None),
        "config_hash": created.config_hash if created else None,
        "environment": created.environment if created else {},
        "monitors": [{"metric": m.metric, "mode": m.mode} for m in manifest.monitors],
        "checkpoints": len(manifest.live()),
        "superseded": manifest.superseded_count,
        "evicted": manifest.evicted_count,
        "latest": ref(run.id, latest) if latest else None,
        "best": {metric: ref(run.id, best) if best else None for metric, best in bests.items()},
        "best_values": {m: best.metrics[m] if best else None for m, best in bests.items()},
        "best_steps": {metric: best.step if best else None for metric, best in bests.items()},
        "tags": {name: ref(run.id, manifest.by_n[n]) for name, n in sorted(manifest.tags.items())},
        "gates": {pin.name: source(run, pin.checkpoint) for pin in manifest.pins_of("gate")},
        "releases": [pin.name for pin in manifest.pins_of("release")],
        "artifacts": [pin.name for pin in manifest.pins_of("artifact")],
        "streams": {stream.name: stream.count for stream in manifest.streams},
        "pool": len(manifest.roster()),
        "writer": {"host": writer.host, "since": iso(writer.time_ms)} if writer else None,
        "commits": manifest.commits,
        "head": manifest.head,
        "journal": None if backlog is None else asdict(backlog),
    }


@command(writes)
def pivot(
    opened: Registry,
    *,
    run: options.Run,
    name: str = argument("NAME", "Name of the pivot."),
) -> Answer:
    """Change the policy of a run within its phase.

    Stop its trainer before. Resettable streams are archived, and best begins again. The next
    `restore` returns the newest checkpoint, changed by the preset's table. The same name again
    changes nothing.
    """
    found = opened.run(run)
    before, status = len(found.manifest.pivots), found.status
    pivoted = found.phases.pivot(name)
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
def fork(
    opened: Registry,
    *,
    ref: options.Ref,
    name: str | None = _NAME,
    seed: str | None = option("--seed", "N", "Another master seed."),
    config: Path | None = option("--config", "FILE", "Another configuration."),
    preset: str | None = option("--preset", "NAME|FILE", "Another preset."),
) -> Answer:
    """Create a run that continues from a checkpoint, and print its name.

    No data is copied. By default the run has the preset, seed and configuration of its parent.
    """
    run = opened.fork(ref, name, **_options(seed, config, preset))
    return Answer(lambda: run_json(run, []), lambda: [run.id])


@command(writes)
def drop(
    opened: Registry,
    *,
    run: options.Run,
    reason: str = option("--reason", "TEXT", "The reason, for the log.", default=...),
    yes: bool = flag("--yes", "Do not ask."),
) -> Answer:
    """Release everything that a run holds. This cannot be undone.

    Gates and releases are included. On a terminal you must type the name of the run; elsewhere
    --yes is needed.
    """
    dropped = opened.run(run)
    if not yes:
        held = output.counted(len(dropped.manifest.live()), "checkpoint")
        what = f"{run} holds {held}. Released checkpoints cannot be brought back."
        output.confirm_name(run, "drop", what)
    dropped.retention.drop(reason)
    return Answer(lambda: run_json(dropped, None), lambda: [f"dropped: {run}"])


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


def lineage_json(run: Run, forks: list[str] | None) -> dict[str, Any]:
    """Return the parent, forks and phases of a run, and why it was dropped."""
    manifest, parent = run.manifest, parent_of(run)
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


# Arguments


def _options(seed: str | None, config: Path | None, preset: str | None) -> dict[str, Any]:
    given: dict[str, Any] = {}
    if seed is not None:
        given["seed"] = _seed(seed)
    if config is not None:
        given["config"] = _read_config(config)
    if preset is not None:
        given["preset"] = preset
    return given


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
            found=error,
        ) from error
