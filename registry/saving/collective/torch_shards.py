"""The boxes of DTensors, computed from their placements and compared with their local parts.

A ShardedTensor of FSDP1 gives its own boxes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from holdfast.registry.pytree import Encoder, Link
from holdfast.registry.pytree.torch_arrays import encode_tensor, opener_of
from holdfast.registry.pytree.torch_memory import NAMES, PLAIN, storage_of
from holdfast.registry.saving.collective.shards import Ints, ShardEncoder, ShardLeaf
from holdfast.registry.values import Json, item_size

_REDISTRIBUTE = "Call .redistribute() with Shard or Replicate placements first."


@dataclass(frozen=True, slots=True)
class LocalShard:
    """This rank's part of a DTensor, computed from its placements once."""

    spec: Any  # the layout as torch holds it; a tensor with another layout has another spec
    mesh: DeviceMesh  # the mesh of the spec
    placements: tuple[Placement, ...]  # the placements of the spec
    whole: tuple[int, ...]  # the shape of the tensor
    offset: tuple[int, ...]  # the begin of the part in the tensor, on each axis
    extent: tuple[int, ...]  # the shape of the part
    is_copied: bool  # whether other ranks have the same part
    dtype: torch.dtype  # the element type
    name: str  # its stored name; empty for types that cannot be stored
    nbytes: int  # the size of the part

    def is_of(self, value: DTensor, local: torch.Tensor) -> bool:
        """Return whether it is the shard of a tensor with this local part."""
        spec = value._spec
        return (
            self.spec is spec
            and self.mesh is spec.mesh
            and self.placements is spec.placements
            and self.dtype is local.dtype
            and self.extent == local.shape
        )


def encode_dtensor(encoder: ShardEncoder, value: DTensor, link: Link, depth: int) -> Json:
    """Encode a DTensor as a leaf: this rank's part."""
    # This runs for each of a state's thousands of tensors, while the training waits.
    shard, local = next(encoder.before, None), value._local_tensor
    if shard is None or type(local) not in PLAIN or not shard.is_of(value, local):
        local = local_part(value)
        shard = _shard_of(encoder, value, local, link)
    encoder.shards.append(shard)
    opener = None
    if shard.name and not encoder.role:
        opener = opener_of(encoder, local, shard.name, shard.nbytes, link)
    if opener is None:
        encode_tensor(encoder, local, link, depth)  # refuses everything except sparse tensors
        encoder.refuse(link, "a sharded sparse tensor cannot be stored", "Gather it first.")
    is_ours = opener is not storage_of
    leaf = ShardLeaf(shard.name, shard.extent, shard.nbytes, local, opener, link, is_ours)
    leaf.whole, leaf.offset, leaf.is_copied = shard.whole, shard.offset, shard.is_copied
    leaves = encoder.leaves
    node: Json = {"t": len(leaves)}
    leaves.append(leaf)
    return node


def _shard_of(encoder: Encoder, value: DTensor, local: torch.Tensor, link: Link) -> LocalShard:
    """Compute this rank's shard of a tensor, and compare it with the local part."""
    if type(local) not in PLAIN:
        encoder.refuse(
            link,
            f"a DTensor over a {type(local).__name__} cannot be stored",
            "Store plain local tensors.",
        )
    found = box_of(value)
    if isinstance(found, str):
        encoder.refuse(link, found, _REDISTRIBUTE)
    offset, extent = found
    if value.device_mesh.get_coordinate() is None:
        extent = tuple(local.shape)  # this rank is not in the mesh and has no part
    if extent != tuple(local.shape):
        encoder.refuse(
            link,
            f"a DTensor whose local part is {tuple(local.shape)}; by its placements "
            f"{tuple(value.placements)} it should be {extent}",
            "torch made another part than it describes; gather it with .full_tensor() first.",
        )
    spec, name = value._spec, NAMES.get(local.dtype, "")
    return LocalShard(
        spec,
        spec.mesh,
        spec.placements,
        tuple(value.shape),
        offset,
        extent,
        _is_copied(value),
        local.dtype,
        name,
        prod(extent) * item_size(name) if name else 0,
    )


def encode_sharded_tensor(
    encoder: ShardEncoder, value: ShardedTensor, link: Link, depth: int
) -> Json:
    """Encode a tensor of FSDP1 as a leaf: this rank's part."""
    whole, shards = tuple(value.size()), value.local_shards()
    if len(shards) > 1:
        encoder.refuse(
            link, "a ShardedTensor with several parts on a rank", "Store its local shards."
        )
    offset, extent = (0,) * len(whole), (0,) * len(whole)
    local = torch.empty(extent, dtype=value.dtype, device="cpu")
    for shard in shards:
        offset, local = tuple(shard.metadata.shard_offsets), shard.tensor.detach()
    node = encode_tensor(encoder, local, link, depth)
    is_copied = dist.get_world_size(value._process_group) < dist.get_world_size()
    encoder.leaves[-1] = ShardLeaf.of(encoder.leaves[-1], whole, offset, is_copied=is_copied)
    return node


def local_part(value: DTensor) -> torch.Tensor:
    """Return the plain tensor of this rank's part."""
    with torch.no_grad():  # returns the part itself, without a new tensor
        local: Any = value.to_local()
    wait = getattr(local, "wait", None)  # of a tensor that is still being gathered
    made: torch.Tensor = local if wait is None else wait()
    return made


def box_of(value: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]] | str:
    """Return begin and extent of this rank's part, or why the part is no box."""
    mesh = value.device_mesh
    whole, coordinate = tuple(value.shape), mesh.get_coordinate()
    if coordinate is None:
        return (0,) * len(whole), (0,) * len(whole)
    order = getattr(value._spec, "shard_order", None) or ()  # older versions of torch have none
    if any(list(dims) != sorted(dims) for _, dims in order):
        return f"a DTensor that is split by mesh axes in another order than the mesh's: {order}"
    return _box(whole, tuple(value.placements), tuple(coordinate), _lengths(mesh))


@lru_cache(maxsize=64)
def _lengths(mesh: DeviceMesh) -> tuple[int, ...]:
    """Return the lengths of a mesh's axes, cached: torch computes them each time."""
    return tuple(mesh.shape)


@lru_cache(maxsize=8192)  # a state has thousands of tensors, and few layouts
def _box(
    whole: tuple[int, ...],
    placements: tuple[Placement, ...],
    coordinate: tuple[int, ...],
    lengths: tuple[int, ...],
) -> tuple[tuple[int, ...], tuple[int, ...]] | str:
    steps: dict[int, list[tuple[int, int, int]]] = {}
    for placement, at, size in zip(placements, coordinate, lengths, strict=True):
        if isinstance(placement, Partial):
            return f"a DTensor with the placement {placement!r} holds sums that were never made"
        if isinstance(placement, _StridedShard):
            steps.setdefault(placement.dim, []).append((size, at, int(placement.split_factor)))
        elif isinstance(placement, Shard):
            steps.setdefault(placement.dim, []).append((size, at, 1))
        elif not isinstance(placement, Replicate):
            return f"a DTensor with the unknown placement {placement}"
    offset, extent = [0] * len(whole), list(whole)
    for axis, some in steps.items():
        kept = _kept(whole[axis], tuple(some))
        if len(kept) and int(kept[-1] - kept[0]) + 1 != len(kept):
            return (
                f"a DTensor of {placements}: a _StridedShard without its match, "
                "whose part is not contiguous"
            )
        offset[axis], extent[axis] = (int(kept[0]) if len(kept) else 0), len(kept)
    return tuple(offset), tuple(extent)


@lru_cache(maxsize=1024)
def _kept(length: int, steps: tuple[tuple[int, int, int], ...]) -> Ints:
    """Return the indices of an axis that remain after splits, from the left mesh axis on."""
    kept: Ints = np.arange(length, dtype=np.int64)
    for parts, at, strides in steps:
        pieces = [_chunk(kept, strides, number) for number in range(strides)]
        kept = np.concatenate([_chunk(one, parts, at) for one in pieces])
    return kept


def _chunk(indices: Ints, parts: int, at: int) -> Ints:
    """Return one part of torch.chunk; the last parts may be empty."""
    rows = -(-len(indices) // parts)
    return indices[at * rows : (at + 1) * rows]


def _is_copied(value: DTensor) -> bool:
    placements: Sequence[Placement] = value.placements
    if not any(isinstance(one, Replicate) for one in placements):
        return False
    return any(
        size > 1 and isinstance(one, Replicate)
        for one, size in zip(placements, _lengths(value.device_mesh), strict=True)
    )
