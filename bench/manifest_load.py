"""Open the manifest and the placement of a large state, and find the chunks of one tensor.

    python bench/manifest_load.py [MODEL]

The state is that of `sharded_plans.py`, with random digests, or `MoE`: a mixture of experts in
which every expert has tensors of its own. A process of its own reads what was written. Seconds are
of a processor.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from architectures import ARCHITECTURES, mixture

from holdfast.registry.objects.chunking import CHUNK_BYTES, grid
from holdfast.registry.objects.keys import ObjectKey
from holdfast.registry.objects.manifest import Component, Manifest
from holdfast.registry.objects.placement import PackRef, Placement
from holdfast.registry.pytree import ArrayLeaf
from holdfast.registry.store import reading
from holdfast.registry.values.digest import Digest
from holdfast.registry.writing.packing import chunked_entry
from holdfast.registry.writing.placing import ChunkLocation, build_placement

_PER_PACK = 16


def write(model: str, folder: Path) -> None:
    """Write both files, and the digest lists one after another."""
    of = mixture(61, 7168, 385, 2048, 163840) if model == "MoE" else ARCHITECTURES[model]
    dice = np.random.default_rng(0)
    lists: dict[Digest, bytes] = {}

    def chunks(leaf: ArrayLeaf) -> bytes:
        return dice.bytes(32 * grid(leaf.dtype, leaf.shape).count)

    parts = {
        part.name: Component.build(
            part.skeleton, [chunked_entry(leaf, chunks(leaf), lists) for leaf in part.leaves]
        )
        for part in of.flat.components
    }
    manifest = Manifest("dict", parts)
    locations = {}
    for number, (digest, size) in enumerate(manifest.all_chunks(lists).items()):
        if number % _PER_PACK == 0:
            key = ObjectKey("packs", Digest(dice.bytes(32)), 0)
            pack = PackRef(key, _PER_PACK * CHUNK_BYTES)
        locations[digest] = ChunkLocation(pack, number % _PER_PACK * CHUNK_BYTES, size)
    placement = build_placement(manifest, lists, locations)
    (folder / "manifest").write_bytes(manifest.digest + manifest.encode())
    (folder / "placement").write_bytes(placement.digest + placement.encode())
    (folder / "lists").write_bytes(b"".join(lists.values()))


def read(folder: Path) -> None:
    """Time the opening."""
    files = [(folder / name).read_bytes() for name in ("manifest", "placement", "lists")]
    named, placed, listed = files
    began = time.process_time()
    manifest = Manifest.decode(named[32:], Digest(named[:32]), where="manifest")
    _tell("manifest", len(named), began)
    began = time.process_time()
    placement = Placement.decode(placed[32:], Digest(placed[:32]), where="placement")
    _tell("placement", len(placed), began)
    lists, start = {}, 0
    for digest, entry in manifest.chunk_lists.items():
        end = start + 32 * entry.grid.count
        lists[digest], start = listed[start:end], end
    last = list(manifest.tensors())[-1]
    known = {} if last.chunk_list is None else {last.chunk_list: lists[last.chunk_list]}
    began = time.process_time()
    index = reading.StateIndex(None, manifest, placement, known)  # type: ignore[arg-type]
    index.learn([last])
    _tell("rows of one tensor", sum(map(len, known.values())), began)
    began = time.process_time()
    reading.index_chunks(manifest, placement, lists)
    _tell("rows of all", len(listed), began)


def _tell(what: str, size: int, began: float) -> None:
    spent = time.process_time() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"{what}: {size / 1e6:.3g} MB, {spent:.2f} s, peak {peak:.2f} GB", flush=True)


def main() -> None:
    if sys.argv[1:2] == ["--read"]:
        read(Path(sys.argv[2]))
        return
    with tempfile.TemporaryDirectory() as folder:
        write(sys.argv[1] if sys.argv[1:] else "1 T", Path(folder))
        subprocess.run([sys.executable, __file__, "--read", folder], check=True)


if __name__ == "__main__":
    main()
