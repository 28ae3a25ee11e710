"""The two sides of a save, rank 0 and the others: what each of them has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from holdfast.registry.collective import agreement
from holdfast.registry.collective.agreement import RankPart
from holdfast.registry.collective.plan import Part, Plan
from holdfast.registry.collective.talk import Calls, Talk
from holdfast.registry.training.save_request import SaveRequest
from holdfast.registry.writing.committer import Committer


@dataclass
class Plans:
    """The plans that this rank remembers, by the name of the state.

    Attributes:
        parts: This rank's part, and the digest of the layouts of all ranks.
        whole: On rank 0 the plan itself.
    """

    parts: dict[str, tuple[str, str, Part]] = field(default_factory=dict)
    whole: dict[str, Plan] = field(default_factory=dict)

    def keys(self, parts: Mapping[str, RankPart]) -> dict[str, str]:
        """Return the digests of the plans that fit this rank's layouts."""
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
    """One save as one rank takes part in it.

    Attributes:
        committer: Of this rank's handle; it chooses keys, and on rank 0 it commits.
        calls: The calls of the ranks.
        talk: This call.
        plans: What this rank remembers.
        parts: The states as this rank has them.
        request: The arguments of the save.
    """

    committer: Committer
    calls: Calls
    talk: Talk
    plans: Plans
    parts: Mapping[str, RankPart]
    request: SaveRequest
