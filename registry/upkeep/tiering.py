"""Move the packs of states to another storage class of their bucket, and ask for archived ones.

Key and bytes of a pack stay, so no log, id or placement changes. Only packs are moved: logs,
manifests and placements are small, and every reader needs them. Specified in docs/spec.md,
section 45.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

from holdfast.registry.errors import InvalidInput, ObjectNotFound, RegistryError
from holdfast.registry.history.actions import Place
from holdfast.registry.history.replay import RunManifest
from holdfast.registry.objects import ObjectKey, PackRef, Placement
from holdfast.registry.store import Outcome, Store, Workers, in_batches
from holdfast.registry.upkeep.live import held_place
from holdfast.registry.upkeep.repacking.survey import read_placement, read_runs
from holdfast.registry.values import Digest

#: The states of runs by their manifests; `None`: all that the run holds.
Chosen = Mapping[str, Collection[Digest] | None]


@dataclass(frozen=True, slots=True)
class TierReport:
    """The packs of some states that were moved, or asked for.

    Attributes:
        storage_class: Where they were moved; `None` if archived ones were asked for.
        packs: Packs that were moved, or asked for; that would be, in a dry run.
        bytes: Their bytes.
        kept_packs: Packs that were not archived, since another state needs them.
        kept_bytes: Their bytes.
        dry_run: Whether it was one.
    """

    storage_class: str | None
    packs: int
    bytes: int
    kept_packs: int
    kept_bytes: int
    dry_run: bool


def tier(
    store: Store,
    chosen: Chosen,
    storage_class: str | None,
    restore_days: int | None,
    *,
    dry_run: bool,
) -> TierReport:
    """Move the packs of states, or ask for those that are archived; see `Registry.tier`."""
    if (storage_class is None) == (restore_days is None):
        raise InvalidInput("give a storage class or days of a restore", expected="one of the two")
    backend = store.backend
    if storage_class is not None and storage_class not in backend.storage_classes:
        raise InvalidInput(
            "the store has no such storage class",
            where=backend.url,
            expected=", ".join(sorted(backend.storage_classes)) or "a bucket on S3",
            found=storage_class,
        )
    if restore_days is not None and restore_days < 1:
        raise InvalidInput("not a number of days", expected="1 or more", found=restore_days)
    is_archive = storage_class in backend.archives
    mine, others = _packs(store, chosen, with_others=is_archive)
    kept = [pack for key, pack in mine.items() if key in others]

    def archived(pack: PackRef | None) -> PackRef | None:
        with suppress(ObjectNotFound):
            return pack if pack and backend.stat(str(pack.key)).is_archived else None
        return None

    def move(pack: PackRef | None) -> PackRef | None:
        with suppress(ObjectNotFound):  # evicted or moved since, and collected
            if pack is not None and storage_class is not None:
                backend.move_to_class(str(pack.key), storage_class)
            elif pack is not None:
                backend.restore(str(pack.key), restore_days or 0)
            return pack
        return None

    wanted: list[PackRef | None] = [pack for key, pack in mine.items() if key not in others]
    if restore_days is not None:
        wanted = list(in_batches(store.pools.small, archived, wanted))
    if not dry_run:
        wanted = list(in_batches(store.pools.small, move, wanted))
    moved = [pack for pack in wanted if pack is not None]
    size, kept_size = (sum(one.size_bytes for one in some) for some in (moved, kept))
    return TierReport(storage_class, len(moved), size, len(kept), kept_size, dry_run)


def _packs(
    store: Store, chosen: Chosen, *, with_others: bool
) -> tuple[dict[ObjectKey, PackRef], set[ObjectKey]]:
    """Return the packs of the chosen states, and of these the ones that other states need."""
    damaged: dict[str, RegistryError] = {}
    units = [
        (is_chosen, place)
        for run in read_runs(store, damaged)
        for is_chosen, place in _places(run, chosen, with_others=with_others)
    ]
    # Nobody knows what a run needs that cannot be read.
    for run_id in damaged if with_others else damaged.keys() & chosen.keys():
        raise damaged[run_id]
    mine: dict[ObjectKey, PackRef] = {}
    others: set[ObjectKey] = set()

    def take(unit: tuple[bool, Place], done: Outcome[Placement]) -> None:
        for pack in done.result().packs:
            if unit[0]:
                mine[pack.key] = pack
            else:
                others.add(pack.key)

    Workers(None, store).each(read_placement, units, take, pool="small")
    return mine, others & mine.keys()


def _places(run: RunManifest, chosen: Chosen, *, with_others: bool) -> Iterator[tuple[bool, Place]]:
    """Yield the places of the states that a run holds, each with whether it is chosen."""
    if run.run_id not in chosen and not with_others:
        return
    wanted = chosen.get(run.run_id, ())
    newest = run.latest() if run.status == "running" and with_others else None
    # The next save of a running run relies on the packs of its newest checkpoint.
    needed = () if newest is None else (newest.manifest, *newest.companions.values())
    for manifest in run.held:
        is_chosen = (wanted is None or manifest in wanted) and manifest not in needed
        if is_chosen or with_others:
            yield is_chosen, held_place(run, manifest)
