"""`preset ls`, `show` and `check`: the settings that runs are created with."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from typing import Any

from holdfast.registry.cli import output
from holdfast.registry.cli.columns import Column, Table, numbers
from holdfast.registry.cli.command import Answer, command, listed
from holdfast.registry.cli.options import argument
from holdfast.registry.cli.output import Note
from holdfast.registry.errors import NotFound
from holdfast.registry.spec import Retention, RunSpec, doubts
from holdfast.registry.spec.presets import load_preset, preset_names
from holdfast.registry.values import near

_PRESETS = (
    Column("preset", "name"),
    Column("about", folds=True),
)
_PHASES = (
    Column("phase", "name"),
    Column("counter", drop=1),
    *numbers("save_every", none="-", drop=2),
    Column("monitors", text=", ".join, folds=True),
    Column("keeps", text=lambda keeps: "; ".join(_tiers(keeps)), folds=True),
)


@command(table=True)
def ls() -> Answer:
    """List the presets that come with Holdfast."""
    presets = [{"name": name, "about": load_preset(name).about} for name in preset_names()]
    return listed(_PRESETS, presets, dict)


@command()
def show(*, name: str = argument("NAME", "Name of a preset.")) -> Answer:
    """Print a preset as TOML, to copy and change."""
    if name not in preset_names():
        raise NotFound(
            "no such preset",
            where=name,
            expected=", ".join(preset_names()),
            hint=near(name, preset_names()),
        )
    file = files("holdfast.registry.spec.presets").joinpath(f"{name}.toml")
    return Answer(
        lambda: load_preset(name).to_json(),
        lambda: [file.read_text(encoding="utf-8").removesuffix("\n")],
    )


@command(table=True)
def check(*, file: str = argument("FILE", "A preset, TOML.")) -> Answer:
    """Check a preset of your own, and show its phases.

    A warning names a possible mistake: patterns and keys are compared with a state only when one is
    saved.
    """
    spec = load_preset(file)
    phases, warnings = _phases(spec), list(doubts(spec))
    declared = output.counted(len(spec.phases), "declared phase")
    return Answer(
        lambda: {"name": spec.name, "about": spec.about, "phases": phases, "warnings": warnings},
        lambda: [
            Table(_PHASES, phases),
            *(Note(f"warning: {warning}") for warning in warnings),
            f"ok: {spec.name or file}, {declared}",
        ],
    )


def _phases(spec: RunSpec) -> list[dict[str, Any]]:
    """Return the declared phases, or the rules of any phase if none are declared."""
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


def _tiers(keeps: dict[str, str]) -> Iterator[str]:
    return (f"{tier}: {kept}" if tier else kept for tier, kept in keeps.items())


def _kept(retention: Retention | None) -> str:
    if retention is None or retention.all:
        return "all"
    rules = {"last": retention.last, "best": retention.best, "every": retention.every}
    rules["days"] = retention.for_days
    return ", ".join(f"{name} {count}" for name, count in rules.items() if count is not None)
