"""What the manifests tell a repack of chunks: the tensors that they are of."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from registry.actions import Place
from registry.digest import Digest
from registry.maintenance.repacking.survey import Survey, in_batches
from registry.objects.manifest import parse_list
from registry.reading.loading import read_lists
from registry.store import Store

#: A tensor as it is stored: its element type, and its chunks in order.
_Tensor = tuple[str, tuple[Digest, ...]]


@dataclass(slots=True)
class Tensors:
    """The tensors of chunks.

    Attributes:
        dtypes: Element type of each chunk; of a chunk of several tensors that of the first. Digest
            lists have none.
        groups: The chunks of each tensor that are of no tensor before it, in order.
    """

    dtypes: dict[Digest, str] = field(default_factory=dict)
    groups: list[list[Digest]] = field(default_factory=list)


def read_tensors(store: Store, survey: Survey, wanted: Collection[Digest]) -> Tensors:
    """Read of which tensors chunks are, from the manifests of everything that is held.

    Args:
        store: The registry's objects.
        survey: What the runs need.
        wanted: The chunks that are looked for.

    Raises:
        MissingObject: Something is gone: lost, or let go while this looked.
        IntegrityError: Something is damaged.
    """
    found = Tensors()
    seen: set[Digest] = set()
    # Runs that share a state have places of their own for it; one of them will do.
    distinct: dict[Digest, Place] = {}
    for places in survey.packs_of.values():
        for place in places:
            distinct.setdefault(place.manifest, place)

    def read(place: Place) -> list[_Tensor]:
        return list(_tensors(store, place))

    for tensors in in_batches(store.pools.bulk, read, distinct.values()):
        for dtype, digests in tensors:
            fresh = [d for d in dict.fromkeys(digests) if d in wanted and d not in seen]
            seen.update(fresh)
            found.dtypes.update(dict.fromkeys(fresh, dtype))
            if fresh:
                found.groups.append(fresh)
    return found


def _tensors(store: Store, place: Place) -> Iterator[_Tensor]:
    manifest = store.manifest(place.manifest_key)
    lists = read_lists(store, manifest, store.placement(place.placement_key))
    for tensor in manifest.tensors():
        if tensor.chunk_list is None:
            yield tensor.dtype, tensor.chunks
        else:
            where = tensor.chunk_list
            yield tensor.dtype, parse_list(lists[where], tensor.grid.count, where=where)
