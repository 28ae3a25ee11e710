"""Codecs of torch values. This module and `torch_memory` are the only ones that import torch."""

from __future__ import annotations

import re
from functools import partial
from typing import Any, NoReturn

import torch
from torch.torch_version import TorchVersion

from holdfast.registry.pytree.decoding import DECODERS, Decoder, atom, pack_int, unpack_int
from holdfast.registry.pytree.encoding import HANDLERS, Encoder
from holdfast.registry.pytree.leaves import ArrayLeaf, Opener
from holdfast.registry.pytree.paths import Link, clip
from holdfast.registry.pytree.torch_memory import (
    ALL_DTYPES,
    NAMES,
    PLAIN,
    allocate,
    copy_of,
    describe,
    has_memory,
    over,
    quiet,
    storage_of,
    view_of,
)
from holdfast.registry.values import Json

__all__ = ["allocate", "describe", "over", "view_of"]

#: The longest version of torch, in characters.
_MAX_VERSION = 1000
#: What torch raises for the parts of a sparse tensor that do not fit.
_BROKEN = (RuntimeError, ValueError, TypeError, IndexError)
_DEVICE = re.compile(r"[a-z_]+(:[0-9]{1,4})?")

#: Compressed layout -> its tag, and the accessors of its two index tensors.
_COMPRESSED: dict[torch.layout, tuple[str, str, str]] = {
    torch.sparse_csr: ("csr", "crow_indices", "col_indices"),
    torch.sparse_csc: ("csc", "ccol_indices", "row_indices"),
    torch.sparse_bsr: ("bsr", "crow_indices", "col_indices"),
    torch.sparse_bsc: ("bsc", "ccol_indices", "row_indices"),
}


# Tensors


def encode_tensor(encoder: Encoder, value: torch.Tensor, link: Link, depth: int) -> Json:
    """Encode a tensor or parameter as a leaf; a sparse one as its parts."""
    # This runs for each of a state's thousands of tensors, so it calls torch as seldom as possible.
    # Layouts other than strided have no storage or shape, and raise when asked for them.
    name = NAMES.get(value.dtype)
    if name is None or encoder.role:
        return _encode_special(encoder, value, link, depth)
    try:
        shape, nbytes = tuple(value.shape), value.nbytes
    except (RuntimeError, NotImplementedError):
        return _encode_special(encoder, value, link, depth)
    opener = opener_of(encoder, value, name, nbytes, link)
    if opener is None:
        return _encode_special(encoder, value, link, depth)
    leaves = encoder.leaves
    node: Json = {"t": len(leaves)}
    leaves.append(ArrayLeaf(name, shape, nbytes, value, opener, link, opener is copy_of))
    return node


def opener_of(
    encoder: Encoder, value: torch.Tensor, name: str, nbytes: int, link: Link
) -> Opener | None:
    """Return the opener of a tensor's bytes; `None` if it is not strided or has no bytes."""
    try:
        if value.is_cpu:
            held = value.untyped_storage().nbytes()
            if value.is_contiguous():
                if (held != nbytes or value.storage_offset()) and not has_memory(value, nbytes):
                    _refuse_without_memory(encoder, link)
                if not (value.is_neg() or (name[0] == "c" and value.is_conj())):
                    return storage_of
            elif nbytes and not held:
                _refuse_without_memory(encoder, link)
        elif value.is_meta or value.layout is not torch.strided:
            return None
    except (RuntimeError, NotImplementedError):
        return None
    return copy_of


def _refuse_without_memory(encoder: Encoder, link: Link) -> NoReturn:
    encoder.refuse(
        link,
        "a tensor whose memory has been released",
        "Its storage was resized; gather or unshard it first.",
    )


def _encode_special(encoder: Encoder, value: torch.Tensor, link: Link, depth: int) -> Json:
    if encoder.role:
        encoder.refuse_array(link)
    if value.is_nested:
        encoder.refuse(link, "a nested tensor cannot be stored", "Store the list of its .unbind().")
    if value.is_quantized:
        encoder.refuse(
            link,
            "a quantized tensor cannot be stored",
            "Store its .int_repr(), scale and zero point.",
        )
    if value.is_meta:
        encoder.refuse(link, "a meta tensor has no data", "Load or initialise the module first.")
    if value.dtype not in NAMES:
        encoder.refuse(
            link, f"a tensor of {value.dtype} cannot be stored", "View it as torch.uint8 (.view)."
        )
    if value.layout is torch.strided:
        encoder.refuse(
            link,
            "a tensor without storage of its own cannot be stored",
            "Save outside torch.func transforms and forward-mode differentiation.",
        )
    if value.layout is torch.sparse_coo or value.layout in _COMPRESSED:
        return _encode_sparse(encoder, value.detach(), link, depth)
    return encoder.refuse(
        link, f"a tensor of layout {value.layout} cannot be stored", "Store its .to_dense()."
    )


def _encode_sparse(encoder: Encoder, value: torch.Tensor, link: Link, depth: int) -> Json:
    """Encode the parts of a sparse tensor, if a load can build it from them."""
    flags: list[Json] = []
    if value.layout is torch.sparse_coo:
        tag, flags = "coo", [value.is_coalesced()]
        parts = {"indices": value._indices(), "values": value._values()}
    else:
        tag, outer, inner = _COMPRESSED[value.layout]
        parts = {name: getattr(value, name)() for name in (outer, inner, "values")}
    with encoder.inside(value, link, depth):
        nodes = [encode_tensor(encoder, part, (link, name), depth) for name, part in parts.items()]
    try:
        with quiet():
            _build_sparse(value.layout, list(value.shape), any(flags), list(parts.values()))
    except _BROKEN as error:
        what = f"a sparse tensor that breaks torch's invariants ({error})"
        encoder.refuse(link, what, "Build it with check_invariants=True.")
    return {tag: [[*value.shape], *flags, *nodes]}


def _decode_sparse(
    decoder: Decoder, payload: Any, link: Link, depth: int, layout: torch.layout
) -> Any:
    is_coo = layout is torch.sparse_coo
    decoder.check_list(payload, link, depth, 4)
    shape, *nodes = payload
    is_coalesced = nodes.pop(0) if is_coo else False
    if type(shape) is not list or any(type(n) is not int for n in shape):
        decoder.malformed(link, "a bad shape", "a list of integers", clip(shape))
    if type(is_coalesced) is not bool:
        decoder.malformed(link, "a bad flag", "true or false", clip(is_coalesced))
    names = ("indices", "values") if is_coo else (*_COMPRESSED[layout][1:], "values")
    parts = [
        decoder.node(node, (link, name), depth + 1) for name, node in zip(names, nodes, strict=True)
    ]
    if any(type(part) not in PLAIN for part in parts):
        decoder.malformed(link, "a part of a sparse tensor is no tensor", "a tensor", "other")
    try:
        with quiet():
            return _build_sparse(layout, shape, is_coalesced, parts)
    except _BROKEN as error:
        decoder.malformed(
            link, "inconsistent parts of a sparse tensor", "torch's invariants", error
        )


def _build_sparse(
    layout: torch.layout, shape: list[int], is_coalesced: bool, parts: list[torch.Tensor]
) -> torch.Tensor:
    if layout is torch.sparse_coo:
        indices, values = parts
        return torch.sparse_coo_tensor(
            indices, values, shape, is_coalesced=is_coalesced, check_invariants=True
        )
    outer, inner, values = parts
    return torch.sparse_compressed_tensor(
        outer, inner, values, shape, layout=layout, check_invariants=True
    )


for _cls in PLAIN:
    HANDLERS[_cls] = encode_tensor
DECODERS["coo"] = partial(_decode_sparse, layout=torch.sparse_coo)
for _layout, (_tag, _, _) in _COMPRESSED.items():
    DECODERS[_tag] = partial(_decode_sparse, layout=_layout)


# Small values


def _unpack_device(text: Any) -> torch.device:
    if not _DEVICE.fullmatch(text):
        raise ValueError("not the name of a device")
    return torch.device(text)


def _unpack_size(payload: Any) -> torch.Size:
    if type(payload) is not list:
        raise ValueError("not a list")
    return torch.Size([unpack_int(length) for length in payload])


def _pack_version(value: TorchVersion) -> Json:
    text = str(value)
    text.encode()
    if len(text) > _MAX_VERSION:
        raise ValueError(f"a version has at most {_MAX_VERSION} characters")
    return text


def _unpack_version(text: Any) -> TorchVersion:
    if type(text) is not str:
        raise ValueError("not a string")
    return TorchVersion(text)


atom(torch.Size, "ts", lambda value: [pack_int(length) for length in value], _unpack_size)
atom(torch.dtype, "tt", lambda value: str(value).removeprefix("torch."), ALL_DTYPES.__getitem__)
atom(torch.device, "tv", str, _unpack_device)
atom(TorchVersion, "tver", _pack_version, _unpack_version)
