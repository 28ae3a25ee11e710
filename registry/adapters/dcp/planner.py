"""The state that a save planner was given: nested with ours, flattened with torch's."""

from __future__ import annotations

import logging
from typing import Any, NoReturn

from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem

from holdfast.registry.errors import InvalidInput

_LOGGER = logging.getLogger("holdfast")
_OURS = "Pass planner=holdfast.dcp.HoldfastSavePlanner()."
#: Methods by which a planner changes what is saved.
_CHANGING = ("set_up_planner", "lookup_object", "transform_object", "resolve_data")


class HoldfastMeta(StorageMeta):
    """Tells a planner that a `HoldfastWriter` writes."""


class HoldfastSavePlanner(SavePlanner):
    """Keeps the nested state for `HoldfastWriter`, so that the id is that of `run.save`.

    It plans nothing: the ranks of a run plan for themselves, once for a layout. With another
    storage writer it is refused.

    Attributes:
        state_dict: The state of the running save.
    """

    state_dict: dict[str, Any]

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Keep the state.

        Raises:
            InvalidInput: Another storage writer writes; it would write nothing.
        """
        if not isinstance(storage_meta, HoldfastMeta):
            raise InvalidInput(
                "this planner is for HoldfastWriter alone",
                where="planner",
                hint="Save with storage_writer=holdfast.dcp.HoldfastWriter(...), or without it.",
            )
        self.state_dict = state_dict

    def create_local_plan(self) -> SavePlan:
        """Return an empty plan."""
        return SavePlan([])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Return the plans, and a description that the writer completes."""
        return all_plans, Metadata({})

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Return the plan, and change nothing."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> NoReturn:
        """Refuse: no plan of this planner has an item."""
        raise InvalidInput("this planner plans nothing", found=write_item.index.fqn)


def state_of(planner: SavePlanner) -> dict[str, Any]:
    """Return the state that a planner was given."""
    if isinstance(planner, HoldfastSavePlanner):
        return planner.state_dict
    if not isinstance(planner, DefaultSavePlanner) or _changes(planner):
        raise InvalidInput(
            "this planner changes the saved state, but a run saves the state itself",
            where="planner",
            found=type(planner).__qualname__,
            hint=f"{_OURS[:-1]}, and change the state before the save.",
        )
    if not planner.flatten_state_dict:
        return planner.state_dict
    if planner.is_coordinator:  # one rank of a job says it
        _LOGGER.warning(
            "torch's DefaultSavePlanner flattens a state: empty dicts are lost, integer keys "
            "become strings, and every dict a plain one; the id is the remaining state's. %s",
            _OURS,
        )
    nested: dict[str, Any] = unflatten_state_dict(planner.state_dict, planner.mappings)
    return nested


def _changes(planner: SavePlanner) -> bool:
    kind = type(planner)
    return any(getattr(kind, one) is not getattr(DefaultSavePlanner, one) for one in _CHANGING)
