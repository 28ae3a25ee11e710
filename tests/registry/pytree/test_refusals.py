"""What cannot be stored is refused with the path and with what to do instead."""

from __future__ import annotations

import argparse
import array
import collections
import contextlib
import dataclasses
import datetime as dt
import decimal
import enum
import fractions
import io
import pathlib
import random
import re
import struct
import threading
import types
import weakref
import zoneinfo
from typing import NamedTuple

import numpy as np
import pytest
import torch

from holdfast.registry.errors import UnsupportedValue
from holdfast.registry.pytree import flatten
from holdfast.registry.pytree.traversal import walk
from tests.support.sameness import assert_same, through


class Point(NamedTuple):
    x: int
    y: int


class Colour(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    LOW = 1


@dataclasses.dataclass
class Config:
    lr: float = 0.1


class Text(str):
    __slots__ = ()


class Local(dt.tzinfo):
    def utcoffset(self, when):
        return dt.timedelta(0)


class Plain:
    pass


class Tagged(torch.Tensor):
    pass


def _generator():
    yield 1


ONE = torch.zeros(1)
SLOTTED = Plain()
REFUSED = {
    "function": (lambda: 0, "a function cannot be stored"),
    "builtin": (len, "a function"),
    "method": ([].append, "a function"),
    "module": (random, "a module"),
    "class": (np.float32, "a class"),
    "generator": (_generator(), "a generator"),
    "iterator": (iter([1]), "an iterator"),
    "lock": (threading.Lock(), "a lock or thread"),
    "rlock": (threading.RLock(), "a lock or thread"),
    "event": (threading.Event(), "a lock or thread"),
    "file": (io.BytesIO(), "an open file"),
    "torch generator": (torch.Generator(), ".get_state()"),
    "numpy generator": (np.random.default_rng(1), ".bit_generator.state"),
    "bit generator": (np.random.PCG64(1), "its .state"),
    "legacy generator": (np.random.RandomState(1), ".get_state()"),
    "random": (random.Random(1), ".getstate()"),
    "named tuple": (Point(1, 2), "a named tuple"),
    "enum": (Colour.RED, "an enum member"),
    "int enum": (Level.LOW, "an enum member"),
    "dataclass": (Config(), "dataclasses.asdict"),
    "str subclass": (Text("x"), "a subclass of str"),
    "np.str_": (np.str_("x"), "str(x)"),
    "np.bytes_": (np.bytes_(b"x"), "bytes(x)"),
    "longdouble": (np.longdouble(1), "differ between machines"),
    "void": (np.void(b"ab"), "cannot be stored"),
    "weakref": (weakref.ref(SLOTTED), "a weak reference"),
    "namespace": (argparse.Namespace(a=1), "vars(x)"),
    "simple namespace": (types.SimpleNamespace(a=1), "vars(x)"),
    "array.array": (array.array("d", [1.0]), "numpy.asarray"),
    "memoryview": (memoryview(b"x"), "bytes(x)"),
    "mapping": (types.MappingProxyType({}), "dict(x)"),
    "dict subclass": (type("Sub", (dict,), {})(), "a subclass of dict"),
    "object": (Plain(), "Register an adapter"),
    "callable": (contextlib.nullcontext, "a class"),
    "surrogate": ("a\ud800", "lone surrogate at character 1"),
    "default factory": (collections.defaultdict(lambda: 0), "a defaultdict of"),
    "fraction": (fractions.Fraction(1, 2**20000), "16384 bits"),
    "time zone": (dt.datetime(2026, 1, 1, tzinfo=Local()), "its time zone is a Local"),
    "object array": (np.array([None]), "an object array"),
    "structured": (np.zeros(1, "i4,f4"), "a structured array"),
    "string array": (np.array(["a"]), ".tolist()"),
    "void array": (np.zeros(1, "V3"), "numpy.uint8"),
    "big endian": (np.zeros(1, ">f4"), "byte order unsupported"),
    "long double array": (np.zeros(1, np.longdouble), "differ between machines"),
    "memmap": (np.zeros(1).view(np.memmap), "numpy.array(x)"),
    "matrix": (np.zeros((1, 1)).view(np.matrix), "numpy.asarray(x)"),
    "masked": (np.ma.masked_array([1]), "numpy.asarray(x)"),
    "structured dtype": (np.dtype("i4,f4"), "cannot be stored"),
    "meta tensor": (torch.empty(1, device="meta"), "has no data"),
    "tensor subclass": (Tagged([1.0]), "as_subclass(torch.Tensor)"),
    "uninitialised": (torch.nn.UninitializedParameter(), "one forward pass"),
    "storage": (ONE.untyped_storage(), "a tensor over it"),
    "bits": (torch.zeros(1, dtype=torch.uint8).view(torch.bits8), "torch.uint8"),
    "mkldnn": (ONE.to_mkldnn(), ".to_dense()"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", REFUSED)
def test_the_message_names_path_kind_and_remedy(name):
    value, text = REFUSED[name]
    state = {"a": 1, "scheduler": {"lr_lambdas": [0, (value,)], 3: {}}}
    with pytest.raises(UnsupportedValue) as caught:
        flatten(state)
    message = str(caught.value)
    assert message.startswith("state['scheduler']['lr_lambdas'][1][0]: ")
    assert text in message
    assert caught.value.hint


@pytest.mark.filterwarnings("ignore")
def test_nested_and_quantized_tensors():
    for value, text in [
        (torch.nested.nested_tensor([ONE, ONE]), "nested tensor"),
        (torch.nested.nested_tensor([ONE, ONE], layout=torch.jagged), "NestedTensor"),
        (torch.quantize_per_tensor(ONE, 0.1, 0, torch.qint8), "quantized tensor"),
    ]:
        with pytest.raises(UnsupportedValue, match=re.escape("state['x']") + ".*" + text):
            flatten({"x": value})


def test_released_storage():
    tensor = torch.zeros(8)
    tail = tensor[4:]
    spread = tensor[::2]
    tensor.untyped_storage().resize_(0)
    for value in (tensor, tail, spread):
        with pytest.raises(UnsupportedValue, match="memory has been released"):
            flatten({"x": value})


def test_example_of_the_design():
    with pytest.raises(UnsupportedValue) as caught:
        flatten({"scheduler": {"lr_lambdas": [lambda epoch: 1.0]}})
    assert str(caught.value).startswith(
        "state['scheduler']['lr_lambdas'][0]: a function cannot be stored"
    )


@pytest.mark.parametrize("state", [[1], None, {1: 2}, {b"a": 1}, ONE, {"a\ud800": 1}])
def test_what_is_not_a_state(state):
    with pytest.raises(UnsupportedValue, match="state"):
        flatten(state)


def test_circles_are_named_where_they_close():
    inner: dict = {}
    inner["again"] = [inner]
    with pytest.raises(UnsupportedValue, match=r"state\['x'\]\['again'\]\[0\]: a circular"):
        flatten({"x": inner})
    state: dict = {}
    state["me"] = {"state": state}
    with pytest.raises(UnsupportedValue, match=r"state\['me'\]\['state'\]: a circular"):
        flatten(state)


def test_the_same_list_twice_is_no_circle():
    shared = [1]
    assert flatten({"x": [shared, shared]}).components[0].skeleton == [[1], [1]]


def test_depth():
    value: object = 0
    for _ in range(100):
        value = [value]
    with pytest.raises(UnsupportedValue, match="more than 100 levels"):
        flatten({"x": value})


def _in_lists(value: object, levels: int) -> dict[str, object]:
    for _ in range(levels):
        value = [value]
    return {"x": value}


@pytest.mark.parametrize(
    "value",
    [
        pathlib.Path("a"),
        np.array(["2020"], "M8[D]"),
        torch.eye(2).to_sparse(),
        {1},
        slice(1),
        collections.deque(),
    ],
    ids=["path", "times", "sparse", "set", "slice", "deque"],
)
def test_a_value_is_refused_at_the_depth_at_which_no_load_would_take_it(value):
    state = _in_lists(value, 98)
    assert_same(state, through(state))
    with pytest.raises(UnsupportedValue, match="more than 100 levels"):
        flatten(_in_lists(value, 99))


def _nan() -> float:
    return float("nan")


@pytest.mark.parametrize(
    "value",
    [
        {_nan(), _nan(), 1.0},
        frozenset({np.float32(_nan()), np.float32(_nan())}),
        {decimal.Decimal("NaN"), decimal.Decimal("NaN")},
        {(_nan(), 1), (_nan(), 1)},
        {zoneinfo.ZoneInfo("Europe/Paris"), zoneinfo.ZoneInfo.no_cache("Europe/Paris")},
    ],
)
def test_items_of_a_set_that_are_stored_alike_are_refused(value):
    with pytest.raises(UnsupportedValue, match=r"state\['x'\]: two items of a set .* a list"):
        flatten({"x": value})


def test_keys_that_would_load_as_one_are_refused():
    zones = zoneinfo.ZoneInfo("Europe/Paris"), zoneinfo.ZoneInfo.no_cache("Europe/Paris")
    for keys in (zones, [(1, zone) for zone in zones]):
        with pytest.raises(UnsupportedValue, match=r"state\['x'\]: two keys .* a list of pairs"):
            flatten({"x": dict.fromkeys(keys)})


def test_keys_of_nan_are_two_keys_again():
    keys = [_nan(), _nan(), *((_nan(), 1) for _ in range(2))]
    value = {key: at for at, key in enumerate(keys)}
    assert list(through({"x": value})["x"].values()) == [0, 1, 2, 3]


def test_a_zone_that_the_database_does_not_have_is_refused():
    data = b"TZif".ljust(20, b"\0") + struct.pack(">6llBB4s", 0, 0, 0, 0, 1, 4, 0, 0, 0, b"UTC")
    zone = zoneinfo.ZoneInfo.from_file(io.BytesIO(data), key="No/Such")
    for value in (zone, dt.datetime(2020, 1, 1, tzinfo=zone)):
        with pytest.raises(UnsupportedValue, match=r"state\['x'\]: .*No/Such"):
            flatten({"x": value})


def _csr(*columns: int) -> torch.Tensor:
    offsets = torch.tensor([0, len(columns)])
    return torch.sparse_csr_tensor(offsets, torch.tensor(columns), torch.ones(len(columns)), (1, 2))


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_sparse_tensors_that_no_load_could_rebuild_are_refused():
    indices, values = torch.tensor([[1, 0]]), torch.ones(2)
    for value in (
        _csr(1, 0),
        _csr(1, 1),
        torch.sparse_coo_tensor(indices, values, (2,))._coalesced_(True),
        torch.sparse_coo_tensor(indices + 4, values, (2,), check_invariants=False),
    ):
        with pytest.raises(UnsupportedValue, match=r"state\['x'\]: .*invariants"):
            flatten({"x": value})


def test_a_tensor_of_zeros_without_memory_is_refused():
    for value in (torch._efficientzerotensor((3, 4)), torch._efficientzerotensor((3, 4))[1:]):
        with pytest.raises(UnsupportedValue, match="Store a copy"):
            through({"x": value})


def test_arrays_in_sets_and_keys():
    for value in ({ONE}, {ONE: 1}, {(1, ONE): 1}, frozenset([ONE])):
        with pytest.raises(UnsupportedValue, match=r"state\['x'\].*an array cannot be part of"):
            flatten({"x": value})


def test_odd_keys_are_shown_as_python():
    with pytest.raises(UnsupportedValue) as caught:
        flatten({"x": {(1, b"a"): {None: len}}})
    assert str(caught.value).startswith("state['x'][(1, b'a')][None]: ")
    with pytest.raises(UnsupportedValue, match=r"state\['x'\]: a string with a lone surrogate"):
        flatten({"x": {"\udc80": 1}})


def test_state_dict_metadata_that_cannot_be_stored():
    value = collections.OrderedDict()
    value._metadata = {"f": len}
    with pytest.raises(UnsupportedValue, match=r"state\['x'\]\._metadata\['f'\]"):
        flatten({"x": value})
    value = collections.OrderedDict()
    value.note = 1
    for state in ({"x": value}, value):
        with pytest.raises(UnsupportedValue, match=r"attribute \(note\)"):
            flatten(state)


class _Second(torch.nn.Linear):
    _version = 2


def test_a_whole_state_that_loses_the_versions_of_its_modules_warns():
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), _Second(1, 1))
    with pytest.warns(UserWarning, match=r"module '1' has \{'version': 2\}\. Save \{'model': "):
        flatten(model)
    flatten({"model": model})
    flatten(model[0])
    assigned = model[0].state_dict()
    torch.nn.Linear(1, 1).load_state_dict(assigned, assign=True)  # torch notes it in the metadata
    flatten(assigned)
    flatten(torch.nn.Sequential(torch.nn.BatchNorm1d(1)))


class _Foreign:
    """An object whose `state_dict()` or attribute raises what it is given."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def state_dict(self):
        raise self.error


class _OddAttribute:
    @property
    def state_dict(self):
        raise RuntimeError("not prepared")


@pytest.mark.parametrize(
    "error", [AttributeError("no dl_state_dict"), RuntimeError("x"), KeyError(1)]
)
def test_whatever_a_foreign_state_dict_raises_has_a_path(error):
    with pytest.raises(
        UnsupportedValue, match=r"^state\['x'\]\['y'\]: .*_Foreign.state_dict\(\) fa"
    ) as caught:
        flatten({"x": {"y": _Foreign(error)}})
    assert caught.value.__cause__ is error
    assert str(error) in str(caught.value.found)
    with pytest.raises(UnsupportedValue, match=r"^state: "):
        flatten(_Foreign(error))
    with pytest.raises(UnsupportedValue, match=r"^x/y: "):
        list(walk("x", {"y": _Foreign(error)}))


def test_an_error_of_ours_passes_through_state_dict():
    said = UnsupportedValue("known", where="inside")
    with pytest.raises(UnsupportedValue, match=r"^inside: known"):
        flatten({"x": _Foreign(said)})


def test_an_attribute_that_raises_is_no_state_dict():
    with pytest.raises(UnsupportedValue, match=r"state\['x'\]: .*_OddAttribute cannot be stored"):
        flatten({"x": _OddAttribute()})
