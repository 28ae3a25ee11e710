"""`run create`, `run ls`, `run show` and `log`: runs and their history."""

from __future__ import annotations

import json as json_module
import tomllib
from pathlib import Path
from typing import Annotated, Any

import typer

from registry.actions import Commit
from registry.cli import describe, options, output
from registry.cli.output import Column
from registry.digest import Digest
from registry.errors import InvalidInput
from registry.monitors import Monitor
from registry.registry import open  # noqa: A004
from registry.run import Run

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Begin and look at runs.")

_LS = (
    Column("run"),
    Column("status"),
    Column("checkpoints", is_number=True),
    Column("latest"),
    Column("age", is_number=True),
)
_LOG = (
    Column("n", is_number=True),
    Column("time"),
    Column("author", folds=True),
    Column("what", folds=True),
)


@app.command("create")
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
    json: options.Json = False,
) -> None:
    """Begin a run and print its name."""
    monitors = [_monitor(text) for text in monitor or ()]
    number = None if seed is None else _seed(seed)
    with open(registry) as opened:
        run = opened.create_run(
            name,
            config=None if config is None else _read_config(config),
            seed=number,
            monitor=monitors,
        )
        if json:
            output.document(describe.run_json(run))
            return
    output.line(run.id)


@app.command("ls")
def ls(registry: options.Registry, *, json: options.Json = False) -> None:
    """List the runs, by name."""
    with open(registry, read_only=True) as opened:
        runs = [opened.run(name) for name in opened.runs()]
        if json:
            output.document([describe.run_json(run) for run in runs])
        elif runs:
            output.table(_LS, [_row(run) for run in runs])
        else:
            output.note("no runs yet")


def _row(run: Run) -> tuple[object, ...]:
    latest = run.latest()
    return (
        run.id,
        run.status,
        len(run.manifest.live()),
        latest.ref.removeprefix(f"{run.id}/") if latest else "-",
        output.age(describe.when(run.manifest.created_ms)),
    )


@app.command("show")
def show(run: options.Run, registry: options.Registry, *, json: options.Json = False) -> None:
    """Show a run: how it began and how it stands."""
    with open(registry, read_only=True) as opened:
        opened_run = opened.run(run)
        shape = describe.run_json(opened_run)
    if json:
        output.document(shape)
        return
    shape["created"] = output.time(describe.when(opened_run.manifest.created_ms))
    output.fields({name: _told(shape[name]) for name in shape if name not in _APART})
    for name in _APART:
        if shape[name]:
            output.line(f"\n{name}")
            output.fields({f"  {key}": _told(value) for key, value in _items(shape[name])})


#: Parts of a run that are shown under a heading of their own.
_APART = ("config", "environment", "tags")


def _items(value: object) -> list[tuple[str, object]]:
    if isinstance(value, dict):
        return [(str(key), item) for key, item in value.items()]
    return [("value", value)]


def _told(value: Any) -> object:
    match value:
        case Digest():
            return value.hex()
        case {"host": host, "since": since}:
            return f"{host} since {since}"
        case [{"metric": _, "mode": _}, *_]:
            return ", ".join(f"{monitor['metric']}:{monitor['mode']}" for monitor in value)
        case dict():
            return ", ".join(f"{key}: {_told(item)}" for key, item in value.items())
        case [] | None:
            return None
    return value


def log(
    run: options.Run,
    registry: options.Registry,
    *,
    limit: Annotated[
        int | None, typer.Option("-n", min=1, metavar="COUNT", help="At most so many commits.")
    ] = None,
    json: options.Json = False,
) -> None:
    """Show the history of a run, newest first."""
    with open(registry, read_only=True) as opened:
        opened_run = opened.run(run)
        manifest = opened_run.manifest
        commits = list(opened_run.history())[::-1][:limit]
    if json:
        output.document([describe.commit_json(commit) for commit in commits])
        return
    refs = {record.n: describe.ref("", record)[1:] for record in manifest.checkpoints}
    output.table(_LOG, [_commit_row(commit, refs) for commit in commits])


def _commit_row(commit: Commit, refs: dict[int, str]) -> tuple[object, ...]:
    what = "; ".join(_say(action.model_dump(), refs, commit.n) for action in commit.actions)
    return (commit.n, output.time(describe.when(commit.time_ms)), commit.author, what)


def _say(action: dict[str, Any], refs: dict[int, str], n: int) -> str:
    """Return an action in words."""
    match action:
        case {"action": "run.create"}:
            return "begin the run"
        case {"action": "run.status", "status": status}:
            return f"status {status}"
        case {"action": "run.take_over", "host": host}:
            return f"{host} trains from here"
        case {"action": "run.rewind", "to": to}:
            return f"go back to {refs[to]}" if to is not None else "go back to the beginning"
        case {"action": "checkpoint.add", "manifest": digest, "metrics": metrics}:
            return f"save {refs[n]} {digest.short} {output.metrics(metrics)}".rstrip()
        case {"action": "checkpoint.report", "checkpoint": of, "metrics": metrics}:
            return f"report {refs[of]} {output.metrics(metrics)}"
        case {"action": "tag.set", "name": name, "checkpoint": of}:
            return f"tag {name} at {refs[of]}"
    rest = {key: value for key, value in action.items() if key != "action"}
    return f"{action['action']} {rest}"


# Arguments


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
