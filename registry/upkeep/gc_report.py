"""The report of a collection."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from holdfast.registry.values import markup, size


@dataclass(frozen=True, slots=True)
class Tally:
    """A number of objects, and their bytes."""

    objects: int = 0
    size_bytes: int = 0

    @classmethod
    def of(cls, sizes: Iterable[int]) -> Tally:
        """Return the tally of objects of these sizes."""
        counted = list(sizes)
        return cls(len(counted), sum(counted))

    def __add__(self, other: Tally) -> Tally:
        """Return the sum of both."""
        return Tally(self.objects + other.objects, self.size_bytes + other.size_bytes)

    def __sub__(self, other: Tally) -> Tally:
        """Return the rest without the other."""
        return Tally(self.objects - other.objects, self.size_bytes - other.size_bytes)


@dataclass(frozen=True, slots=True)
class GcReport:
    """Report of a collection; in a dry run, of the collection that it would be.

    Attributes:
        dry_run: Nothing was written or deleted.
        epoch: The epoch of the sweep; `None` where there was nothing to condemn.
        runs: Number of runs.
        forgotten: The runs that it forgot.
        accepted: The runs whose logs it took as they are, although collections had read other ones.
        full: Whether it read every log from its first slot, and compared it with the notes of
            earlier collections.
        differing: The runs whose notes differed; the logs counted, and new notes replace them.
        hidden_runs: The dropped runs that can be taken back: they hold what they held.
        freed_runs: The dropped runs whose delay has passed: it has freed them.
        keeps: Whether the registry frees nothing that evictions, thinnings and drops release.
        objects: Objects that were there.
        condemned: Objects that no run needed and that were not recent.
        spared: Condemned objects that a run needed after all when it was marked.
        recent: Objects that no run needed, within the grace.
        deleted: Objects that were deleted; several collectors at once may each count an object.
        stale: Snapshots that newer ones have replaced, and files of old probes, deleted too.
        unfinished_bytes: Bytes in files that writers left unfinished when they died.
        keeps_versions: Whether the store keeps deleted objects as noncurrent versions; `None` where
            it does not say.
    """

    dry_run: bool
    epoch: int | None
    runs: int
    forgotten: tuple[str, ...]
    accepted: tuple[str, ...]
    full: bool
    differing: tuple[str, ...]
    hidden_runs: tuple[str, ...]
    freed_runs: tuple[str, ...]
    keeps: bool
    objects: Tally
    condemned: Tally
    spared: Tally
    recent: Tally
    deleted: Tally
    stale: Tally
    unfinished_bytes: int
    keeps_versions: bool | None

    def _repr_html_(self) -> str:
        return markup.safely("Collection", self._html)

    def _html(self) -> str:
        kinds = ["objects", "condemned", "spared", "recent", "deleted", "stale"]
        counted = [(kind, getattr(self, kind)) for kind in kinds]
        facts = {
            "runs": self.runs,
            "epoch": self.epoch,
            "unfinished files": size(self.unfinished_bytes),
            "freed": size(self.freed_bytes),
        }
        rows = [(kind, one.objects, size(one.size_bytes)) for kind, one in counted]
        table = markup.Rows(("kind", "objects", "size"), rows, len(rows), "kinds")
        return markup.describe("Collection", "dry run" if self.dry_run else "done", facts, table)

    def before(self, later: GcReport) -> GcReport:
        """Return one report of this collection and of the one that continued it."""
        return replace(
            later,
            epoch=self.epoch if later.epoch is None else later.epoch,
            forgotten=self.forgotten,
            differing=self.differing or later.differing,
            freed_runs=self.freed_runs,
            objects=self.objects,
            condemned=self.condemned + later.condemned,
            spared=self.spared + later.spared,
            deleted=self.deleted + later.deleted,
            stale=self.stale + later.stale,
            unfinished_bytes=self.unfinished_bytes + later.unfinished_bytes,
        )

    @property
    def freed_bytes(self) -> int:
        """Bytes that the store does not list any more; 0 in a dry run."""
        if self.dry_run:
            return 0
        return self.deleted.size_bytes + self.stale.size_bytes + self.unfinished_bytes

    @property
    def noncurrent_bytes(self) -> int | None:
        """Freed bytes that the store keeps as noncurrent versions; `None` where it is unknown."""
        if self.keeps_versions is None:
            return None
        if not self.keeps_versions or self.dry_run:
            return 0
        return self.deleted.size_bytes + self.stale.size_bytes
