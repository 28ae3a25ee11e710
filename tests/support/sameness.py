"""A strict comparison of states (types and bits), and the trip through JSON and bytes."""

from __future__ import annotations

import datetime as dt
import decimal
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import is_dataclass
from typing import Any

import numpy as np
import torch

from holdfast.registry.pytree import allocate, flatten, leaf_kinds, leaf_paths, unflatten
from holdfast.registry.values import canonical


def through(state: Any) -> Any:
    """Send a state through canonical JSON and fresh memory, as a save and a load would."""
    flat = flatten(state)
    components = []
    for component in flat.components:
        skeleton = canonical.decode(canonical.encode(component.skeleton), where="test")
        kinds = leaf_kinds(skeleton)
        names = leaf_paths(component.name, skeleton)
        assert list(kinds) == list(names) == list(range(len(component.leaves)))
        assert [leaf.path for leaf in component.leaves] == list(names.values())
        assert len(set(names.values())) == len(names)
        arrays = []
        for index, leaf in enumerate(component.leaves):
            source = leaf.buffer()
            assert (source.format, source.ndim, source.nbytes) == ("B", 1, leaf.nbytes)
            target, view = allocate(leaf.dtype, leaf.shape, kinds[index])
            assert (view.format, view.nbytes) == ("B", leaf.nbytes)
            view[:] = source
            arrays.append(target)
        components.append((component.name, skeleton, arrays))
    return unflatten(flat.kind, components)


def assert_same(a: Any, b: Any, at: str = "state") -> None:
    """Fail unless two values have the same types and the same bits, all the way down."""
    if type(a) is torch.nn.Parameter:
        a = a.detach()
    assert type(a) is type(b), (at, type(a), type(b))
    if is_dataclass(a):
        a, b = vars(a), vars(b)
    compare = _COMPARE.get(type(a))
    if compare is not None:
        compare(a, b, at)
    elif isinstance(a, np.generic):
        assert a.dtype == b.dtype, at
        assert a.tobytes() == b.tobytes(), at
    else:
        assert a == b, (at, a, b)


def _sequences(a: Any, b: Any, at: str) -> None:
    assert len(a) == len(b), at
    for index, (x, y) in enumerate(zip(a, b, strict=True)):
        assert_same(x, y, f"{at}[{index}]")


def _dicts(a: Any, b: Any, at: str) -> None:
    _sequences(list(a), list(b), f"{at}.keys()")
    for (key, x), y in zip(a.items(), b.values(), strict=True):
        assert_same(x, y, f"{at}[{key!r}]")
    assert_same(getattr(a, "_metadata", None), getattr(b, "_metadata", None), f"{at}._metadata")


def _defaultdicts(a: Any, b: Any, at: str) -> None:
    assert a.default_factory is b.default_factory, at
    _dicts(a, b, at)


def _deques(a: Any, b: Any, at: str) -> None:
    assert a.maxlen == b.maxlen, at
    _sequences(a, b, at)


def _sets(a: Any, b: Any, at: str) -> None:
    bits = [
        sorted(canonical.encode(flatten({"x": v}).components[0].skeleton) for v in s)
        for s in (a, b)
    ]
    assert bits[0] == bits[1], at


def _tensors(a: Any, b: Any, at: str) -> None:
    assert (a.dtype, a.shape, a.layout) == (b.dtype, b.shape, b.layout), at
    if a.layout is torch.sparse_coo:
        assert a.is_coalesced() == b.is_coalesced(), at
        _tensors(a._indices(), b._indices(), at)
        return _tensors(a._values(), b._values(), at)
    if a.layout is not torch.strided:
        row = a.layout in (torch.sparse_csr, torch.sparse_bsr)
        outer, inner = ("crow", "col") if row else ("ccol", "row")
        for part in (f"{outer}_indices", f"{inner}_indices", "values"):
            _tensors(getattr(a, part)(), getattr(b, part)(), f"{at}.{part}()")
        return None
    if not a.numel():
        return None  # strides of an empty tensor may be any, and then it has no other view
    # Copies: `contiguous` keeps the stride of a single element, and then there is no view of bytes.
    left, right = (
        torch.clone(t.detach().resolve_conj().resolve_neg(), memory_format=torch.contiguous_format)
        .view(-1)
        .view(torch.uint8)
        for t in (a, b)
    )
    assert torch.equal(left, right), at
    return None


def _arrays(a: Any, b: Any, at: str) -> None:
    assert (a.dtype, a.shape) == (b.dtype, b.shape), at
    assert a.tobytes() == b.tobytes(), at


def _floats(a: Any, b: Any, at: str) -> None:
    assert struct.pack("d", a) == struct.pack("d", b), (at, a, b)


def _complexes(a: Any, b: Any, at: str) -> None:
    assert struct.pack("dd", a.real, a.imag) == struct.pack("dd", b.real, b.imag), (at, a, b)


def _moments(a: Any, b: Any, at: str) -> None:
    assert (a.isoformat(), a.fold, repr(a.tzinfo)) == (b.isoformat(), b.fold, repr(b.tzinfo)), at


def _decimals(a: Any, b: Any, at: str) -> None:
    assert a.as_tuple() == b.as_tuple(), at


def _slices(a: Any, b: Any, at: str) -> None:
    _sequences((a.start, a.stop, a.step), (b.start, b.stop, b.step), at)


def _ranges(a: Any, b: Any, at: str) -> None:
    assert (a.start, a.stop, a.step) == (b.start, b.stop, b.step), at


_COMPARE = {
    list: _sequences,
    tuple: _sequences,
    dict: _dicts,
    OrderedDict: _dicts,
    Counter: _dicts,
    defaultdict: _defaultdicts,
    deque: _deques,
    set: _sets,
    frozenset: _sets,
    torch.Tensor: _tensors,
    np.ndarray: _arrays,
    float: _floats,
    complex: _complexes,
    dt.datetime: _moments,
    dt.time: _moments,
    decimal.Decimal: _decimals,
    slice: _slices,
    range: _ranges,
}
