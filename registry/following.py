"""Following a run with a model: its newest weights put in place, of which only what changed moves.

Owns choosing the checkpoint, finding out which chunks the model lacks, and the swap, which is done
whole or not at all. Nothing is written to the store. How a follower waits is the business of
`registry.watching`, how chunks come off the store that of `registry.fetching`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Self

from registry import pytree
from registry.bursts import allocation_burst
from registry.checkpoint import Checkpoint
from registry.committer import Committer
from registry.digest import Digest
from registry.errors import IncompatibleState, MissingObject, NotFound
from registry.fetching import Fetch
from registry.fit import LoadReport, arrays_in, check_fit, tensors_by_path, widened_paths
from registry.loading import index_chunks
from registry.manifest import Component, Manifest, TensorEntry, parse_list
from registry.placing import Base
from registry.plain import check_phase
from registry.resident import LiveChunks, Resident
from registry.rules import check_phase_is_declared
from registry.state import CheckpointRecord
from registry.suggest import near
from registry.watching import OVER, Patience

_Chunks = tuple[Digest, ...]


@dataclass(frozen=True, slots=True)
class _Known:
    """What a tensor of the model was given, and how it was marked then."""

    resident: Resident
    mark: tuple[object, ...]
    chunks: _Chunks


@dataclass(slots=True)
class _Plan:
    """What a checkpoint asks of the model.

    Attributes:
        residents: The model's tensors by path; of those that share memory the first.
        wanted: The digests of their chunks, as the checkpoint has them.
        inline: Bytes that the manifest itself holds.
        held: The digests of their chunks as they are.
    """

    residents: dict[str, Resident] = field(default_factory=dict)
    wanted: dict[str, _Chunks] = field(default_factory=dict)
    inline: dict[Digest, memoryview] = field(default_factory=dict)
    held: dict[str, _Chunks] = field(default_factory=dict)

    def stale(self) -> Iterator[tuple[str, int, int, Digest]]:
        """Yield path, number, size and digest of each chunk that is to be replaced."""
        for path, wanted in self.wanted.items():
            held = self.held[path]
            if wanted == held:
                continue
            sizes = self.residents[path].sizes()
            for number, (new, old, size) in enumerate(zip(wanted, held, sizes, strict=True)):
                if new != old:
                    yield path, number, size, new


class Following(Iterator[Checkpoint]):
    """The checkpoints of a run, each with its weights in a model; `Run.follow_into` explains it.

    Attributes:
        current: The checkpoint whose weights the model has; `None` before the first.
        changed: Paths of the tensors that the last swap wrote to.
        changed_bytes: Bytes that it wrote into the model.
        moved_bytes: Stored bytes of chunks that it read from the store.
    """

    def __init__(
        self,
        committer: Committer,
        model: object,
        *,
        component: str | None,
        phase: int | str | None,
        strict: bool,
        latest_only: bool,
        rehash: bool | None,
        poll_s: float,
        longest_poll_s: float,
        timeout_s: float | None,
        follow: bool,
    ) -> None:
        self._store = committer.store
        self._log = committer.log
        self._model = model
        self._component = component
        self._phase = None if phase is None else check_phase(phase)
        if self._phase is not None:
            check_phase_is_declared(self._log.state.spec, self._phase)
        self._strict = strict
        self._latest_only = latest_only
        self._rehash = rehash
        self._patience = Patience(poll_s, longest_poll_s, timeout_s)
        self._follow = follow
        self._end: int | None = None
        self._n = -1
        self._known: dict[str, _Known] = {}
        self.current: Checkpoint | None = None
        self.changed: tuple[str, ...] = ()
        self.changed_bytes = 0
        self.moved_bytes = 0

    def __repr__(self) -> str:
        current = "nothing yet" if self.current is None else self.current.ref
        return f"<Following {self._log.run_id}: {current}>"

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Checkpoint:
        """Wait for newer weights, put them into the model and return their checkpoint."""
        self._patience.begin()
        if self._end is None and not self._follow:
            self._end = self._log.refresh().commits
        while True:
            before = self._log.state.next_slot
            taken = self.poll()
            if taken is not None:
                return taken
            if not self._follow or self.is_over or self._patience.is_over:
                raise StopIteration
            if self._log.state.next_slot > before:
                self._patience.encourage()
            self._patience.wait()

    def poll(self) -> Checkpoint | None:
        """Put newer weights into the model if there are any now; costs one request if not.

        Returns:
            Their checkpoint; `None` if the model has the newest already.

        Raises:
            IncompatibleState: They do not fit the model, which is as it was.
            IntegrityError: Something is damaged or gone; the model is as it was.
        """
        self._log.refresh()
        while (record := self._due()) is not None:
            checkpoint = Checkpoint(self._store, self._log, record)
            try:
                self._take(checkpoint)
            except MissingObject:
                # Let go, and collected while it was read: what took its place is newer.
                if self._log.refresh().dropped is None and checkpoint.record.evicted is None:
                    raise
                continue
            self._n, self.current = record.n, checkpoint
            return checkpoint
        return None

    @property
    def is_over(self) -> bool:
        """Whether nothing newer can come, as far as the log has been read."""
        state = self._log.state
        return state.dropped is not None or (state.status in OVER and self._due() is None)

    def _due(self) -> CheckpointRecord | None:
        """Return the checkpoint whose weights the model ought to have next."""
        state = self._log.state
        if self._latest_only:
            latest = state.latest(self._phase)
            is_news = latest is not None and latest.n != self._n
            return latest if is_news and self._is_known(latest) else None
        for record in state.live(self._phase):
            if record.n > self._n and not record.held_back and self._is_known(record):
                return record
        return None

    def _is_known(self, record: CheckpointRecord | None) -> bool:
        return record is not None and (self._end is None or record.n < self._end)

    # Swapping

    def _take(self, checkpoint: Checkpoint) -> None:
        while True:
            base = checkpoint.base()
            try:
                return self._swap(checkpoint, base)
            except MissingObject:
                self._log.refresh()
                if checkpoint.place == base.place:
                    raise
                # A repack has moved it.

    def _swap(self, checkpoint: Checkpoint, base: Base) -> None:
        """Bring the model to a checkpoint, or leave it as it is."""
        aside: dict[Digest, memoryview] = {}
        places = index_chunks(base.manifest, base.placement, base.lists)
        moved_bytes = 0
        rehash = self._rehash
        with allocation_burst():
            plan = self._plan(checkpoint, base)
        while True:
            self._survey(plan, rehash)
            live = LiveChunks(plan.residents, plan.held)
            fetch = Fetch(self._store, base.placement, places, (live,))
            lacking: dict[Digest, memoryview] = {}
            for _, _, size, digest in plan.stale():
                if digest not in aside:
                    aside[digest] = plan.inline.get(digest) or _memory(size)
                    if digest not in plan.inline:
                        lacking[digest] = aside[digest]
            if lacking:
                fetch.read(lacking)
            moved_bytes += fetch.moved_bytes
            if rehash or not live.misled:
                break
            rehash = True  # written to unseen in one place, perhaps in others, too
        self._write(plan, aside)
        self.moved_bytes = moved_bytes

    def _write(self, plan: _Plan, aside: Mapping[Digest, memoryview]) -> None:
        self._known = {}  # until all of it is there
        pool, changed = self._store.pools.hashing, dict[str, int]()
        for path, number, size, digest in plan.stale():
            plan.residents[path].write(number, aside[digest], pool)
            changed[path] = changed.get(path, 0) + size
        self._known = {
            path: _Known(resident, resident.mark(), plan.wanted[path])
            for path, resident in plan.residents.items()
        }
        self.changed, self.changed_bytes = tuple(changed), sum(changed.values())

    def _plan(self, checkpoint: Checkpoint, base: Base) -> _Plan:
        """Hold the checkpoint against the model.

        Raises:
            IncompatibleState: Paths, shapes or dtypes differ.
            NotFound: There is no such component.
        """
        sources = tensors_by_path(self._parts(checkpoint.ref, base.manifest))
        leaves = self._leaves()
        report = LoadReport(
            loaded=tuple(path for path in sources if path in leaves),
            missing=tuple(path for path in leaves if path not in sources),
            unexpected=tuple(path for path in sources if path not in leaves),
        )
        widened = widened_paths(sources, leaves)
        check_fit(checkpoint.ref, report, sources, leaves, strict=self._strict, widened=widened)
        plan = _Plan()
        first: dict[object, str] = {}
        for path in report.loaded:
            entry, leaf = sources[path], leaves[path]
            stored_dtype = entry.dtype if path in widened else None
            resident = Resident(leaf.source, leaf.dtype, leaf.shape, stored_dtype)
            resident.check_writable(f"{checkpoint.ref}: {path}")
            if not resident.grid.nbytes:
                continue
            chunks = _chunks(entry, base.lists)
            # Tied tensors are one.
            other = first.setdefault(resident.place(), path)
            if other != path:
                if plan.wanted[other] != chunks:
                    raise _tied(checkpoint.ref, other, path)
                continue
            plan.residents[path], plan.wanted[path] = resident, chunks
            if entry.inline is not None:
                plan.inline[chunks[0]] = memoryview(entry.inline)
        _check_apart(checkpoint.ref, plan.residents)
        return plan

    def _survey(self, plan: _Plan, rehash: bool | None) -> None:
        """Find out what the model holds: by what it was given, by hashing where that is not known.

        Args:
            plan: Gets to know it.
            rehash: Which tensors are hashed although they have the mark that was left on them:
                all, none, or with `None` those in which writes are not counted.
        """
        unknown: list[tuple[str, int, int]] = []
        for path, resident in plan.residents.items():
            known = self._known.get(path)
            trusts = resident.is_counted if rehash is None else not rehash
            if known is not None and trusts and known.mark == resident.mark():
                plan.held[path] = known.chunks
            else:
                unknown += [(path, number, size) for number, size in enumerate(resident.sizes())]
        digests = self._store.pools.hashing.map(
            lambda one: plan.residents[one[0]].digest(one[1], one[2]), unknown
        )
        found: dict[str, list[Digest]] = {path: [] for path, *_ in unknown}
        for (path, *_), digest in zip(unknown, digests, strict=True):
            found[path].append(digest)
        plan.held.update({path: tuple(chunks) for path, chunks in found.items()})

    def _leaves(self) -> dict[str, pytree.ArrayLeaf]:
        """Return the model's tensors by path, as they are now: a module may have got new ones."""
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
        if name not in manifest.components:
            raise NotFound(
                "no such component",
                where=f"{ref}: {name}",
                expected=", ".join(manifest.components),
                hint=near(name, manifest.components),
            )
        return {name: manifest.components[name]}


def _chunks(entry: TensorEntry, lists: Mapping[Digest, bytes]) -> _Chunks:
    """Return the digests of a tensor's chunks; one that the manifest holds is one chunk."""
    if entry.inline is not None:
        return (Digest.of(entry.inline),)
    if entry.chunk_list is not None:
        return parse_list(lists[entry.chunk_list], entry.grid.count, where=entry.chunk_list)
    return entry.chunks


def _memory(size: int) -> memoryview:
    return pytree.allocate("uint8", (size,), "numpy")[1]


def _check_apart(ref: str, residents: Mapping[str, Resident]) -> None:
    """Refuse tensors that share some of their memory, but not all.

    Raises:
        IncompatibleState: There are such.
    """
    spans = sorted((*span, path) for path, one in residents.items() if (span := one.span()))
    for (device, _, stop, first), (other, start, _, second) in pairwise(spans):
        if device == other and start < stop:
            raise _tied(ref, first, second)


def _tied(ref: str, first: str, second: str) -> IncompatibleState:
    return IncompatibleState(
        "two tensors of the target share memory and differ in the checkpoint",
        where=f"{ref}: {first} and {second}",
        hint="Untie them, or follow a component in which they are equal.",
    )
