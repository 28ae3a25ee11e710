"""The common part of both sides of a save: rank 0's and the other ranks'."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from holdfast.registry.saving.collective import agreement
from holdfast.registry.saving.collective.agreement import RankPart
from holdfast.registry.saving.collective.plan import Part, Plan
from holdfast.registry.saving.collective.talk import Calls, Talk
from holdfast.registry.saving.save_request import SaveRequest
from holdfast.registry.writing import StateWriter


@dataclass
class Plans:
    """The plans that this rank remembers, by the name of the state."""

    #: This rank's part, and the digest of the boxes of all ranks.
    parts: dict[str, tuple[str, str, Part]] = field(default_factory=dict)
    whole: dict[str, Plan] = field(default_factory=dict)  # the plans themselves, only on rank 0

    def keys(self, parts: Mapping[str, RankPart]) -> dict[str, str]:
        """Return the digests of the plans that fit this rank's boxes."""
        return {
            name: known[1]
            for name, part in parts.items()
            if (known := self.parts.get(name)) is not None
            and known[0] == agreement.layout_digest(part.layout)
        }

    def part(self, name: str) -> Part:
        """Return this rank's part of a state's plan."""
        return self.parts[name][2]


@dataclass
class Side:
    """One rank's side of a save."""

    writer: StateWriter  # of this rank's handle
    calls: Calls  # the calls of the ranks
    talk: Talk
    plans: Plans  # the plans that this rank remembers
    parts: Mapping[str, RankPart]  # this rank's share of each state
    request: SaveRequest  # the arguments of the save
