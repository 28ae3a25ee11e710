"""The table of layouts: a new layout is one module of this room and one name here."""

from __future__ import annotations

from importlib import import_module
from typing import Final, cast

from holdfast.registry.errors import InvalidInput
from holdfast.registry.layouts.tree import Layout
from holdfast.registry.spec import Retention, RunSpec
from holdfast.registry.values import near

LAYOUTS: Final = ("hydra", "adr004", "andrea", "thalia", "cobre", "hf")
NAMES: Final = ", ".join(LAYOUTS)


def layout_named(name: str) -> Layout:
    """Return a layout."""
    if name not in LAYOUTS:
        raise InvalidInput("no such layout", where=name, expected=NAMES, hint=near(name, LAYOUTS))
    return cast("Layout", import_module(f"{__package__}.{name}"))


def import_spec(name: str) -> RunSpec:
    """Return the specification of a run that an import creates: the preset, but nothing is evicted.

    A folder may hold more checkpoints than its system would keep; an import must not lose them. Nor
    does the pool grow by itself: the folder has its models.
    """
    spec = layout_named(name).spec()
    keeps = Retention(all=True)
    phases = tuple(
        phase.changed(
            retention=None,
            tiers=tuple(tier.changed(retention=keeps) for tier in phase.tiers),
        )
        for phase in spec.phases
    )
    pool = spec.pool and spec.pool.changed(promote_on_save=False)
    return spec.changed(phases=phases, retention=None, pool=pool)
