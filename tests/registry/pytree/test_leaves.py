"""Leaves view memory in place and keep it alive; destinations are views as well."""

from __future__ import annotations

import gc

import ml_dtypes
import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from holdfast.registry.errors import IncompatibleState, InvalidInput, UnsupportedValue
from holdfast.registry.pytree import allocate, describe, flatten, view_of


def leaf_of(value):
    [leaf] = flatten({"x": value}).components[0].leaves
    return leaf


@pytest.mark.parametrize("value", [torch.arange(6.0), torch.arange(6.0)[2:], np.arange(6.0)[1:]])
def test_contiguous_memory_is_not_copied(value):
    leaf = leaf_of(value)
    view = leaf.buffer()
    value[0] = 42
    assert np.frombuffer(view, describe(value)[0])[0] == 42
    assert leaf.buffer() is view


@pytest.mark.parametrize("value", [torch.eye(3).T[:, 1:], torch.ones(1).expand(4), np.eye(3)[:, 1]])
def test_strided_memory_is_copied_once(value):
    leaf = leaf_of(value)
    assert leaf.buffer() is leaf.buffer()
    assert leaf.buffer().nbytes == leaf.nbytes


def test_a_view_outlives_leaf_and_tensor():
    tensor = torch.full((1000,), 7, dtype=torch.uint8)
    memory = StorageWeakRef(tensor.untyped_storage())
    view = leaf_of(tensor).buffer()
    del tensor
    gc.collect()
    assert not memory.expired()
    assert bytes(view) == b"\x07" * 1000
    del view
    gc.collect()
    assert memory.expired()


def test_a_view_outlives_the_memory_that_a_tensor_is_given_instead():
    tensor = torch.full((1000,), 7, dtype=torch.uint8)
    memory = StorageWeakRef(tensor.untyped_storage())
    view = leaf_of(tensor).buffer()
    tensor.data = torch.zeros(1000, dtype=torch.uint8)
    gc.collect()
    assert not memory.expired()
    assert bytes(view) == b"\x07" * 1000


FROZEN = np.arange(6.0)
FROZEN.flags.writeable = False


@pytest.mark.parametrize(
    ("value", "is_ours"),
    [
        (torch.arange(6.0), False),
        (torch.nn.Parameter(torch.arange(6.0)), False),
        (torch.eye(3).T[:, 1:], True),
        (torch.tensor([1 + 2j]).conj(), True),
        (np.arange(6.0), False),
        (FROZEN, False),  # its base can be written to
        (np.eye(3)[:, 1], True),
        (b"x" * 5000, True),
        (bytearray(5000), False),
        ("x" * 70_000, True),
    ],
)
def test_it_is_known_whose_memory_a_leaf_gives(value, is_ours):
    leaf = leaf_of(value)
    assert leaf.is_ours == is_ours
    view = np.frombuffer(leaf.buffer(), np.uint8)
    if isinstance(value, torch.Tensor):
        assert (value.data_ptr() == view.ctypes.data) != is_ours
    elif isinstance(value, np.ndarray):
        assert np.shares_memory(value, view) != is_ours


def test_empty_and_scalar_tensors():
    assert leaf_of(torch.empty(0, 3)).buffer().nbytes == 0
    assert leaf_of(torch.tensor(1, dtype=torch.int16)).buffer() == b"\x01\x00"
    assert leaf_of(np.array(1, dtype=np.int16)).buffer() == b"\x01\x00"
    assert leaf_of(np.empty((0, 3))).buffer().nbytes == 0


def test_conjugate_and_negative_bits_are_resolved():
    value = torch.tensor([1 + 2j]).conj()
    assert leaf_of(value).buffer() == bytes(leaf_of(torch.tensor([1 - 2j])).buffer())
    assert leaf_of(value.imag).buffer() == bytes(leaf_of(torch.tensor([-2.0])).buffer())


@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_allocated_memory_is_the_array(kind):
    array, view = allocate("bfloat16", (2, 3), kind)
    assert describe(array) == ("bfloat16", (2, 3))
    view[:] = b"\x80\x3f" * 6
    assert float(array[1, 2]) == 1.0
    assert view_of(array) == view


def test_byte_strings_are_allocated_as_bytearray():
    for kind in ("bytes", "str"):
        data, view = allocate("uint8", (3,), kind)
        view[:] = b"abc"
        assert data == b"abc"
    with pytest.raises(InvalidInput):
        allocate("int8", (3,), "bytes")


def test_views_of_targets():
    parameter = torch.nn.Parameter(torch.zeros(2))
    view_of(parameter)[:] = np.array([1, 2], np.float32).tobytes()
    assert parameter.tolist() == [1, 2]
    times = np.zeros(2, "M8[s]")
    assert describe(times) == ("int64", (2,))
    assert view_of(times).nbytes == 16
    assert view_of(np.zeros(2, ml_dtypes.bfloat16)).nbytes == 4


@pytest.mark.parametrize(
    "target",
    [
        torch.eye(3).T[:, 1:],
        torch.empty(2, device="meta"),
        torch.eye(2).to_sparse(),
        torch.tensor([1j]).conj(),
        np.eye(3)[:, 1],
        np.frombuffer(b"ab", np.uint8),
        np.zeros(2, ">i4"),
        [1, 2],
    ],
)
def test_targets_without_a_view(target):
    assert view_of(target) is None


def test_a_tensor_that_ends_behind_its_memory_is_refused():
    tensor = torch.arange(8.0)[4:]
    tensor.untyped_storage().resize_(tensor.nbytes)  # as long as the tensor, which begins later
    with pytest.raises(UnsupportedValue, match="memory has been released"):
        flatten({"m": tensor})


def test_a_target_whose_memory_was_released_has_no_view():
    tensor = torch.zeros(8)
    tail = tensor[4:]
    tensor.untyped_storage().resize_(0)
    assert view_of(tail) is None


def test_what_cannot_be_described_or_allocated():
    with pytest.raises(UnsupportedValue):
        describe([1])
    with pytest.raises(UnsupportedValue):
        describe(np.array(["a"]))
    with pytest.raises(UnsupportedValue):
        allocate("float4", (1,), "numpy")
    with pytest.raises(UnsupportedValue):
        allocate("float4", (1,), "torch")
    with pytest.raises(InvalidInput):
        allocate("int8", (1,), "jax")


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ml_dtypes", None)
    monkeypatch.setattr("holdfast.registry.pytree.numpy_arrays._NATIVE", {})
    with pytest.raises(IncompatibleState, match="pip install -U ml_dtypes"):
        allocate("bfloat16", (1,), "numpy")
