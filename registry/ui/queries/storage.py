"""The bytes of a registry: what is on the store, who needs it, what a prune or a gc would free.

The first view lists objects, up to a bound. Counting bytes by run reads every placement, and a dry
run of a collection every log: both are asked for apart. Nothing is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from holdfast.backends import ObjectInfo
from holdfast.registry.errors import InvalidInput
from holdfast.registry.history.epochs import DAY_S
from holdfast.registry.history.retention import Verdict, has_policies
from holdfast.registry.maintenance.gc_report import GcReport
from holdfast.registry.maintenance.usage import RunUsage, Usage
from holdfast.registry.spec import Retention
from holdfast.registry.storage.keys import KINDS
from holdfast.registry.ui.source import Source
from holdfast.registry.values.digest import Digest

#: Objects of each kind that are listed: ten requests on S3.
LISTED = 10_000
#: Steps of the curve of growth.
STEPS = 120
#: Upper bounds of the classes of pack sizes, in bytes.
PACK_SIZES = tuple(2**power for power in (16, 18, 20, 22, 24, 26))
#: Rows of tables; the rest is counted.
SHOWN = 500


@dataclass(frozen=True, slots=True)
class Kind:
    """The objects of one kind, as far as they were listed.

    Attributes:
        name: `packs`, `manifests` or `placements`.
        objects: How many were listed.
        nbytes: Their bytes.
        is_all: Whether these are all.
    """

    name: str
    objects: int
    nbytes: int
    is_all: bool


@dataclass(frozen=True, slots=True)
class PackClass:
    """Packs of similar size.

    Attributes:
        below: They have at most this many bytes; `None` for the largest.
        packs: How many.
        nbytes: Their bytes.
    """

    below: int | None
    packs: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Growth:
    """The bytes that were put until a moment and are still there."""

    time_ms: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class StorageView:
    """What is on the store.

    Attributes:
        kinds: The objects by kind.
        packs: The packs by size; empty classes are left out.
        growth: The listed objects by the time when they were put, oldest first.
    """

    kinds: tuple[Kind, ...]
    packs: tuple[PackClass, ...]
    growth: tuple[Growth, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all listed objects."""
        return sum(kind.nbytes for kind in self.kinds)

    @property
    def is_all(self) -> bool:
        """Whether every object was listed; otherwise it is a sample that chance chose."""
        return all(kind.is_all for kind in self.kinds)


@dataclass(frozen=True, slots=True)
class Counted:
    """The bytes by run.

    Attributes:
        usage: The whole count.
        runs: The runs, those that need most bytes alone first; at most `SHOWN`.
    """

    usage: Usage
    runs: tuple[RunUsage, ...]


@dataclass(frozen=True, slots=True)
class PrunePlan:
    """What a prune of one run would evict.

    Attributes:
        run: The run.
        policy: The policy that was given; `None` for the run's own.
        kept: The checkpoints that stay, newest first; at most `SHOWN`.
        kept_count: How many stay.
        evicted: Those that would go, newest first; at most `SHOWN`.
        evicted_count: How many would go.
        evicted_ids: Their ids.
        evicted_bytes: Bytes of the tensors of those that would go; what they share with others
            stays on the store.
    """

    run: str
    policy: Retention | None
    kept: tuple[Verdict, ...]
    kept_count: int
    evicted: tuple[Verdict, ...]
    evicted_count: int
    evicted_ids: frozenset[Digest]
    evicted_bytes: int


def storage_view(source: Source) -> StorageView:
    """List the objects on the store, at most `LISTED` of each kind.

    Keys begin with digests, so the first ones of a listing are a random sample of all.
    """
    store = source.registry.store

    def listed(kind: str) -> list[ObjectInfo]:
        return list(islice(store.backend.list(f"{kind}/", limit=LISTED + 1), LISTED + 1))

    found = dict(zip(KINDS, store.pools.bulk.map(listed, KINDS), strict=True))
    kinds = [
        Kind(
            kind,
            min(len(infos), LISTED),
            sum(info.size_bytes for info in infos[:LISTED]),
            len(infos) <= LISTED,
        )
        for kind, infos in found.items()
    ]
    objects = [info for infos in found.values() for info in infos[:LISTED]]
    return StorageView(tuple(kinds), _classes(found["packs"][:LISTED]), _growth(objects))


def count_bytes(source: Source) -> Counted:
    """Count the bytes on the store by the runs that need them; reads every log and placement.

    Raises:
        IntegrityError: A file that belongs to no run is damaged or gone.
    """
    usage = source.registry.usage()
    runs = sorted(usage.runs, key=lambda one: (-one.own_bytes, one.run))
    return Counted(usage, tuple(runs[:SHOWN]))


def plan_gc(source: Source, *, grace_s: float = DAY_S) -> GcReport:
    """Return what a collection would delete; reads every log and placement, writes nothing.

    Raises:
        IntegrityError: Something is unreadable or unknown; a collection would delete nothing.
    """
    return source.registry.gc(grace_s=grace_s, dry_run=True)


def plan_prune(source: Source, run_id: str, policy: Retention | None = None) -> PrunePlan:
    """Return what a prune of a run would evict, by the log alone.

    Args:
        source: The registry.
        run_id: The run.
        policy: A policy in place of the run's own.

    Raises:
        NotFound: There is no such run.
        InvalidInput: The run has no policy, and none is given; or it has no monitor, and the best
            are to be kept.
        IntegrityError: Its log is damaged.
    """
    run = source.run(run_id)
    if policy is None and not has_policies(run.spec):
        raise InvalidInput(
            "the run has no retention policy: it keeps everything",
            where=run_id,
            hint="Say how many of the last or best checkpoints to keep.",
        )
    plan = run.prune(policy, dry_run=True)
    return PrunePlan(
        run_id,
        policy,
        plan.kept[::-1][:SHOWN],
        len(plan.kept),
        plan.evicted[::-1][:SHOWN],
        len(plan.evicted),
        frozenset(one.checkpoint.manifest for one in plan.evicted),
        sum(one.checkpoint.size_bytes for one in plan.evicted),
    )


def _classes(packs: Sequence[ObjectInfo]) -> tuple[PackClass, ...]:
    found = []
    for low, high in zip((0, *PACK_SIZES), (*PACK_SIZES, None), strict=True):
        sizes = [
            pack.size_bytes
            for pack in packs
            if low < pack.size_bytes and (high is None or pack.size_bytes <= high)
        ]
        if sizes:
            found.append(PackClass(high, len(sizes), sum(sizes)))
    return tuple(found)


def _growth(objects: Sequence[ObjectInfo]) -> tuple[Growth, ...]:
    """Return the bytes until each of at most `STEPS` moments with equal distances."""
    if not objects:
        return ()
    times = [info.modified_s for info in objects]
    first, last = min(times), max(times)
    width = (last - first) / STEPS or 1.0
    added = [0] * (STEPS + 1)
    for info in objects:
        added[min(STEPS, int((info.modified_s - first) / width))] += info.size_bytes
    points, total = [], 0
    for step, nbytes in enumerate(added):
        total += nbytes
        if nbytes or step == STEPS:
            points.append(Growth(int(1000 * (first + step * width)), total))
    return tuple(points)
