"""`preset ls`, `show` and `check`: what runs begin with."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from typing import Annotated, Any

import typer

from registry.cli import options, output
from registry.cli.columns import Column
from registry.errors import NotFound
from registry.presets import load_preset, preset_names
from registry.spec import Retention, RunSpec
from registry.suggest import near

_PHASES = (
    Column("phase"),
    Column("counter"),
    Column("save_every", is_number=True),
    Column("monitors", folds=True),
    Column("keeps", folds=True),
)


def ls(*, json: options.Json = False) -> None:
    """List the presets that come with Holdfast."""
    abouts = {name: load_preset(name).about for name in preset_names()}
    if json:
        output.document([{"name": name, "about": about} for name, about in abouts.items()])
    else:
        output.table((Column("preset"), Column("about", folds=True)), list(abouts.items()))


def show(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Name of a preset.")],
    *,
    json: options.Json = False,
) -> None:
    """Print a preset as TOML, to be copied and changed."""
    if name not in preset_names():
        raise NotFound(
            "no such preset",
            where=name,
            expected=", ".join(preset_names()),
            hint=near(name, preset_names()),
        )
    if json:
        output.document(load_preset(name).to_json())
    else:
        text = files("registry.presets").joinpath(f"{name}.toml").read_text(encoding="utf-8")
        output.line(text.removesuffix("\n"))


def check(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A preset, TOML.")],
    *,
    json: options.Json = False,
) -> None:
    """Check a preset of one's own, and show its phases.

    A warning names what may be a slip: patterns and keys meet a state only when one is saved.
    """
    spec = load_preset(file)
    phases, warnings = _phases(spec), list(_doubts(spec))
    if json:
        shape = {"name": spec.name, "about": spec.about, "phases": phases, "warnings": warnings}
        output.document(shape)
        return
    output.table(_PHASES, [_row(phase) for phase in phases])
    for warning in warnings:
        output.note(f"warning: {warning}")
    output.line(f"ok: {spec.name or file}, {output.counted(len(spec.phases), 'declared phase')}")


def _phases(spec: RunSpec) -> list[dict[str, Any]]:
    """Return the declared phases, or the rules of any phase where none are declared."""
    return [
        {
            "name": phase.name,
            "counter": phase.counter,
            "save_every": phase.save_every,
            "monitors": [f"{one.label}:{one.mode}" for one in phase.monitors],
            "keeps": {one.name: _kept(one.retention) for one in phase.tiers}
            or {"": _kept(phase.retention)},
        }
        for phase in spec.phases or (spec.phase("(any)"),)
    ]


def _kept(retention: Retention | None) -> str:
    if retention is None or retention.all:
        return "all"
    rules = {"last": retention.last, "best": retention.best, "every": retention.every}
    rules["days"] = retention.for_days
    return ", ".join(f"{name} {count}" for name, count in rules.items() if count is not None)


def _row(phase: dict[str, Any]) -> tuple[object, ...]:
    keeps = (f"{tier}: {kept}" if tier else kept for tier, kept in phase["keeps"].items())
    cadence = "-" if phase["save_every"] is None else phase["save_every"]
    return phase["name"], phase["counter"], cadence, ", ".join(phase["monitors"]), "; ".join(keeps)


def _doubts(spec: RunSpec) -> Iterator[str]:
    """Yield what is legal and yet may be a slip."""
    required = [*spec.required_keys, *(key for one in spec.phases for key in one.required_keys)]
    named = {name.strip() for key in required for name in key.split("|")}
    patterns = [("finite", path) for path in spec.finite]
    patterns += [("dtypes", rule.path) for rule in spec.dtypes]
    for field, path in patterns:
        key, slash, _ = path.partition("/")
        if not slash and "*" not in key:
            yield f"{field}: {path!r} matches no path below this key; {f'{path}/*'!r} does"
        yield from _unrequired(field, key, named)
    for field, keys in (("required_keys", named), ("inference", spec.inference)):
        for key in sorted(keys):
            if "/" in key or "*" in key:
                yield f"{field}: {key!r} is a pattern, and top-level keys are meant"
            elif field == "inference":
                yield from _unrequired(field, key, named)


def _unrequired(field: str, key: str, named: set[str]) -> Iterator[str]:
    if named and named.isdisjoint(one.strip() for one in key.split("|")) and "*" not in key:
        meant = near(key, named)
        more = f". {meant}" if meant else ""
        yield f"{field}: no state must have {key!r}, which required_keys leave out{more}"
