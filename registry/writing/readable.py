"""Check that a state can be read again, before anything of it is stored.

Dtype and shape of a tensor decide the length of its entry in a manifest; the digests do not matter.
So a state whose manifest would exceed the bound of `holdfast.registry.values.parse_limits` is
refused before anything is written. The manifest itself is checked again when it is encoded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from holdfast.registry.errors import InvalidInput
from holdfast.registry.objects import CHUNK_BYTES, INLINE_BYTES, LIST_THRESHOLD, TensorEntry, grid
from holdfast.registry.pytree import ArrayLeaf, FlatState, leaf_paths, paths_bytes
from holdfast.registry.values import (
    HEAVIEST,
    Budget,
    Digest,
    canonical,
    check_bytes,
    json_bytes,
    max_record_bytes,
)

_ANY = Digest(bytes(32))
#: The most bytes of a tensor's entry, with 64 axes, without its chunks.
_MOST_BYTES = 8192
#: Bytes around all components and around each one; bytes between tensors.
_AROUND_BYTES = 1024
_BETWEEN_BYTES = 36


def check_readable(state: FlatState, skeletons: Sequence[bytes]) -> None:
    """Check that the manifest of a state could be read."""
    plain = sum(map(len, skeletons)) * HEAVIEST
    leaves = state.leaves
    tensors = len(leaves) * _MOST_BYTES + sum(leaf.nbytes for leaf in leaves) // CHUNK_BYTES * 1024
    if paths_bytes(leaves) > max_record_bytes():  # an estimate from above
        for part in state.components:
            budget = Budget(part.name[:200], "spelling the paths of its tensors", InvalidInput)
            leaf_paths(part.name, part.skeleton, budget)
    around = (len(skeletons) + 1) * _AROUND_BYTES
    if plain + tensors + around <= max_record_bytes():
        return  # as nearly always
    check_bytes(
        sum(map(json_bytes, skeletons)) + _entries_bytes(leaves) + around,
        f"reading {len(leaves)} tensors and the plain values beside them",
        where="state",
        kind=InvalidInput,
    )


def _entries_bytes(leaves: Iterable[ArrayLeaf]) -> int:
    """Return how much memory reading the entries of tensors takes."""
    forms = Counter(
        (leaf.dtype, getattr(leaf.dtype, "original", ""), leaf.shape) for leaf in leaves
    )
    total = 0
    for (dtype, _, shape), number in forms.items():
        cut = grid(dtype, shape)
        if cut.nbytes <= INLINE_BYTES:
            entry = TensorEntry(dtype, shape, inline=bytes(cut.nbytes))
        elif cut.count <= LIST_THRESHOLD:
            entry = TensorEntry(dtype, shape, chunks=(_ANY,) * cut.count)
        else:
            entry = TensorEntry(dtype, shape, chunk_list=_ANY)
        encoded = json_bytes(canonical.encode(entry.to_json()))
        total += number * (encoded + _BETWEEN_BYTES)
    return total
