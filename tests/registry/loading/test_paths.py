"""`only` with paths below components, and mappings of what is below one."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch

from holdfast import Registry
from holdfast.registry import pytree
from holdfast.registry.errors import IntegrityError, Malformed, NotFound
from tests.support.sameness import assert_same

STATE: dict[str, Any] = {
    "regions": {
        "a": {"w": np.arange(6.0), "steps": 3, "layers": [np.ones(2), np.zeros(3)]},
        "b": {"w": np.arange(4.0), "when": np.array(["2020-01-01"], "datetime64[s]")},
        7: {"w": np.ones(1)},
        "x/y": {"w": np.full(2, 5.0), "text": "t" * 70_000},
    },
    "ordered": OrderedDict(first=torch.ones(2), second=torch.zeros(3)),
    "a/b": {"w": np.ones(3)},
    "step": 9,
}


@pytest.fixture
def stored(reg: Registry):
    return reg.create_run("run").save(STATE, step=1)


def test_leaves_by_path_have_the_paths_of_the_stored_state():
    leaves = [leaf for part in pytree.flatten(STATE).components for leaf in part.leaves]
    assert [*pytree.by_path(leaves).items()] == [(leaf.path, leaf) for leaf in leaves]
    stored = [
        path
        for part in pytree.flatten(STATE).components
        for path in pytree.leaf_paths(part.name, part.skeleton).values()
    ]
    assert [*pytree.by_path(leaves)] == stored


@pytest.mark.parametrize(
    ("only", "expected"),
    [
        ("regions/a/w", {"regions": {"a": {"w": STATE["regions"]["a"]["w"]}}}),
        (["regions/a/layers"], {"regions": {"a": {"layers": STATE["regions"]["a"]["layers"]}}}),
        (
            ["regions/b", "regions/a/steps", "step"],
            {
                "regions": {"a": {"steps": 3}, "b": STATE["regions"]["b"]},
                "step": 9,
            },
        ),
        ("regions/7", {"regions": {7: STATE["regions"][7]}}),
        ('regions/"x/y"', {"regions": {"x/y": STATE["regions"]["x/y"]}}),
        ("ordered/second", {"ordered": OrderedDict(second=STATE["ordered"]["second"])}),
        ("a/b", {"a/b": STATE["a/b"]}),
        ('"a/b"/w', {"a/b": STATE["a/b"]}),
        (["regions", "regions/a"], {"regions": STATE["regions"]}),
        (["regions/a", "regions/a/w"], {"regions": {"a": STATE["regions"]["a"]}}),
    ],
)
def test_a_path_is_loaded_with_the_dicts_around_it(stored, only, expected):
    assert_same(stored.load(only=only), expected)


@pytest.mark.parametrize(
    ("only", "message"),
    [
        ("regions/c", r"regions/c: nothing at this path; expected regions/a, regions/b"),
        ("regions/a/layers/0", "nothing at this path"),
        ("regions/a/w/0", "nothing at this path"),
        (["regions/a", "regions/a/v"], "regions/a/v: nothing at this path"),
        ("region/a", "no such component"),
        ("regions/", "nothing at this path"),
    ],
)
def test_a_path_that_leads_nowhere_is_refused(stored, only, message):
    with pytest.raises(NotFound, match=message):
        stored.load(only=only)


def test_a_model_loads_with_its_metadata_and_without_the_rest(reg):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    saved = reg.create_run("run").save({"model": model}, step=1)
    part = saved.load(only=["model/1.weight", "model/1.bias"])["model"]
    assert list(part) == ["1.weight", "1.bias"]
    assert part._metadata == model.state_dict()._metadata
    assert torch.equal(part["1.weight"], model[1].weight)


def test_values_below_a_path_are_loaded_at_their_first_access(stored, monkeypatch):
    loaded = []
    load = type(stored).load
    monkeypatch.setattr(
        type(stored),
        "load",
        lambda self, **given: loaded.append(given["only"]) or load(self, **given),
    )
    lazy = stored.lazily("regions")
    assert list(lazy) == ["a", "b", "7", '"x/y"']
    assert loaded == []
    assert_same(lazy["a"], STATE["regions"]["a"])
    assert lazy["a"] is lazy["a"]
    assert_same(lazy['"x/y"'], STATE["regions"]["x/y"])
    assert loaded == ["regions/a", 'regions/"x/y"']
    assert_same(stored.lazily("regions/a")["steps"], 3)
    assert_same(stored.lazily("ordered")["first"], STATE["ordered"]["first"])
    assert_same(stored.lazily("a/b")["w"], STATE["a/b"]["w"])
    for other in ("c", 7):
        with pytest.raises(NotFound, match=f"regions/{other}"):
            lazy[other]
    for below in ("step", "regions/a/w", "regions/c"):
        with pytest.raises(NotFound, match="nothing at this path"):
            stored.lazily(below)


def test_what_is_elsewhere_may_be_gone(reg, backend):
    saved = reg.create_run("run").save({"a": {"x": np.arange(9000.0), "y": {"z": 1}}}, step=1)
    for info in list(backend.list("packs/")):
        backend.delete(info.key)
    assert saved.load(only="a/y") == {"a": {"y": {"z": 1}}}
    with pytest.raises(IntegrityError):
        saved.load(only="a/x")


@pytest.mark.parametrize(
    "hidden",
    [
        {"set": [{"t": 99}]},
        {"set": [{"t": 0}]},
        {"nt": []},
        {"tz": {"a": 1, "b": {"t": "x"}}},
        {"ns": [{"t": None}]},
    ],
)
def test_an_array_that_is_hidden_in_a_skeleton_is_no_number(hidden):
    skeleton = {"d": [["a", {"d": [["w", {"t": 0}], ["h", hidden]]}], ["b", 1]]}
    try:
        cut, numbers = pytree.cut_down("c", skeleton, {"c/a"}, 1)
    except Malformed:
        return
    assert numbers == [0]
    with pytest.raises(Malformed):
        pytree.unflatten_component(cut, [np.ones(1)])


def test_a_part_of_a_component_fills_no_model(stored):
    with pytest.raises(NotFound, match="regions/a: no such component"):
        stored.load_into({}, component="regions/a")
