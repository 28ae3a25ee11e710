"""Types of the caller pass through adapters, and only through those registered here."""

from __future__ import annotations

import dataclasses
import enum
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from holdfast.registry.errors import IncompatibleState, InvalidInput, Malformed, UnsupportedValue
from holdfast.registry.pytree import flatten, register_adapter, unflatten_component
from holdfast.registry.pytree.encoding import AdapterTable
from tests.support.sameness import through


class Batch(NamedTuple):
    x: object
    step: int


class Mode(enum.IntEnum):
    TRAIN = 1


@dataclasses.dataclass(frozen=True)
class Config:
    lr: float
    mode: Mode


@pytest.fixture(autouse=True)
def table(monkeypatch):
    fresh = AdapterTable()
    for module in ("adapters", "encoding"):
        monkeypatch.setattr(f"holdfast.registry.pytree.{module}.ADAPTERS", fresh)
    register_adapter("t.Batch", Batch, to_plain=tuple, from_plain=lambda t: Batch(*t))
    register_adapter("t.Mode", Mode, to_plain=lambda m: m.name, from_plain=lambda n: Mode[n])
    register_adapter(
        "t.Config",
        Config,
        to_plain=lambda c: {"lr": c.lr, "mode": c.mode},
        from_plain=lambda d: Config(**d),
    )
    return fresh


def test_values_come_back_as_their_types():
    state = {"a": Config(0.1, Mode.TRAIN), "b": {Mode.TRAIN: [Mode.TRAIN]}, "c": {Mode.TRAIN}}
    loaded = through(state)
    assert loaded == state
    assert type(loaded["a"].mode) is Mode
    assert [type(key) for key in (*loaded["b"], *loaded["c"])] == [Mode, Mode]


def test_arrays_inside_keep_their_place():
    state = {"a": {"b": Batch(torch.ones(2), 3)}}
    [leaf] = flatten(state).components[0].leaves
    assert leaf.path == "a/b/0"
    loaded = through(state)["a"]["b"]
    assert type(loaded) is Batch
    assert torch.equal(loaded.x, torch.ones(2))


def test_an_unregistered_name_is_named(table):
    with pytest.raises(IncompatibleState, match=r"no adapter named 'os\.system'") as caught:
        unflatten_component({"ad": ["os.system", "true"]}, [])
    assert "register_adapter" in caught.value.hint


def test_a_subclass_needs_its_own_adapter():
    class Sub(Config):
        pass

    with pytest.raises(UnsupportedValue, match="a dataclass"):
        flatten({"x": Sub(0.1, Mode.TRAIN)})


def test_a_stored_value_that_the_adapter_refuses():
    with pytest.raises(Malformed, match=r"t\.Mode"):
        unflatten_component({"ad": ["t.Mode", "NONE"]}, [])


def test_endless_adapters_end():
    class Loop:
        pass

    register_adapter("t.Loop", Loop, to_plain=lambda x: Loop(), from_plain=lambda x: x)
    with pytest.raises(UnsupportedValue, match="levels deep"):
        flatten({"x": Loop()})


def test_names_and_types_are_taken_once():
    with pytest.raises(InvalidInput, match="name is taken"):
        register_adapter("t.Mode", Batch, to_plain=tuple, from_plain=tuple)
    with pytest.raises(InvalidInput, match="has an adapter"):
        register_adapter("t.Other", Mode, to_plain=int, from_plain=Mode)
    with pytest.raises(InvalidInput):
        register_adapter("", Config, to_plain=vars, from_plain=vars)
    for cls in (dict, memoryview, Path, torch.Tensor):
        with pytest.raises(InvalidInput, match="takes no adapter"):
            register_adapter("t.own", cls, to_plain=list, from_plain=cls)
    register_adapter("t.Mode", Mode, to_plain=int, from_plain=Mode)
    assert through({"x": Mode.TRAIN}) == {"x": Mode.TRAIN}
