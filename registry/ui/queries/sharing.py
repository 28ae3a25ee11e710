"""What a state shares with the checkpoints that are nearest to it in the log of its run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.registry.errors import RegistryError, StoreUnavailable
from holdfast.registry.history.replay import CheckpointRecord
from holdfast.registry.loading.checkpoint import Checkpoint
from holdfast.registry.loading.fit import tensors_by_path
from holdfast.registry.loading.stored import Stored, log_of, reader_of
from holdfast.registry.storage.tensor_entry import TensorEntry
from holdfast.registry.ui.queries.states import find, source_of
from holdfast.registry.ui.source import Source
from holdfast.registry.values.digest import Digest

#: The checkpoints before and after one that its chunks are compared with, together.
NEIGHBOURS = 8


@dataclass(frozen=True, slots=True)
class Shared:
    """What a checkpoint shares with another one of its run.

    Attributes:
        ref: The other one.
        id: Its id.
        step: Its step.
        phase: Its phase.
        shared_bytes: Bytes of this checkpoint's tensors whose chunks the other one has too.
        components: The components that are equal in both.
        damage: Why it could not be compared.
    """

    ref: str
    id: Digest
    step: int
    phase: str
    shared_bytes: int
    components: tuple[str, ...]
    damage: str | None = None


@dataclass(frozen=True, slots=True)
class Sharing:
    """What a checkpoint shares with its neighbours in the log.

    Attributes:
        others: The neighbours, oldest first.
        size_bytes: Bytes of the checkpoint's tensors.
        not_compared: Number of kept checkpoints of the run that were not looked at.
    """

    others: tuple[Shared, ...]
    size_bytes: int
    not_compared: int


def sharing(source: Source, ref: str, *, neighbours: int = NEIGHBOURS) -> Sharing:
    """Compare the chunks of a state with those of the nearest checkpoints of its run.

    One manifest is read for each; a list of digests only where the lists of two tensors differ.

    Args:
        source: The registry.
        ref: The state.
        neighbours: The most checkpoints to look at.

    Raises:
        NotFound: The ref names nothing.
        IntegrityError: The manifest of the state is damaged or gone.
    """
    stored = find(source, ref)
    log = log_of(stored)
    kept = [one for one in log.run.checkpoints if one.evicted is None]
    n = stored.n if isinstance(stored, Checkpoint) else source_of(stored)
    others = [one for one in kept if one.n != n or one.manifest != stored.digest]
    near = sorted(others, key=lambda one: abs(one.n - (log.run.commits if n is None else n)))
    chosen = sorted(near[:neighbours], key=lambda one: one.n)
    mine = tensors_by_path(stored.manifest.components)

    def compare(record: CheckpointRecord) -> Shared:
        other = Checkpoint(source.registry.store, log, record)
        values = other.ref, record.manifest, record.step, record.phase
        try:
            equal = [n for n, d in stored.components.items() if other.components.get(n) == d]
            return Shared(*values, _shared_bytes(stored, mine, other), tuple(equal))
        except StoreUnavailable:
            raise
        except RegistryError as error:
            return Shared(*values, 0, (), error.summary)

    found = tuple(source.registry.store.pools.small.map(compare, chosen))
    return Sharing(found, stored.manifest.nbytes, len(others) - len(chosen))


def _shared_bytes(stored: Stored, mine: Mapping[str, TensorEntry], other: Stored) -> int:
    theirs = tensors_by_path(other.manifest.components).values()
    lists = {one.chunk_list for one in theirs if one.chunk_list is not None}
    unknown = [one for one in mine.values() if one.chunk_list and one.chunk_list not in lists]
    inline = {one.content for one in theirs if one.inline is not None}
    chunks = {digest for one in theirs for digest in one.chunks}
    if unknown:
        chunks |= {d for one in theirs for d in reader_of(other).chunk_digests(one)}
    shared = 0
    for entry in mine.values():
        if entry.inline is not None:
            shared += entry.nbytes * (entry.content in inline)
        elif entry.chunk_list in lists:
            shared += entry.nbytes
        else:
            digests = reader_of(stored).chunk_digests(entry)
            sizes = zip(digests, entry.grid.sizes(), strict=True)
            shared += sum(size for digest, size in sizes if digest in chunks)
    return shared
