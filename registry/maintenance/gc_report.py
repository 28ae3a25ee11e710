"""What a collection means to do, and what it did."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from holdfast.backends import ObjectInfo
from holdfast.registry.storage.keys import ObjectKey


@dataclass(frozen=True, slots=True)
class Tally:
    """How many objects, and how much they take."""

    objects: int = 0
    size_bytes: int = 0

    @classmethod
    def of(cls, sizes: Iterable[int]) -> Tally:
        """Return the tally of objects of these sizes."""
        counted = list(sizes)
        return cls(len(counted), sum(counted))

    def __add__(self, other: Tally) -> Tally:
        """Return both together."""
        return Tally(self.objects + other.objects, self.size_bytes + other.size_bytes)


@dataclass(frozen=True)
class Plan:
    """What a collector would condemn.

    Attributes:
        candidates: Objects that no run needs and grace does not keep, with their sizes.
        recent: Objects that no run needs and grace keeps.
        objects: All objects.
        runs: Runs looked at.
        stale: Snapshots that newer ones have replaced, and files of dead probes.
    """

    candidates: Mapping[ObjectKey, int]
    recent: Tally
    objects: Tally
    runs: int
    stale: tuple[ObjectInfo, ...]


@dataclass(frozen=True, slots=True)
class GcReport:
    """What a collection did, or in a dry run would have done.

    Attributes:
        dry_run: Nothing was written or deleted.
        epoch: The sweep; `None` where there was nothing to condemn.
        runs: Runs looked at.
        objects: Objects that were there.
        condemned: Those that no run needed and grace did not keep.
        spared: Those of the condemned that a run turned out to need when it was marked.
        recent: Those that no run needed and grace kept.
        deleted: Those that were deleted; several collectors at once may each count an object.
        stale: Snapshots that newer ones have replaced, and files of dead probes, deleted too.
        unfinished_bytes: Bytes that writers which died had left unfinished.
        keeps_versions: Whether the store keeps what was deleted as noncurrent versions; `None`
            where it does not say.
    """

    dry_run: bool
    epoch: int | None
    runs: int
    objects: Tally
    condemned: Tally
    spared: Tally
    recent: Tally
    deleted: Tally
    stale: Tally
    unfinished_bytes: int
    keeps_versions: bool | None

    def before(self, later: GcReport) -> GcReport:
        """Return this collection and the one that went on from it as one."""
        return replace(
            later,
            epoch=self.epoch if later.epoch is None else later.epoch,
            objects=self.objects,
            condemned=self.condemned + later.condemned,
            spared=self.spared + later.spared,
            deleted=self.deleted + later.deleted,
            stale=self.stale + later.stale,
            unfinished_bytes=self.unfinished_bytes + later.unfinished_bytes,
        )

    @property
    def freed_bytes(self) -> int:
        """Bytes that the store does not list any more; of a dry run none."""
        if self.dry_run:
            return 0
        return self.deleted.size_bytes + self.stale.size_bytes + self.unfinished_bytes

    @property
    def noncurrent_bytes(self) -> int | None:
        """Bytes of them that remain as noncurrent versions; `None` where the store is silent."""
        if self.keeps_versions is None:
            return None
        if not self.keeps_versions or self.dry_run:
            return 0
        return self.deleted.size_bytes + self.stale.size_bytes
