"""Read the element types, tensors and lengths of chunks from the manifests."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from holdfast.registry.errors import Malformed
from holdfast.registry.history.actions import Place
from holdfast.registry.maintenance.repacking.survey import Survey
from holdfast.registry.maintenance.window import in_batches
from holdfast.registry.storage.keys import ObjectKey
from holdfast.registry.storage.manifest import Manifest
from holdfast.registry.storage.pack import PackEntry
from holdfast.registry.storage.reading import read_lists
from holdfast.registry.storage.store import Store
from holdfast.registry.values.digest import Digest

#: A tensor as it is stored: its element type, and its chunks in order with their lengths.
_Tensor = tuple[str, Sequence[Digest], tuple[int, ...]]


@dataclass(slots=True)
class Tensors:
    """The tensors of chunks.

    Attributes:
        dtypes: Element type of each chunk; the first tensor's if several have it. Digest lists have
            none.
        groups: The chunks of each tensor that no tensor before it has, in order.
        sizes: Length of each chunk in bytes, digest lists included.
    """

    dtypes: dict[Digest, str] = field(default_factory=dict)
    groups: list[list[Digest]] = field(default_factory=list)
    sizes: dict[Digest, int] = field(default_factory=dict)


def read_tensors(store: Store, survey: Survey, wanted: Collection[Digest]) -> Tensors:
    """Find the tensors of chunks in the manifests of all states that runs hold.

    Args:
        store: The registry's objects.
        survey: The chunks that runs need.
        wanted: The chunks whose tensors are wanted.

    Raises:
        MissingObject: An object is gone: lost, or evicted and collected meanwhile.
        IntegrityError: An object is damaged.
    """
    found = Tensors()
    seen: set[Digest] = set()
    # Runs that share a state have a place each for it; one of them is enough.
    distinct: dict[Digest, Place] = {}
    for places in survey.packs_of.values():
        for place in places:
            distinct.setdefault(place.manifest, place)

    def read(place: Place) -> tuple[Manifest, list[_Tensor]]:
        manifest = store.manifest(place.manifest_key)
        return manifest, list(_tensors(store, place, manifest))

    for manifest, tensors in in_batches(store.pools.bulk, read, distinct.values()):
        found.sizes.update({d: manifest.direct_chunks[d] for d in manifest.chunk_lists})
        for dtype, digests, sizes in tensors:
            found.sizes.update(zip(digests, sizes, strict=True))
            fresh = [d for d in dict.fromkeys(digests) if d in wanted and d not in seen]
            seen.update(fresh)
            found.dtypes.update(dict.fromkeys(fresh, dtype))
            if fresh:
                found.groups.append(fresh)
    return found


def _tensors(store: Store, place: Place, manifest: Manifest) -> Iterator[_Tensor]:
    lists = read_lists(store, manifest, store.placement(place.placement_key))
    for tensor in manifest.tensors():
        if tensor.inline is None:
            yield tensor.dtype, tensor.chunk_digests(lists), tensor.grid.sizes()


def check_bases(entries: Collection[tuple[ObjectKey, PackEntry]]) -> None:
    """Compare the lengths of deltas with those of their bases: they are joined byte by byte.

    Raises:
        Malformed: Two lengths that must be equal are not.
    """
    lengths: dict[Digest, int] = {}
    for key, entry in entries:
        length = lengths.setdefault(entry.digest, entry.raw_bytes)
        _check_length(key, entry, length, "as another table has it")
    for key, entry in entries:
        if entry.base is not None and entry.base in lengths:
            _check_length(key, entry, lengths[entry.base], "as its base has")


def check_sizes(
    entries: Iterable[tuple[ObjectKey, PackEntry]],
    sizes: Mapping[Digest, int],
    named: Collection[Digest],
) -> None:
    """Compare the lengths in tables with the manifests, because memory is allocated by them.

    Args:
        entries: Packs and entries of their tables. A base of no manifest is as long as its deltas.
        sizes: Lengths by the manifests.
        named: The chunks that states name as theirs.

    Raises:
        Malformed: A chunk has another length, or no manifest has it.
    """
    for key, entry in entries:
        if entry.digest in sizes:
            _check_length(key, entry, sizes[entry.digest], "as its manifest has it")
        elif entry.digest in named:
            raise Malformed(
                "a placement names a chunk that no manifest has",
                where=f"{key}: {entry.digest}",
                hint="Run `holdfast verify --deep`; nothing was changed.",
            )


def _check_length(key: ObjectKey, entry: PackEntry, length: int, of_what: str) -> None:
    if entry.raw_bytes != length:
        raise Malformed(
            "a pack gives a chunk another length than it has",
            where=f"{key}: {entry.digest}",
            expected=f"{length} bytes, {of_what}",
            found=entry.raw_bytes,
            hint="Run `holdfast verify --deep`; nothing was changed.",
        )
