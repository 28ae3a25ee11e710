"""Runs of which little is left, for a repack."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from holdfast import Registry, Retention
from holdfast.backends import Backend
from holdfast.backends.wrappers import Faulty
from holdfast.registry.face.factory import open_on
from holdfast.registry.objects.codecs import Compression
from holdfast.registry.objects.keys import ObjectKey
from holdfast.registry.objects.pack import PackEntry, PackTable, trailer
from holdfast.registry.objects.placement import ChunkRow, PackRef, Rows
from holdfast.registry.upkeep.gc import collect
from holdfast.registry.values.digest import Digest, Digests
from tests.support.inline import without_threads
from tests.support.stores import packs

FIXED, CHANGING = 1200, 2400


def state(i: int, seed: int = 0) -> dict:
    """Return a state of which a third of the model, and nothing else, never changes."""
    fresh = np.random.default_rng([seed, i])
    return {
        "model": {
            "fixed": np.frombuffer(np.random.default_rng(99).bytes(FIXED), np.uint8),
            "w": np.frombuffer(fresh.bytes(CHANGING), np.uint8),
        },
        "step": i,
    }


def thin(run, *steps: int, last: int = 1, seed: int = 0) -> None:
    """Save these steps and evict all but the newest."""
    for step in steps:
        run.save(state(step, seed), step=step)
    run.retention.prune(Retention(last=last))


def as_delta(reg, checkpoint, base: Digest, delta: bytes):
    """Place the first chunk of a checkpoint as a delta against a chunk that it does not name."""
    digest, raw_bytes = next(iter(checkpoint.manifest.direct_chunks.items()))
    assert base not in checkpoint.manifest.direct_chunks
    entries = (
        PackEntry(digest, 0, len(delta), raw_bytes, "xor", base, Digest.of(delta)),
        PackEntry(base, len(delta), raw_bytes, raw_bytes),
    )
    table = PackTable(entries).encode()
    first = reg.run("run").checkpoints()[0]
    source = first.handle.reader.placement.packs[first.handle.reader.placement.rows[0].pack]
    start = first.handle.reader.placement.rows[0].offset
    raw = reg.handle.store.backend.get(str(source.key))[start:][:raw_bytes]
    data = delta + raw + table + trailer(table)
    pack = PackRef(ObjectKey("packs", Digest.of(table), 0), len(data))
    reg.handle.store.backend.put(str(pack.key), data)
    before = checkpoint.handle.reader.placement
    n = len(before.packs)
    rows = [
        ChunkRow(n, 0, len(delta), 1, len(before.rows)),
        *before.rows[1:],
        ChunkRow(n, len(delta), raw_bytes),
    ]
    after = replace(before, packs=(*before.packs, pack), rows=Rows(rows), extra=Digests([base]))
    place = checkpoint.handle.reader.place.changed(placement=after.digest)
    reg.handle.store.backend.put(str(place.placement_key), after.encode())
    reg.run("run").handle.log.append(lambda _: [place])
    return after


def attempt(faulty: Faulty, compression: Compression | None = None) -> range:
    """Repack over a store that may fail; return the numbers of the calls that it counts."""
    registry = without_threads(open_on(faulty))
    before = faulty.calls
    registry.repack(compression=compression)
    return range(before + 1, faulty.calls + 1)


def settled(
    backend: Backend, check: Callable[[Registry], None], compression: Compression | None = None
) -> set[str]:
    """Repack and collect in a healthy process, and check; return the packs that are left."""
    with without_threads(open_on(backend)) as registry:
        registry.repack(compression=compression)
        collect(registry.handle.store, grace_s=0)
        check(registry)
    return packs(backend)
