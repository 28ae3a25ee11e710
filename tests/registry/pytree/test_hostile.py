"""Whatever a skeleton says, reading it gives a value or one of two named errors."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from holdfast.registry.errors import IncompatibleState, Malformed
from holdfast.registry.pytree import leaf_kinds, leaf_paths, unflatten, unflatten_component
from holdfast.registry.pytree.decoding import ATOMS, DECODERS
from tests.support.strategies import examples

TAGS = sorted(
    {
        *ATOMS,
        *DECODERS,
        *("t", "ts", "tt", "tv", "tver", "coo", "csr", "bsc", "n", "nt", "ns", "nd"),
    }
)
ARRAYS = [
    *(torch.zeros(2, 2), np.zeros((2, 2)), bytearray(b"\xff"), torch.zeros(1, 2).long()),
    *(np.zeros(1, np.int64), torch.zeros(1), bytearray(b"a")),
]
words = st.text(max_size=4) | st.sampled_from(
    [
        *("posix", "windows", "list", "float32", "datetime64[ns]", "int64", "complex32", "|O"),
        *("3ff0000000000000", "00", "-1f", "0x1", " 1", "1_0", "ffffffffffffffffffff", "YQ=="),
        *("1E999999999999999999", "sNaN", "1e5", "2026-01-01", "2026-01-01T00:00:00", "utc"),
        *("zone", "offset", "../x", "Europe", "cpu", "cuda:9999", "V999999999", "<U999999999"),
    ]
)
plain = st.none() | st.booleans() | st.integers(-3, 9) | st.integers() | words | st.floats()
nodes = st.recursive(
    plain,
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(st.sampled_from(TAGS), inner, min_size=1, max_size=1)
        | st.dictionaries(words, inner, max_size=2)
        | st.builds(
            lambda tag, pairs: {tag: pairs},
            st.sampled_from(["d", "od", "counter"]),
            st.lists(st.lists(inner, min_size=2, max_size=2), max_size=3),
        )
    ),
    max_leaves=20,
)


@given(nodes, st.integers(0, len(ARRAYS)))
@examples(600, suppress_health_check=[HealthCheck.too_slow])
def test_any_json_gives_a_value_or_malformed(node, count):
    with contextlib.suppress(Malformed, IncompatibleState):
        unflatten("dict", [("x", node, ARRAYS[:count])])
    with contextlib.suppress(Malformed):
        leaf_kinds(node)
        leaf_paths("x", node)


MALFORMED = [
    *({}, {"d": [], "od": []}, {"zz": 1}, {"d": {}}, {"d": [[1]]}, {"d": [[1, 2, 3]]}, {"d": 5}),
    *({"d": [["a", 1], ["a", 2]]}, {"d": [[1, 1], [True, 2]]}, {"d": [[[1], 2]]}, 1.5, 2**53 + 1),
    *({"t": 1}, {"t": True}, {"t": -1}, {"t": "0"}, {"t": None}, {"B": 0}, {"nt": [0, "f4"]}),
    *([{"t": 0}, {"t": 0}], [{"t": 0}, {"t": 2}], {"d": [[{"t": 0}, 1]]}, {"set": [{"t": 0}]}),
    *({"set": [2, 1]}, {"set": [1, 1]}, {"set": [1, True]}, {"fset": [[1]]}, {"set": 3}),
    *({"f": "0"}, {"f": "3FF0000000000000"}, {"f": "3f f00000000000"}, {"f": 1}, {"c": ["0"]}),
    *({"i": "1"}, {"i": "0x20000000000001"}, {"i": "020000000000001"}, {"i": 5}, {"i": "２" * 20}),
    *({"b": "YQ"}, {"b": "YQ==\n"}, {"b": 1}, {"dd": ["os.system", []]}, {"dd": ["eval", []]}),
    *(
        {"dd": [[], []]},
        {"deque": [1, [1, 2]]},
        {"deque": [-1, []]},
        {"deque": [{"i": "f" * 40}, []]},
    ),
    *({"range": [1, 2, 0]}, {"range": [1, 2]}, {"range": [1, 2, True]}, {"slice": [1, 2]}),
    *({"decimal": "1E999999999999999999"}, {"decimal": "01"}, {"decimal": "x"}, {"decimal": 1}),
    *({"fraction": [2, 4]}, {"fraction": [1, 0]}, {"fraction": [1, {"i": "f" * 9999}]}),
    *(
        {"ellipsis": 1},
        {"uuid": "0"},
        {"date": "20260101"},
        {"td": [0, 0, -1]},
        {"td": [10**10, 0, 0]},
    ),
    *({"datetime": ["2026-01-01T00:00:00", 2, None]}, {"time": ["00:00", 0, None]}, {"tz": None}),
    *(
        {"datetime": ["2026-01-01T00:00:00", 0, ["zone", "../../etc/passwd"]]},
        {"tz": ["zone", "No/Where"]},
    ),
    *({"tz": ["zone", "Europe"]}, {"path": ["posix", "a//b"]}, {"path": ["os", "a"]}, {"path": []}),
    *(
        {"ts": [-(2**70)]},
        {"ts": 1},
        {"tt": "Tensor"},
        {"tt": 1},
        {"tv": "no such"},
        {"tv": "cuda:99999"},
    ),
    *(
        {"ns": ["float32", "00"]},
        {"ns": ["O", ""]},
        {"ns": ["float32", "0000 0000"]},
        {"nd": "i4,f4"},
    ),
    *({"nd": "os"}, {"coo": [[2, 2], False, {"t": 0}]}, {"coo": [[2, 2], 0, {"t": 0}, {"t": 1}]}),
    *({"coo": [[2, 2], True, {"t": 0}, {"t": 1}]}, {"csr": [[2, 2], {"t": 0}, {"t": 1}, 5]}),
    *({"ad": ["x"]}, {"ad": [1, 2]}, {"sd": [[], {"t": 0}]}, {"": []}, {"S": 0}),
]


@pytest.mark.parametrize("node", MALFORMED, ids=repr)
def test_one_breaking_sample_for_each_rule(node):
    with pytest.raises(Malformed):
        unflatten_component(node, [torch.zeros(1), torch.zeros(1)])


def test_arrays_left_over():
    with pytest.raises(Malformed, match="arrays left over"):
        unflatten_component({"t": 0}, [torch.zeros(1), torch.zeros(1)])


@pytest.mark.parametrize("tag", ["t", "n", "B", "BA", "S"])
def test_an_array_of_another_kind(tag):
    with pytest.raises(Malformed):
        unflatten_component({tag: 0}, [object()])


def test_a_string_that_is_not_utf8():
    with pytest.raises(Malformed, match="UTF-8"):
        unflatten_component({"S": 0}, [bytearray(b"\xff")])


def test_the_place_is_named():
    node = {"d": [["a", [0, {"d": [[None, {"f": "x"}]]}]]]}
    with pytest.raises(Malformed) as caught:
        unflatten("dict", [("model", node, [])])
    assert caught.value.where == "model/a/1/null"


@pytest.mark.parametrize(
    "wrap", [lambda n: [n], lambda n: {"d": [["k", n]]}, lambda n: {"tu": [n]}]
)
@pytest.mark.parametrize("levels", [100, 900])
def test_depth_is_bounded(wrap, levels):
    node: object = 0
    for _ in range(levels):
        node = wrap(node)
    for read in (lambda n: unflatten_component(n, []), leaf_kinds, lambda n: leaf_paths("x", n)):
        with pytest.raises(Malformed):
            read(node)


def test_kinds_and_names_of_states():
    with pytest.raises(Malformed):
        unflatten("list", [])
    with pytest.raises(Malformed):
        unflatten("dict", [("a", 1, []), ("a", 1, [])])
    with pytest.raises(Malformed):
        unflatten("dict", [(1, 1, [])])


def test_survey_refuses_arrays_out_of_order():
    for node in (
        [{"t": 1}],
        [{"t": 0}, {"t": 0}],
        {"nt": []},
        {"d": [[1]]},
        {"coo": 5},
        {"ad": []},
    ):
        with pytest.raises(Malformed):
            leaf_kinds(node)
