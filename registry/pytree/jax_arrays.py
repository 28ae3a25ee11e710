"""The codec of jax arrays: they are stored as numpy arrays, and loaded as such. Imports jax."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from holdfast.registry.pytree import numpy_arrays
from holdfast.registry.pytree.encoding import FAMILIES, Encoder
from holdfast.registry.pytree.leaves import ArrayLeaf
from holdfast.registry.pytree.paths import Link
from holdfast.registry.values import Json


def encode_array(encoder: Encoder, value: jax.Array, link: Link, depth: int) -> Json:  # noqa: ARG001
    """Encode an array of any sharding as a leaf, with the bytes of the numpy array."""
    if isinstance(value, jax.core.Tracer):
        encoder.refuse(
            link, "a jax array inside a transformation has no data", "Save outside of jax.jit."
        )
    if value.is_deleted():
        encoder.refuse(
            link,
            "a jax array whose memory was donated or deleted",
            "Save the result of the function that took it.",
        )
    if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        hint = "Store holdfast.jax.pack(x), or jax.random.key_data(x)."
        encoder.refuse(link, "a jax key cannot be stored", hint)
    if not value.is_fully_addressable:
        encoder.refuse(
            link,
            "a jax array with parts in other processes cannot be stored",
            "Bring it together first: jax.experimental.multihost_utils.process_allgather(x, "
            "tiled=True); then save on process 0.",
        )
    name = numpy_arrays.name_of(np.dtype(value.dtype))
    if name is None:
        encoder.refuse(
            link,
            f"a jax array of {value.dtype} cannot be stored",
            "Convert it (.astype); holdfast.jax.pack(x) does for small integers.",
        )
    # Nobody writes to a jax array, and one that is viewed is not donated.
    leaf = ArrayLeaf(name, value.shape, value.nbytes, value, _memory_of, link, is_ours=True)
    return {"n": encoder.add(leaf, link)}


def _memory_of(value: jax.Array, nbytes: int) -> memoryview:  # noqa: ARG001
    """Return the bytes of an array, from one copy of each of its parts."""
    parts = [one for one in value.addressable_shards if one.replica_id == 0]
    if len(parts) == 1:
        return numpy_arrays.memory_of(on_host(parts[0]))
    whole: np.ndarray[Any, Any] = np.empty(value.shape, value.dtype)
    for part in parts:
        whole[part.index] = on_host(part)
    return numpy_arrays.memory_of(whole)


def on_host(part: Any) -> np.ndarray[Any, Any]:
    """Return the data of a part of an array; on the CPU without a copy."""
    return np.asarray(part.data)


FAMILIES[jax.Array] = encode_array
