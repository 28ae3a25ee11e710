"""Replace the weights of a model in place by a checkpoint's weights.

Finds the chunks that the model lacks, fetches and verifies them in other memory, and copies them
into the model: all of them, or none unless a device fails meanwhile.
`holdfast.registry.loading.following.following` chooses the checkpoint.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from holdfast.registry import pytree
from holdfast.registry.history import PlacedState
from holdfast.registry.loading.fit import (
    LoadReport,
    arrays_in,
    check_any_fits,
    check_component,
    check_components,
    check_fit,
    filled_once,
    tensors_by_path,
    widened_paths,
)
from holdfast.registry.loading.following.resident import LiveChunks, Resident
from holdfast.registry.objects import Component, Manifest, TensorEntry
from holdfast.registry.store import Fetch, Store, index_chunks
from holdfast.registry.values import Digest, collector_paused

_Chunks = tuple[Digest, ...]


@dataclass(frozen=True, slots=True)
class _Known:
    """The chunks that a tensor was found to hold or was given, and its mark at that time."""

    resident: Resident
    mark: tuple[object, ...]
    chunks: _Chunks
    inexact: frozenset[int] = frozenset()


@dataclass(slots=True)
class Exchange:
    """The chunks of a checkpoint and of a model, and the chunks that the model lacks."""

    ref: str  # the checkpoint
    base: PlacedState  # its state and place
    #: The model's tensors by path; of those that share memory the first.
    residents: dict[str, Resident] = field(default_factory=dict)
    #: The digests of their chunks in the checkpoint.
    wanted: dict[str, _Chunks] = field(default_factory=dict)
    #: The digests of their chunks in the model.
    held: dict[str, _Chunks] = field(default_factory=dict)
    #: Numbers of chunks that equal the held digest only when they are rounded: they can be bases of
    #: deltas, but have to be replaced.
    inexact: dict[str, frozenset[int]] = field(default_factory=dict)
    #: Bytes that the manifest itself holds.
    inline: dict[Digest, memoryview] = field(default_factory=dict)
    #: Chunks that are fetched and verified.
    fetched: dict[Digest, memoryview] = field(default_factory=dict)
    moved_bytes: int = 0  # stored bytes of chunks that were read from the store

    def differing(self) -> Iterator[tuple[str, int, int, Digest]]:
        """Yield path, number, size and new digest of each chunk to replace."""
        for path, wanted in self.wanted.items():
            held, inexact = self.held[path], self.inexact[path]
            if wanted == held and not inexact:
                continue
            sizes = self.residents[path].sizes()
            for number, (new, old, size) in enumerate(zip(wanted, held, sizes, strict=True)):
                if new != old or number in inexact:
                    yield path, number, size, new

    def lacking(self) -> dict[Digest, memoryview]:
        """Allocate memory for the chunks that are neither here nor in the manifest."""
        found: dict[Digest, memoryview] = {}
        for _, _, size, digest in self.differing():
            if digest in self.inline:
                self.fetched[digest] = self.inline[digest]
            elif digest not in self.fetched and digest not in found:
                found[digest] = pytree.allocate("uint8", (size,), "numpy")[1]
        return found


class SwappedModel:
    """A model whose weights are replaced in place.

    Attributes:
        changed: Paths of the tensors that the last exchange wrote to.
        changed_bytes: Bytes that it wrote.
    """

    def __init__(
        self,
        store: Store,
        model: object,
        *,
        component: str | None,
        strict: bool,
        rehash: bool | None,
    ) -> None:
        self._store = store
        self._model = model
        self._component = check_component(component)
        self._strict = strict
        self._rehash = rehash
        self._known: dict[str, _Known] = {}
        self.changed: tuple[str, ...] = ()
        self.changed_bytes = 0

    def prepare(self, ref: str, base: PlacedState, before: Exchange | None = None) -> Exchange:
        """Fetch the chunks that the model lacks of a checkpoint; the model itself is only read."""
        with collector_paused():
            made = self._plan(ref, base)
        if before is not None:
            made.fetched, made.moved_bytes = before.fetched, before.moved_bytes
        index = index_chunks(base.manifest, base.placement, base.lists)
        rehash = self._rehash
        while True:
            self._survey(made, rehash)
            live = LiveChunks(made.residents, made.held)
            fetch = Fetch(self._store, base.placement, index, (live,))
            lacking = made.lacking()
            if lacking:
                fetch.read(lacking)
            made.fetched.update(lacking)
            made.moved_bytes += fetch.moved_bytes
            if rehash or not live.was_outdated:
                return made
            rehash = True  # one uncounted write was found; there may be more

    def put(self, exchange: Exchange) -> None:
        """Copy the prepared chunks into the model; nobody may have written to it since.

        Everything that needs the host's memory is done before the first chunk is copied. If a
        device fails during the copies, the model may have only some of the chunks; then the next
        exchange hashes the whole model.
        """
        self._known = {}  # until all of it is there
        pool, changed = self._store.pools.hashing, dict[str, int]()
        differing = list(exchange.differing())
        uses = Counter(digest for *_, digest in differing)
        staged: list[Callable[[], None]] = []
        for path, number, size, digest in differing:
            data = exchange.fetched[digest]
            staged.append(exchange.residents[path].stage(number, data, pool))
            changed[path] = changed.get(path, 0) + size
            uses[digest] -= 1
            if not uses[digest]:
                del exchange.fetched[digest]  # it may be staged: do not keep it twice
        for copy in staged:
            copy()
        self._known = {
            path: _Known(resident, resident.mark(), exchange.wanted[path])
            for path, resident in exchange.residents.items()
        }
        self.changed, self.changed_bytes = tuple(changed), sum(changed.values())

    def _plan(self, ref: str, base: PlacedState) -> Exchange:
        """Compare a checkpoint with the model as it is now: a module may have new tensors."""
        sources = tensors_by_path(self._parts(ref, base.manifest))
        leaves = self._leaves()
        report = LoadReport.of(sources, leaves)
        widened = widened_paths(sources, leaves)
        check_fit(ref, report, sources, leaves, strict=self._strict, widened=widened)
        check_any_fits(ref, report)
        made = Exchange(ref, base)
        for path in filled_once(ref, sources, leaves):
            entry, leaf = sources[path], leaves[path]
            resident = Resident(leaf.source, leaf.dtype, leaf.shape, widened.get(path))
            if not resident.grid.nbytes:
                continue
            chunks = _chunks(entry, base.lists)
            made.residents[path], made.wanted[path] = resident, chunks
            if entry.inline is not None:
                made.inline[chunks[0]] = memoryview(entry.inline)
        return made

    def _survey(self, exchange: Exchange, rehash: bool | None) -> None:
        """Find the digests of the chunks in the model: known ones, or by hashing.

        A known digest may be wrong, because not every write is counted. That is harmless for a
        chunk that is replaced; if it is the base of a delta, the result is hashed. A chunk that
        stays is hashed here; otherwise the model could differ from the checkpoint.
        """
        marks = {path: resident.mark() for path, resident in exchange.residents.items()}
        held: dict[str, list[Digest | None]] = {}
        inexact: dict[str, set[int]] = {path: set() for path in exchange.residents}
        unknown: list[tuple[str, int, int]] = []
        for path, resident in exchange.residents.items():
            known = self._known.get(path)
            trusts = resident.is_counted if rehash is None else not rehash
            chunks: list[Digest | None] = [None] * resident.grid.count
            if known is not None and trusts and known.mark == marks[path]:
                chunks, inexact[path] = list(known.chunks), set(known.inexact)
                if rehash is None:
                    stays = zip(chunks, exchange.wanted[path], strict=True)
                    chunks = [None if old == new else old for old, new in stays]
            held[path] = chunks
            sizes = resident.sizes()
            unknown += [(path, n, sizes[n]) for n, digest in enumerate(chunks) if digest is None]
        examined = self._store.pools.hashing.map(
            lambda one: exchange.residents[one[0]].examine(one[1], one[2]), unknown
        )
        for (path, number, _), (digest, is_exact) in zip(unknown, examined, strict=True):
            held[path][number] = digest
            inexact[path].discard(number)
            if not is_exact:
                inexact[path].add(number)
        exchange.held = {path: tuple(filter(None, chunks)) for path, chunks in held.items()}
        exchange.inexact = {path: frozenset(numbers) for path, numbers in inexact.items()}
        self._known = {
            path: _Known(resident, marks[path], exchange.held[path], exchange.inexact[path])
            for path, resident in exchange.residents.items()
        }

    def _leaves(self) -> dict[str, pytree.ArrayLeaf]:
        component = self._component
        flat = pytree.flatten(self._model if component is None else {component: self._model})
        pytree.await_devices(flat)
        return {
            part.leaves[index].path: part.leaves[index]
            for part in flat.components
            for index in arrays_in(part.skeleton)
        }

    def _parts(self, ref: str, manifest: Manifest) -> Mapping[str, Component]:
        name = self._component
        if name is None:
            return manifest.components
        check_components(ref, [name], manifest.components)
        return {name: manifest.components[name]}


def _chunks(entry: TensorEntry, lists: Mapping[Digest, bytes]) -> _Chunks:
    """Return the digests of a tensor's chunks; an inline tensor counts as one chunk."""
    if entry.inline is not None:
        return (Digest.of(entry.inline),)
    return tuple(entry.chunk_digests(lists))
