"""Hypothesis strategies for everything that a state can hold."""

from __future__ import annotations

import datetime as dt
import decimal
import pathlib
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from zoneinfo import ZoneInfo

import ml_dtypes
import numpy as np
import torch
from hypothesis import strategies as st

from holdfast.registry.pytree.containers import FACTORIES
from holdfast.registry.pytree.torch_memory import DTYPES

floats = st.integers(0, 2**64 - 1).map(lambda bits: struct.unpack("<d", struct.pack("<Q", bits))[0])
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
ints = (
    st.integers() | st.integers(-(2**200), 2**200) | st.sampled_from([2**53, 2**53 + 1, -(2**53)])
)
shapes = st.lists(st.integers(0, 3), max_size=3).map(tuple)
zones = st.sampled_from(
    [
        None,
        dt.UTC,
        dt.timezone(dt.timedelta(hours=-3, minutes=-30)),
        dt.timezone(dt.timedelta(seconds=1), "odd"),
        dt.timezone(dt.timedelta(0), "Zulu"),
        ZoneInfo("UTC"),
    ]
)
moments = st.builds(
    lambda value, fold, zone: value.replace(fold=fold, tzinfo=zone),
    st.datetimes() | st.times(),
    st.integers(0, 1),
    zones,
)
ARRAY_DTYPES = [
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
    *("datetime64[ns]", "timedelta64[25s]"),
    *(ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2fnuz),
]


@st.composite
def tensors(draw):
    dtype = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
    shape = draw(shapes)
    count = int(np.prod(shape)) * dtype.itemsize
    raw = draw(st.binary(min_size=count, max_size=count))
    if dtype is torch.bool:
        raw = bytes(byte & 1 for byte in raw)
    flat = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.empty(0).byte()
    tensor = flat.view(dtype).view(shape)
    if tensor.is_complex() and draw(st.booleans()):
        return draw(st.sampled_from([tensor.conj(), tensor.conj().imag]))
    if tensor.dim() > 1 and draw(st.booleans()):
        return tensor.transpose(0, -1)
    if draw(st.booleans()):
        return tensor.unsqueeze(0).expand(2, *shape)
    if tensor.dtype.is_floating_point and draw(st.booleans()):
        return torch.nn.Parameter(tensor)
    return tensor


@st.composite
def arrays(draw):
    dtype = np.dtype(draw(st.sampled_from(ARRAY_DTYPES)))
    shape = draw(shapes)
    count = int(np.prod(shape)) * dtype.itemsize
    raw = draw(st.binary(min_size=count, max_size=count))
    if dtype == np.bool_:
        raw = bytes(byte & 1 for byte in raw)
    array = np.frombuffer(bytearray(raw), dtype).reshape(shape)
    return draw(st.sampled_from([array, array.T, array[::-1] if shape else array]))


scalars = st.builds(
    lambda dtype, raw: np.frombuffer(
        bytes(b & 1 for b in raw) if dtype == "bool" else raw, dtype, count=1
    )[0],
    st.sampled_from(ARRAY_DTYPES[:-3]),
    st.binary(min_size=16, max_size=16),
)
hashables = (
    st.none()
    | st.booleans()
    | ints
    | floats
    | texts
    | st.binary(max_size=8)
    | st.builds(complex, floats, floats)
    | moments
    | st.dates()
    | st.timedeltas()
    | st.uuids()
    | st.decimals(allow_nan=False)
    | st.fractions()
    | texts.map(pathlib.Path)
    | texts.map(pathlib.PurePosixPath)
    | texts.map(pathlib.PureWindowsPath)
    | st.builds(range, ints, ints, ints.filter(bool))
    | st.just(...)
    | shapes.map(torch.Size)
    | st.sampled_from(
        [torch.float32, torch.qint8, torch.bits8, torch.device("cuda:1"), torch.__version__]
    )
    | st.sampled_from([np.dtype("f4"), np.dtype(">i8"), np.dtype("U5"), np.dtype("M8[ns]")])
    | scalars.filter(lambda value: value == value)
)
keys = hashables | st.tuples(hashables, texts)
# Without a bound, sets of equal values (1 and True) would be refused by Python, not by us.
leaves = (
    hashables
    | tensors()
    | arrays()
    | st.sampled_from(
        [decimal.Decimal("NaN123"), decimal.Decimal("-sNaN"), decimal.Decimal("-0E9")]
    )
    | st.builds(slice, ints, st.none(), ints)
    | st.binary(max_size=8).map(bytearray)
    | st.sampled_from([b"x" * 5000, bytearray(5000), "ä" * 40_000])
    | st.sets(keys, max_size=3)
    | st.frozensets(keys, max_size=3)
)


def _containers(inner):
    dicts = st.dictionaries(keys, inner, max_size=3)
    lists = st.lists(inner, max_size=3)
    return (
        lists
        | lists.map(tuple)
        | dicts
        | dicts.map(OrderedDict)
        | dicts.map(Counter)
        | st.builds(defaultdict, st.sampled_from([None, *FACTORIES.values()]), dicts)
        | st.builds(lambda items, extra: deque(items, len(items) + extra), lists, st.integers(0, 2))
        | lists.map(deque)
    )


values = st.recursive(leaves, _containers, max_leaves=12)
states = st.dictionaries(texts, values, max_size=3) | st.dictionaries(
    texts, values, max_size=3
).map(OrderedDict)
