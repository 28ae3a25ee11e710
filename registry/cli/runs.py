"""`run create`, `ls`, `show`, `fork` and `drop`."""

from __future__ import annotations

import json as json_module
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from backends.escape import shown
from registry.cli import describe, lineage, options, output
from registry.cli.columns import Column
from registry.cli.listing import Listing, mark
from registry.creation import RunOptions
from registry.digest import Digest
from registry.errors import InvalidInput, RegistryError
from registry.monitors import Monitor
from registry.presets import load_preset
from registry.registry import open  # noqa: A004
from registry.run import Run
from registry.spec import Retention

_T = TypeVar("_T")


_LS = (
    Column("run"),
    Column("status"),
    Column("phase"),
    Column("checkpoints", is_number=True),
    Column("latest"),
    Column("age", is_number=True),
)
#: What `--keep` says, by the field of a policy that it becomes.
_KEEP = {"last": "last", "best": "best", "every": "every", "days": "for_days"}


def create(
    registry: options.Registry,
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Its name; date, time and seed without.")
    ] = None,
    *,
    seed: Annotated[
        str | None,
        typer.Option("--seed", metavar="N", help="Master seed, decimal or 0x...; random without."),
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", help="Configuration, JSON or TOML.")
    ] = None,
    monitor: Annotated[
        list[str] | None,
        typer.Option("--monitor", metavar="METRIC:MODE", help="Decides best; mode min or max."),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option("--preset", metavar="NAME|FILE", help="What the run is to be."),
    ] = None,
    keep: Annotated[
        list[str] | None,
        typer.Option("--keep", metavar="RULE", help="last=N, best=N, every=N or days=N; any of."),
    ] = None,
    json: options.Json = False,
) -> None:
    """Begin a run and print its name.

    Without --preset and --keep it keeps every checkpoint. A checkpoint stays that any --keep keeps.
    """
    given = _options(seed, config, preset)
    if monitor:
        given["monitor"] = [_monitor(text) for text in monitor]
    if keep:
        given["retention"] = kept = _retention(keep)
        _check_best(kept, preset, monitor)
    with open(registry) as opened:
        run = opened.create_run(name, **given)
        if json:
            output.document(_shape(run, []))
            return
    output.line(run.id)


def ls(registry: options.Registry, *, json: options.Json = False) -> None:
    """List the runs, by name."""
    with open(registry, read_only=True) as opened:
        listing = Listing(opened)
        runs = listing.runs()
        forks = lineage.forks_among(runs)
        if json:
            shapes = listing.told(runs, lambda run: _shape(run, forks.get(run.id, [])))
            gone = {name: _damaged_json(name, error) for name, error in listing.damaged.items()}
            output.document(_by_name(shapes | gone))
        else:
            rows = listing.told(runs, _row)
            for name, error in listing.damaged.items():
                rows[name] = (name, mark(error), "-", "-", "-", "-")
            if rows:
                output.table(_LS, _by_name(rows))
            else:
                output.note("no runs yet")
        listing.finish()


def _by_name(told: Mapping[str, _T]) -> list[_T]:
    return [told[name] for name in sorted(told)]


def _damaged_json(name: str, error: RegistryError) -> dict[str, Any]:
    return {"run": name, "status": mark(error), "error": error.summary}


def _row(run: Run) -> tuple[object, ...]:
    latest = run.latest()
    return (
        run.id,
        run.status if run.manifest.dropped is None else "dropped",
        "-" if run.phase is None else run.phase,
        len(run.manifest.live()),
        latest.ref.removeprefix(f"{run.id}/") if latest else "-",
        output.age(run.manifest.created_ms),
    )


def show(run: options.Run, registry: options.Registry, *, json: options.Json = False) -> None:
    """Show a run: how it began and how it stands."""
    with open(registry, read_only=True) as opened:
        opened_run = opened.run(run)
        shape = _shape(opened_run, lineage.forks_of(opened.store, run))
    if json:
        output.document(shape)
        return
    shape["created"] = output.time(opened_run.manifest.created_ms)
    output.fields({name: _told(shape[name]) for name in shape if name not in _APART})
    for name in _APART:
        if shape[name]:
            output.line(f"\n{name}")
            output.fields({f"  {key}": _told(value) for key, value in _items(shape[name])})


def _shape(run: Run, forks: list[str]) -> dict[str, Any]:
    """Return a run with where it comes from, that after its status."""
    shape = describe.run_json(run)
    head = {name: shape.pop(name) for name in ("run", "status")}
    return {**head, **lineage.lineage_json(run, forks), **shape}


#: Parts of a run that are shown under a heading of their own.
_APART = ("config", "environment", "tags")


def _items(value: object) -> list[tuple[str, object]]:
    if isinstance(value, dict):
        return [(shown(key), item) for key, item in value.items()]
    return [("value", value)]


def _told(value: Any) -> object:
    match value:
        case Digest():
            return value.hex()
        case {"host": host, "since": since}:
            return f"{host} since {since}"
        case {"run": _, "commit": n, "ref": ref}:
            return f"{ref}, commit {n}"
        case [{"phase": _, "from": _}, *_]:
            return ", ".join(_told_phase(phase) for phase in value)
        case [{"metric": _, "mode": _}, *_]:
            return ", ".join(f"{monitor['metric']}:{monitor['mode']}" for monitor in value)
        case [str(), *_]:
            return ", ".join(map(shown, value))
        case dict():
            return ", ".join(f"{shown(key)}: {shown(_told(item))}" for key, item in value.items())
        case [] | None:
            return None
    return value


def _told_phase(phase: dict[str, Any]) -> str:
    return f"{phase['from']} to {phase['phase']}{' (superseded)' * phase['superseded']}"


def fork(
    ref: options.Ref,
    registry: options.Registry,
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Its name; date, time and seed without.")
    ] = None,
    *,
    seed: Annotated[
        str | None, typer.Option("--seed", metavar="N", help="Another master seed.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", help="Another configuration.")
    ] = None,
    preset: Annotated[
        str | None, typer.Option("--preset", metavar="NAME|FILE", help="Another preset.")
    ] = None,
    json: options.Json = False,
) -> None:
    """Begin a run that goes on from a checkpoint, and print its name. No data is copied.

    Preset, seed and configuration are those of the run that it comes from, where no others are
    given.
    """
    given = _options(seed, config, preset)
    with open(registry) as opened:
        run = opened.fork(ref, name, **given)
        if json:
            output.document(_shape(run, []))
            return
    output.line(run.id)


def drop(
    run: options.Run,
    registry: options.Registry,
    *,
    reason: Annotated[str, typer.Option("--reason", metavar="TEXT", help="Why, for the log.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    json: options.Json = False,
) -> None:
    """Release everything that a run holds, gates and releases included. Cannot be undone.

    On a terminal the run's name must be typed; elsewhere --yes is needed.
    """
    with open(registry) as opened:
        dropped = opened.run(run)
        if not yes:
            _confirm(dropped)
        dropped.drop(reason)
        if json:
            output.document(_shape(dropped, lineage.forks_of(opened.store, run)))
            return
    output.line(f"dropped: {run}")


def _confirm(run: Run) -> None:
    """Let a person type the name of what goes.

    Raises:
        InvalidInput: Another name was typed.
    """
    if not sys.stdin.isatty():
        raise typer.BadParameter("nobody can be asked here: say --yes to drop the run")
    held = output.counted(len(run.manifest.live()), "checkpoint")
    output.note(f"{run.id} holds {held}. What is released cannot be brought back.")
    typed = typer.prompt("Type the name of the run to drop it", err=True)
    if typed != run.id:
        raise InvalidInput(
            "nothing was dropped: another name was typed", expected=run.id, found=typed
        )


# Arguments


def _options(seed: str | None, config: Path | None, preset: str | None) -> RunOptions:
    given: RunOptions = {}
    if seed is not None:
        given["seed"] = _seed(seed)
    if config is not None:
        given["config"] = _read_config(config)
    if preset is not None:
        given["preset"] = preset
    return given


def _retention(texts: Sequence[str]) -> Retention:
    given = options.pairs(texts)
    for name, value in given.items():
        if name not in _KEEP or not value.isdecimal() or int(value) < 1:
            raise typer.BadParameter(
                f"{name}={value!r} is none of last=N, best=N, every=N, days=N, N from 1"
            )
    return Retention(**{_KEEP[name]: int(value) for name, value in given.items()})


def _check_best(retention: Retention, preset: str | None, monitor: list[str] | None) -> None:
    """Refuse to keep the best where nothing says which they are.

    Raises:
        InvalidInput: There is no monitor, neither given nor of the preset.
    """
    spec = load_preset(preset) if preset else None
    if retention.best and not monitor and not (spec and (spec.monitors or spec.phases)):
        raise InvalidInput(
            "the best are to be kept, and no metric says which they are",
            where=f"--keep best={retention.best}",
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
