"""A save and a load by a fleet that is not there: real plans and a metered store, without tensors.

Rank 0's side is the real code: it makes the plan, encodes the part of each rank, decodes reports,
and puts manifest, digest lists and placement. The chunks have random digests. The packs go through
the real writer to a store that keeps no packs.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from architectures import Architecture

from holdfast.backends.base import Body, ObjectInfo
from holdfast.backends.memory import MemoryBackend
from holdfast.backends.wrappers import Metered
from holdfast.registry.face.factory import open_on
from holdfast.registry.history.log import RunLog
from holdfast.registry.history.state_reader import PlacedState
from holdfast.registry.objects.codecs import RAW
from holdfast.registry.objects.pack import PACK_BYTES
from holdfast.registry.objects.placement import PackRef
from holdfast.registry.saving.collective.exchange import ChunkReport
from holdfast.registry.saving.collective.plan import Plan, make_plan
from holdfast.registry.saving.collective.shards import Ints, Layout
from holdfast.registry.saving.collective.state_end import (
    ROW,
    ChunkTable,
    StateEnd,
    known_digests,
)
from holdfast.registry.saving.collective.talk import split
from holdfast.registry.store.store import create_config
from holdfast.registry.values import canonical
from holdfast.registry.values.digest import Digest
from holdfast.registry.writing.state_writer import StateWriter

#: Ranks whose parts are made and timed; those of the others take as long.
_SAMPLE = 64


@dataclass
class Figures:
    """One row of the table.

    Attributes:
        chunks: Chunks of the state.
        objects: Objects that a save puts on an empty registry.
        requests: Requests for that, of all ranks.
        exchanged: Bytes that travel between ranks, as a share of the state.
        peers: The most ranks with which one of the sampled ranks exchanges bytes.
        imbalance: The most bytes that a rank stores, divided by the mean.
        plan_s: CPU seconds of rank 0 for the plan.
        parts_s: CPU seconds of rank 0 for the parts of all ranks.
        part_kb: Kilobytes of such a part.
        assemble_s: CPU seconds of rank 0 in each save: reports, manifest and placement. It is the
            second save, in which all chunks have changed.
        manifest_mb: Megabytes of the manifest, with the digest lists.
        placement_mb: Megabytes of the placement.
        read_gb: The most gigabytes that a rank reads in a load.
        peak_gb: The most memory of this simulation so far, which has all of rank 0's.
    """

    chunks: int = 0
    objects: int = 0
    requests: int = 0
    exchanged: float = 0
    peers: int = 0
    imbalance: float = 0
    plan_s: float = 0
    parts_s: float = 0
    part_kb: float = 0
    assemble_s: float = 0
    manifest_mb: float = 0
    placement_mb: float = 0
    read_gb: float = 0
    peak_gb: float = 0


class _Hollow(MemoryBackend):
    """Keeps what rank 0 puts, and of packs nothing."""

    def put_if_absent(self, key: str, body: Body) -> bool:
        return key.startswith("packs/") or super().put_if_absent(key, body)

    def list(
        self,
        prefix: str = "",
        *,
        start_after: str = "",
        limit: int | None = None,
        delimiter: bool = False,
    ) -> Iterator[ObjectInfo]:
        if prefix.startswith("packs/"):
            return iter(())
        return super().list(prefix, start_after=start_after, limit=limit, delimiter=delimiter)


class Fleet:
    """The ranks of a training.

    Args:
        of: The model.
        ranks: Their number.
        tensor_parallel: How many of them share each row of a matrix.
    """

    def __init__(self, of: Architecture, ranks: int, tensor_parallel: int) -> None:
        self._of, self._ranks = of, ranks
        self._boxes = of.layouts(ranks, tensor_parallel)
        self._dice = np.random.default_rng(0)
        self._metered = Metered(_Hollow())
        create_config(self._metered, "skipped")
        registry = open_on(self._metered)
        registry.create_run("fleet")
        log = RunLog(registry.handle.store, "fleet")
        log.open()
        self._writer = StateWriter(registry.handle.store, log)
        self.figures = Figures()

    def run(self) -> Figures:
        """Save and load once."""
        plan = self._plan()
        with self._metered.measure() as usage:
            first = self._save(plan, [])
        self._save(plan, [first])
        puts = usage.calls["put_if_absent"]
        self.figures.objects, self.figures.requests = puts, usage.requests
        self._load()
        self.figures.peak_gb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        return self.figures

    def _plan(self) -> Plan:
        found = self.figures
        began = time.process_time()
        plan = make_plan(self._of.structure, self._boxes)
        found.plan_s = time.process_time() - began
        some = range(0, self._ranks, max(1, self._ranks // _SAMPLE))
        plan.part(0)  # it sorts the chunks by their owners, once
        began = time.process_time()
        sizes = [sum(map(len, plan.part(rank).encode())) for rank in some]
        found.parts_s = (time.process_time() - began) / len(some) * self._ranks
        found.part_kb = max(sizes) / 1e3
        found.peers = max(
            len(
                {*plan.part(rank).gives[:, 1].tolist(), *plan.part(rank).takes[:, 1].tolist()}
                - {rank}
            )
            for rank in some
        )
        owned = _owned_bytes(plan)
        found.chunks = len(plan.owner)
        found.exchanged = plan.moved_bytes / int(owned.sum())
        found.imbalance = float(owned.max() / owned.mean())
        return plan

    def _save(self, plan: Plan, bases: Sequence[PlacedState]) -> PlacedState:
        """Put packs as every rank does, then the rest as rank 0 does."""
        writer, flat = self._writer, self._of.flat
        digests = self._dice.integers(0, 256, (len(plan.owner), 32), np.uint8)
        sizes = _sizes(plan)
        component = np.repeat(
            np.arange(len(flat.components)), [len(part.leaves) for part in flat.components]
        )[plan.patterns.tensor_of(np.arange(len(plan.owner)))]
        reports = (
            self._store_part(plan.owned_by(rank), digests, sizes, component)
            for rank in range(self._ranks)
        )
        layout = Layout(flat)
        began = time.process_time()
        known_digests(layout, bases)
        spent = time.process_time() - began
        stored = []
        for report in reports:
            began = time.process_time()
            stored.append(ChunkReport.of(*split(report)).stored)
            spent += time.process_time() - began
        began = time.process_time()
        end = StateEnd(
            writer=writer,
            layout=layout,
            small=[],
            state=flat,
            skeletons=[canonical.encode(part.skeleton) for part in flat.components],
            digests=digests,
            bases=bases,
            stored=ChunkTable.joined(stored),
            codec=RAW,
            watched=(),
        )
        written = end.finish()
        found = self.figures
        found.assemble_s = spent + time.process_time() - began
        place = written.state.place
        store = writer.store.backend
        lists = sum(map(len, written.state.lists.values()))
        found.manifest_mb = (len(store.get(str(place.manifest_key))) + lists) / 1e6
        found.placement_mb = len(store.get(str(place.placement_key))) / 1e6
        return written.state

    def _store_part(self, mine: Ints, digests: Ints, sizes: Ints, component: Ints) -> bytes:
        """Put a rank's packs, a group of chunks of one component each; return its report."""
        tables = []
        writer = self._writer.objects
        for group in _groups(sizes[mine], component[mine]):
            some = mine[group]
            offsets = np.cumsum(sizes[some]) - sizes[some]
            total = int(sizes[some].sum())
            name = Digest(self._dice.bytes(32))
            key = writer.put_pack(name, [memoryview(_ZEROS)[:total]], total)
            rows = np.zeros(len(some), ROW)
            rows["offset"], rows["stored_bytes"] = offsets, sizes[some]
            tables.append(ChunkTable(digests[some], rows, (PackRef(key, total),)))
        return ChunkReport(digests[mine].tobytes(), (), ChunkTable.joined(tables)).encode()

    def _load(self) -> None:
        plan = make_plan(self._of.structure, self._boxes, loads=True)
        self.figures.read_gb = int(_owned_bytes(plan).max()) / 1e9


_ZEROS = bytes(PACK_BYTES)


def _owned_bytes(plan: Plan) -> Ints:
    """Return the bytes of the chunks that each rank owns."""
    owned = np.bincount(plan.owner, _sizes(plan), minlength=plan.patterns.ranks)
    return owned.astype(np.int64)


def _sizes(plan: Plan) -> Ints:
    chunks = np.arange(len(plan.owner))
    patterns = plan.patterns
    return patterns.slot_bytes[patterns.slots_of(chunks, patterns.tensor_of(chunks))]


def _groups(sizes: Ints, components: Ints) -> Iterator[slice]:
    """Yield the chunks of each pack, as the collective `exchange` groups them."""
    begin = total = 0
    of = components.tolist()
    for at, size in enumerate(sizes.tolist()):
        if at > begin and (of[at] != of[begin] or total + size > PACK_BYTES):
            yield slice(begin, at)
            begin, total = at, 0
        total += size
    if len(of) > begin:
        yield slice(begin, len(of))
