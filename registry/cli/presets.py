"""`preset`: the settings that runs are created with."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from holdfast.registry.cli import completing, output
from holdfast.registry.cli.columns import Column, Table, numbers
from holdfast.registry.cli.command import Answer, command, listed
from holdfast.registry.cli.options import argument
from holdfast.registry.cli.output import Note
from holdfast.registry.spec import Phase, Retention, RunSpec, doubts
from holdfast.registry.spec.presets import GENERAL, load_preset, preset_names


def tiers_text(keeps: Mapping[str, str]) -> str:
    """Return the retention of a phase as one text."""
    return "; ".join(f"{tier}: {rules}" if tier else rules for tier, rules in keeps.items())


_PRESETS = (Column("preset", "name"), Column("for"), Column("about", folds=True))
_PHASES = (
    Column("phase", "name"),
    Column("counter", drop=1),
    *numbers("save_every", none="-", drop=2),
    Column("monitors", text=", ".join, folds=True),
    Column("keeps", text=tiers_text, folds=True),
)


@command(table=True)
def preset(
    *,
    name: str | None = argument(
        "NAME|FILE",
        "A preset, or a TOML file of yours.",
        default=None,
        autocompletion=completing.PRESETS,
    ),
) -> Answer:
    """List the presets, print one to copy and change, or check your own.

    Of a file of yours it shows the phases. A warning names a possible mistake: patterns and keys
    are compared with a state only when one is saved.
    """
    if name is None:
        return listed(_PRESETS, [_about(one) for one in preset_names()], dict)
    spec = load_preset(name)
    if name in preset_names():
        file = files("holdfast.registry.spec.presets").joinpath(f"{name}.toml")
        text = file.read_text(encoding="utf-8").removesuffix("\n")
        return Answer(spec.to_json, lambda: [text])
    phases, warnings = _phases(spec), list(doubts(spec))
    declared = output.counted(len(spec.phases), "declared phase")
    return Answer(
        lambda: {"name": spec.name, "about": spec.about, "phases": phases, "warnings": warnings},
        lambda: [
            Table(_PHASES, phases),
            *(Note(f"warning: {warning}") for warning in warnings),
            f"ok: {spec.name or name}, {declared}",
        ],
    )


def _about(name: str) -> dict[str, Any]:
    is_for = "any" if name in GENERAL else "one system"
    return {"name": name, "for": is_for, "about": load_preset(name).about}


def _phases(spec: RunSpec) -> list[dict[str, Any]]:
    """Return the declared phases, or the rules of any phase if none are declared."""
    return [
        {
            "name": phase.name,
            "counter": phase.counter,
            "save_every": phase.save_every,
            "monitors": [f"{one.label}:{one.mode}" for one in phase.monitors],
            "keeps": kept(phase),
        }
        for phase in spec.phases or (spec.phase("(any)"),)
    ]


def kept(phase: Phase) -> dict[str, str]:
    """Return the retention of a phase in words: by tier, or under `""` if it has no tiers."""
    tiers = {one.name: _kept(one.retention) for one in phase.tiers}
    return tiers or {"": _kept(phase.retention)}


def _kept(retention: Retention | None) -> str:
    if retention is None or retention.all:
        return "all"
    rules = {"last": retention.last, "best": retention.best, "every": retention.every}
    rules["days"] = retention.for_days
    words = [f"{name} {count}" for name, count in rules.items() if count is not None]
    if retention.then is not None:
        words.append(f"of the others {' and '.join(retention.then)}")
    return ", ".join(words)
