"""The layout that the document of the format describes; the programs of Thalia write another one.

Header and metadata are those of a real file. The index follows the metadata, and each region has a
binary header and its own sections. Where the document contradicts itself, its tables of fields
count: an entry of the index has 48 bytes, not 40, and one of a connection 96, not 64. Weights have
no names there, so they get their numbers. The dynamic state has no place in the header of a region;
a file cannot say where it would be.
"""

from __future__ import annotations

import math
import struct
import zlib
from typing import Any, Final

import numpy as np

from holdfast.registry.formats.state_file import FileReport, FileState, TensorHeader
from holdfast.registry.formats.thalia.framing import Body, Entry, Header, read_header, read_index
from holdfast.registry.formats.thalia.tensors import has_repeated, read_json
from holdfast.registry.pytree import TensorBytes
from holdfast.registry.pytree import allocate_bytes as allocate
from holdfast.registry.values import item_size

_REGION: Final = struct.Struct("<IIIIQQQQQQ")
_DENSE: Final = struct.Struct("<BBHQQQI")
_CSR: Final = struct.Struct("<B3xQQQI")
_HOMEOSTATIC: Final = struct.Struct("<IIQ")
_CONNECTIONS_BYTES: Final = 32
_CONNECTION: Final = struct.Struct("<32s32sQQQQ")
_DTYPES: Final = ("float32", "float16", "int8")
_NEURONS: Final = ("LIF", "ConductanceLIF")
_ENCODINGS: Final = ("dense", "sparse_csr")
_Tensor = TensorBytes | TensorHeader


def read(body: Body, name: str) -> FileState:
    """Read a file as a state; with headers in place of tensors, if the body is without data."""
    header = read_header(body)
    state: dict[str, Any] = {"regions": {}, "pathways": {}, "metadata": {}}
    state["training_steps"] = header.training_steps
    with body.faults:
        at, length = header.metadata_offset, header.metadata_length
        state["metadata"] = read_json(body, at, length, "the metadata")
    for entry in read_index(body, header):
        with body.faults:
            state["regions"][entry.name] = _region(body, entry)
    with body.faults:
        state["pathways"] = _connections(body, header)
    return FileState(state, name, body.file_bytes, state["metadata"])


def inspect(body: Body, name: str) -> FileReport:
    """Describe a file."""
    body.with_data = False
    found = read(body, name)
    tensors = {
        f"{kind}/{part}/{path}": tensor
        for kind in ("regions", "pathways")
        for part, values in found.state[kind].items()  # type: ignore[index]
        for path, tensor in _tensors(values)
    }
    header = read_header(body).totals()
    return FileReport(name, body.file_bytes, tensors, found.metadata, header)


def _tensors(values: dict[str, Any]) -> list[tuple[str, TensorHeader]]:
    found = []
    for key, value in values.items():
        if isinstance(value, TensorHeader):
            found.append((key, value))
        elif isinstance(value, dict):
            found += [(f"{key}/{path}", tensor) for path, tensor in _tensors(value)]
    return found


# Regions


def _region(body: Body, entry: Entry) -> dict[str, Any]:
    where = f"regions/{entry.name}"
    body.check_range(entry.offset, entry.length, where)
    if entry.length < _REGION.size:
        body.broken(where, "a region is shorter than its header")
    neurons, inputs, kind, encoding, *sections = _REGION.unpack(
        body.read(entry.offset, _REGION.size, where)
    )
    if kind >= len(_NEURONS) or encoding >= len(_ENCODINGS):
        body.broken(
            where,
            "an unknown type of neuron or encoding",
            expected="0 or 1",
            found=f"{kind} and {encoding}",
        )
    config, weights, homeostatic = zip(sections[::2], sections[1::2], strict=True)
    for offset, length in (config, weights, homeostatic):
        if offset + length > entry.length:
            body.broken(where, "a section is not within its region")
    found: dict[str, Any] = {
        "n_neurons": neurons,
        "n_inputs": inputs,
        "neuron_type": _NEURONS[kind],
        "config": _json(body, entry.offset + config[0], config[1], f"{where}/config"),
        "weights": _weights(body, entry.offset, weights, encoding, where),
    }
    if homeostatic[1]:
        found["homeostatic"] = _homeostatic(
            body, entry.offset + homeostatic[0], homeostatic[1], where
        )
    end = max(_REGION.size, *(offset + length for offset, length in (config, weights, homeostatic)))
    found["metadata"] = _json(body, entry.offset + end, entry.length - end, f"{where}/metadata")
    return found


def _json(body: Body, offset: int, length: int, where: str) -> dict[str, Any]:
    return read_json(body, offset, length, where) if length else {}


def _weights(
    body: Body, start: int, section: tuple[int, int], encoding: int, where: str
) -> dict[str, _Tensor]:
    """Read the tensors of a section, one behind the other."""
    found: dict[str, _Tensor] = {}
    at, end = start + section[0], start + sum(section)
    while at < end:
        name = f"{where}/weights/{len(found)}"
        tensor, at = (_csr if encoding else _dense)(body, at, end, name)
        found[str(len(found))] = tensor
    return found


def _dense(body: Body, at: int, end: int, where: str) -> tuple[_Tensor, int]:
    if end - at < _DENSE.size:
        body.broken(where, "a tensor is shorter than its header")
    code, axes, _, *lengths, checksum = _DENSE.unpack(body.read(at, _DENSE.size, where))
    if code >= len(_DTYPES) or axes > len(lengths):
        body.broken(
            where,
            "not the header of a tensor",
            expected=f"dtype 0 to {len(_DTYPES) - 1}, at most {len(lengths)} axes",
            found=f"{code}, {axes}",
        )
    shape, data = tuple(lengths[:axes]), at + _DENSE.size
    nbytes = math.prod(shape) * item_size(_DTYPES[code])
    if nbytes > end - data:
        body.broken(
            where,
            "a tensor is not within its section",
            expected=f"at most {end - data} bytes",
            found=f"{nbytes} bytes",
        )
    if not body.with_data:
        return TensorHeader(_DTYPES[code], shape), data + nbytes
    body.budget.take(nbytes)
    tensor, view = allocate(_DTYPES[code], shape)
    body.read_into(data, view)
    _check_crc(body, zlib.crc32(view), checksum, where)
    return tensor, data + nbytes


def _csr(body: Body, at: int, end: int, where: str) -> tuple[_Tensor, int]:
    """Read a sparse matrix as a dense one."""
    if end - at < _CSR.size:
        body.broken(where, "a matrix is shorter than its header")
    code, rows, columns, nnz, checksum = _CSR.unpack(body.read(at, _CSR.size, where))
    nbytes = 4 * (rows + 1 + 2 * nnz)
    if code or nbytes > end - at - _CSR.size or nnz > rows * columns:
        body.broken(
            where,
            "a sparse matrix has another dtype than float32, or is not within its section",
            found=f"dtype {code}, {rows} x {columns}, {nnz} values",
        )
    if not body.with_data:
        return TensorHeader("float32", (rows, columns)), at + _CSR.size + nbytes
    body.budget.take(rows * columns * 4)
    raw = body.read(at + _CSR.size, nbytes, where)
    _check_crc(body, zlib.crc32(raw), checksum, where)
    starts = np.frombuffer(raw, "<u4", rows + 1).astype(np.int64)
    indices = np.frombuffer(raw, "<u4", nnz, 4 * (rows + 1)).astype(np.int64)
    counts = np.diff(starts)
    if starts[0] or starts[-1] != nnz or np.any(counts < 0) or np.any(indices >= columns):
        body.broken(where, "the rows of a sparse matrix do not fit each other")
    tensor, view = allocate("float32", (rows, columns))
    view[:] = bytes(len(view))
    flat = np.repeat(np.arange(rows), counts) * columns + indices
    if has_repeated(flat):
        body.broken(where, "a coordinate of a sparse matrix is repeated")
    np.frombuffer(view, "<u4")[flat] = np.frombuffer(raw, "<u4", nnz, 4 * (rows + 1 + nnz))
    return tensor, at + _CSR.size + nbytes


def _check_crc(body: Body, found: int, expected: int, where: str) -> None:
    with body.faults:
        if found != expected:
            body.broken(where, "the checksum of a tensor is wrong", expected=expected, found=found)


def _homeostatic(body: Body, at: int, length: int, where: str) -> dict[str, Any]:
    place = f"{where}/homeostatic"
    if length < _HOMEOSTATIC.size:
        body.broken(place, "a section is shorter than its header")
    count, _, updated = _HOMEOSTATIC.unpack(body.read(at, _HOMEOSTATIC.size, place))
    if length != _HOMEOSTATIC.size + 8 * count:
        body.broken(
            place,
            "a section has another length than its neurons need",
            expected=_HOMEOSTATIC.size + 8 * count,
            found=length,
        )
    found: dict[str, Any] = {"timestamp_updated": updated}
    for number, name in enumerate(("thresholds", "scaling_factors")):
        if not body.with_data:
            found[name] = TensorHeader("float32", (count,))
            continue
        body.budget.take(4 * count)
        found[name], view = allocate("float32", (count,))
        body.read_into(at + _HOMEOSTATIC.size + number * 4 * count, view)
    return found


# Connections


def _connections(body: Body, header: Header) -> dict[str, Any]:
    """Read the connections, each under `source->target`."""
    if not header.connectivity_length:
        return {}
    where, at = "the connections", header.connectivity_offset
    body.check_range(at, header.connectivity_length, where)
    (count,) = struct.unpack_from("<I", body.read(at, _CONNECTIONS_BYTES, where))
    at += _CONNECTIONS_BYTES
    found: dict[str, Any] = {}
    for _ in range(count):
        source, target, *sections = _CONNECTION.unpack(body.read(at, _CONNECTION.size, where))
        at += _CONNECTION.size
        name = "->".join(
            part.split(b"\0", 1)[0].decode(errors="ignore") for part in (source, target)
        )
        if name in found:
            body.broken(name, "two connections have the same ends")
        found[name] = {}
        for kind, offset, length in (("weights", *sections[:2]), ("delays", *sections[2:])):
            place = f"pathways/{name}/{kind}"
            with body.faults:
                if length:
                    body.check_range(offset, length, place)
                    found[name][kind] = _matrix(body, offset, offset + length, place)
    return found


def _matrix(body: Body, at: int, end: int, where: str) -> _Tensor:
    """Read a matrix; its length tells whether it is dense, since nothing else does."""
    code, axes, _, *lengths, _ = _DENSE.unpack(body.read(at, _DENSE.size, where))
    is_dense = (
        code < len(_DTYPES)
        and axes <= len(lengths)
        and math.prod(lengths[:axes]) * item_size(_DTYPES[code]) == end - at - _DENSE.size
    )
    tensor, stop = (_dense if is_dense else _csr)(body, at, end, where)
    if stop != end:
        body.broken(where, "a matrix has another length")
    return tensor
