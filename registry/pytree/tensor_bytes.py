"""Tensors of torch as their bytes, for files that are only passed on: no torch is needed for it."""

from __future__ import annotations

import math
from typing import Any

from holdfast.registry.errors import IncompatibleState, UnsupportedValue
from holdfast.registry.pytree import libraries
from holdfast.registry.pytree.decoding import DECODERS, Decoder
from holdfast.registry.pytree.encoding import HANDLERS, Encoder
from holdfast.registry.pytree.leaves import ArrayLeaf
from holdfast.registry.pytree.paths import Link
from holdfast.registry.pytree.refusals import is_tensor_like
from holdfast.registry.values import Json, item_size

#: Libraries count the bytes of a tensor in signed numbers of 64 bits, as if no axis were empty.
_NUMBERS = 2**63


class TensorBytes:
    """A tensor in host memory; saving it gives the same bytes as saving the tensor of torch."""

    __slots__ = ("data", "dtype", "shape")

    def __init__(self, dtype: str, shape: tuple[int, ...], data: memoryview) -> None:
        self.dtype = dtype  # element type, a name of `holdfast.registry.values.dtypes.ITEM_SIZES`
        self.shape = shape  # lengths of the axes, in elements
        #: Its bytes: flat, C order, little-endian. Nobody writes to them any more once the tensor
        #: is part of a state.
        self.data = data
        # An empty tensor may claim any lengths, and would be stored and never loaded.
        if math.prod(filter(None, shape)) * item_size(dtype) >= _NUMBERS:
            raise UnsupportedValue(
                "no library makes a tensor of this shape", found=str(list(shape))[:200]
            )


def allocate_bytes(dtype: str, shape: tuple[int, ...]) -> tuple[TensorBytes, memoryview]:
    """Return a new tensor and its bytes, not cleared."""
    nbytes = math.prod(shape) * item_size(dtype)
    try:
        _, data = libraries.numpy_wrapper().allocate("uint8", (nbytes,))
    except (MemoryError, ValueError) as error:
        raise IncompatibleState(
            "a tensor does not fit into memory", found=f"{nbytes} bytes"
        ) from error
    return TensorBytes(dtype, shape, data), data


def as_torch(tensor: TensorBytes) -> Any:
    """Return a tensor of torch over the same memory, or over a copy where that is not possible."""
    torch = libraries.torch_wrapper()
    made = torch.over(tensor.dtype, tensor.shape, tensor.data)
    if made is None:
        made, data = torch.allocate(tensor.dtype, tensor.shape)
        data[:] = tensor.data
    return made


def _encode(encoder: Encoder, value: TensorBytes, link: Link, depth: int) -> Json:  # noqa: ARG001
    nbytes = value.data.nbytes
    leaf = ArrayLeaf(value.dtype, value.shape, nbytes, value, _data_of, link, is_ours=True)
    return {"t": encoder.add(leaf, link)}


def _data_of(value: TensorBytes, nbytes: int) -> memoryview:  # noqa: ARG001
    return value.data


def _decode(decoder: Decoder, payload: Any, link: Link, depth: int) -> Any:  # noqa: ARG001
    """Return the tensor that was loaded, in either form."""
    value = decoder.array(payload, link)
    if not isinstance(value, TensorBytes) and not is_tensor_like(value):
        decoder.malformed(link, "not a tensor", "a tensor", type(value).__name__)
    return value


HANDLERS[TensorBytes] = _encode
DECODERS["t"] = _decode
