"""What the manifests tell a repack of chunks: the tensors that they are of, and their lengths."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from holdfast.registry.errors import Malformed
from holdfast.registry.history.actions import Place
from holdfast.registry.maintenance.repacking.survey import Survey, in_batches
from holdfast.registry.storage.keys import ObjectKey
from holdfast.registry.storage.manifest import Manifest, parse_list
from holdfast.registry.storage.pack import PackEntry
from holdfast.registry.storage.reading import read_lists
from holdfast.registry.storage.store import Store
from holdfast.registry.values.digest import Digest

#: A tensor as it is stored: its element type, and its chunks in order with their lengths.
_Tensor = tuple[str, tuple[Digest, ...], tuple[int, ...]]


@dataclass(slots=True)
class Tensors:
    """The tensors of chunks.

    Attributes:
        dtypes: Element type of each chunk; of a chunk of several tensors that of the first. Digest
            lists have none.
        groups: The chunks of each tensor that are of no tensor before it, in order.
        sizes: Length of each chunk in bytes; of digest lists too.
    """

    dtypes: dict[Digest, str] = field(default_factory=dict)
    groups: list[list[Digest]] = field(default_factory=list)
    sizes: dict[Digest, int] = field(default_factory=dict)


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
        if tensor.chunk_list is None:
            if tensor.inline is None:
                yield tensor.dtype, tensor.chunks, tensor.grid.sizes()
        else:
            where = tensor.chunk_list
            digests = parse_list(lists[where], tensor.grid.count, where=where)
            yield tensor.dtype, digests, tensor.grid.sizes()


def check_bases(entries: Collection[tuple[ObjectKey, PackEntry]]) -> None:
    """Hold the lengths of deltas against those of their bases: they are joined byte by byte.

    Raises:
        Malformed: Two that should be equal are not.
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
    """Hold the lengths in tables against the manifests: memory is taken by them.

    Args:
        entries: The packs and what they say. A base of no manifest is as long as its deltas.
        sizes: What the manifests say.
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
