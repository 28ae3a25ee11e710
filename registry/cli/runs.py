"""`run create`, `ls`, `set`, `pivot` and `rm`."""

from __future__ import annotations

import json as json_module
import runpy
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import typer

from holdfast.registry.cli import completing, options, output
from holdfast.registry.cli.command import Answer, answer_of, command
from holdfast.registry.cli.describe import picked
from holdfast.registry.cli.opening import writes
from holdfast.registry.cli.options import argument, flag, option
from holdfast.registry.cli.run_listing import run_json
from holdfast.registry.errors import InvalidInput
from holdfast.registry.face import Registry
from holdfast.registry.history.actions import RunStatus
from holdfast.registry.spec import Retention
from holdfast.registry.spec.presets import load_preset
from holdfast.registry.values import duration

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
    asked = {
        "input_hash": input_hash or None,
        "owner": owner or None,
        "project": project or None,
        "labels": label or None,
        "seed": None if seed is None else _seed(seed),
        "config": None if config is None else _read_config(config),
        "preset": preset,
        "overrides": _overrides(overrides or ()) or None,
        "total_steps": total_steps,
        "monitor": [options.monitor(text) for text in monitor or ()] or None,
        "retention": options.retention(last, best, every, days, thin),
    }
    given: dict[str, Any] = {name: one for name, one in asked.items() if one is not None}
    if "retention" in given and source is None:
        _check_best(given["retention"], preset, monitor)
    run = opened.create_run(name, **given) if source is None else opened.fork(source, name, **given)
    return Answer(lambda: run_json(run, []), lambda: [run.id])


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
        said = f"labels {', '.join(found.manifest.labels_now) or 'none'}"
    elif versions is not None and migration is not None:
        path, _, name = migration.rpartition(":")
        migrate = runpy.run_path(path).get(name) if path else None
        if not callable(migrate):
            raise typer.BadParameter(f"{migration!r} is not FILE:NAME of a function in a file")
        pair = versions.partition(":")
        if not all(pair):
            raise typer.BadParameter(f"{versions!r} is not of the form FROM:TO, as in 1:2")
        before, after = (int(one) if one.isdigit() else one for one in pair[::2])
        found.phases.raise_version(before, after, migrate)
        said = f"schema version {after}"
    else:
        found.status = cast("RunStatus", status)
        said = str(status)
    return Answer(lambda: run_json(found, None), lambda: [f"{run}: {said}"])


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
    is_new, ref = len(found.manifest.pivots) > before, pivoted.checkpoint.ref
    at_once = f"pivoted: {run} at {ref}"
    again = f"{run} pivoted to {name} before: nothing was changed"
    changes = [picked(one, "part change to") for one in pivoted.report]
    about = {"from": ref, "id": pivoted.checkpoint.digest, "rows": changes}
    shape = {"run": run, "pivot": name, "new": is_new, **about}
    return answer_of(shape, at_once if is_new else again)


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
    said = "the next gc after the grace deletes what no other run needs"
    if not now:
        said = f"for {duration(opened.drop_rules().delay_s)} `holdfast undo {run}` brings it back"
    return Answer(lambda: run_json(dropped, None), lambda: [f"dropped: {run}; {said}"])


# Arguments


def _overrides(texts: Iterable[str]) -> dict[str, object]:
    """Return the values of a preset that are set, each read as JSON or else as text."""
    found: dict[str, object] = {}
    for text in texts:
        path, equals, value = text.partition("=")
        if not equals:
            raise typer.BadParameter(f"{text!r} has no value; write {text}=VALUE")
        if path in found:
            raise typer.BadParameter(f"{path!r} is given twice")
        try:
            found[path] = json_module.loads(value)
        except (ValueError, RecursionError):
            found[path] = value
    return found


def _check_best(retention: Retention, preset: str | None, monitor: list[str] | None) -> None:
    """Refuse to keep the best checkpoints of a run without a monitor."""
    spec = load_preset(preset) if preset else None
    if retention.best and not monitor and not (spec and (spec.monitors or spec.phases)):
        raise InvalidInput(
            "the best are to be kept, and no metric says which they are",
            where=f"--best {retention.best}",
            hint="Add --monitor loss:min, or another METRIC:min or METRIC:max.",
        )


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
        return json_module.loads(text, object_pairs_hook=options.distinct)
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidInput(
            "the configuration cannot be read",
            where=path,
            expected="a file of JSON, or of TOML where its name ends in .toml",
            found=getattr(error, "strerror", None) or error,
        ) from error
