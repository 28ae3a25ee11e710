"""A checkpoint whose chunks another one can share: its place, manifest and placement."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.registry.history.actions import Place
from holdfast.registry.storage.manifest import Manifest
from holdfast.registry.storage.placement import Placement
from holdfast.registry.values.digest import Digest


@dataclass(frozen=True, slots=True)
class PlacedState:
    """A placed checkpoint whose chunks need not be stored again.

    Attributes:
        place: Where its manifest and placement lie.
        manifest: What it is.
        placement: Where its chunks lie.
        lists: The bytes of its stored digest lists.
    """

    place: Place
    manifest: Manifest
    placement: Placement
    lists: Mapping[Digest, bytes]
