"""Explain why a value cannot be stored, and suggest another value."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import io
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

_ADAPTER = "Register an adapter for its type (holdfast.register_adapter)."
_LOCKS = (
    type(threading.Lock()),
    type(threading.RLock()),
    threading.Condition,
    threading.Event,
    threading.Semaphore,
    threading.Barrier,
    threading.Thread,
    threading.local,
)
_FUNCTIONS = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.MethodWrapperType,
)
_WEAK = (weakref.ref, weakref.ProxyType, weakref.CallableProxyType)

Advice = tuple[str, str]


def explain(value: object) -> Advice:
    """Return why a value cannot be stored, as a clause, and advice, as a sentence."""
    for rule in (_by_jax, _by_library, _by_kind, _by_base):
        advice = rule(value)
        if advice is not None:
            return advice
    return f"a {full_name(type(value))} cannot be stored", (
        f"Store plain values (dict, list, numbers, tensors) instead, or: {_ADAPTER}"
    )


def full_name(cls: type) -> str:
    """Return the dotted name of a type, without `builtins`."""
    name = cls.__qualname__
    return name if cls.__module__ == "builtins" else f"{cls.__module__}.{name}"


def is_tensor_like(value: object) -> bool:
    """Return whether a value is a tensor of any class; torch need not be installed."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def is_numpy_array(value: object) -> bool:
    """Return whether a value is an array of numpy; numpy need not be installed."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _by_jax(value: object) -> Advice | None:
    """Recognise a pytree of jax: a named tuple, or a type that is registered there."""
    jax = sys.modules.get("jax")
    if jax is None or jax.tree_util.all_leaves([value]):
        return None
    return f"a pytree ({full_name(type(value))}) cannot be stored as it is", (
        "Store holdfast.jax.pack(x), and use holdfast.jax.restore(target, stored) after loading."
    )


def _by_library(value: object) -> Advice | None:
    """Recognise classes of libraries by the names of their bases, without importing them."""
    for base in type(value).__mro__:
        advice = _LIBRARY_TYPES.get(f"{base.__module__}.{base.__qualname__}")
        if advice is not None:
            return f"a {full_name(type(value))} cannot be stored", advice
    return None


_LIBRARY_TYPES = {
    "torch._C.Generator": "Store its .get_state() instead.",
    "numpy.random._generator.Generator": "Store its .bit_generator.state instead.",
    "numpy.random.bit_generator.BitGenerator": "Store its .state instead.",
    "numpy.random.bit_generator.SeedSequence": "Store its .state instead.",
    "numpy.random.mtrand.RandomState": "Store its .get_state() instead.",
    "torch.distributed.tensor.DTensor": (
        "Gather it first (.full_tensor()), or store its .to_local() part per rank."
    ),
    "torch.distributed._shard.sharded_tensor.api.ShardedTensorBase": (
        "Gather it first, or store each rank's local shards."
    ),
    "torch.nn.parameter.UninitializedTensorMixin": "Run one forward pass to initialise it.",
    "torch.nested._internal.nested_tensor.NestedTensor": (
        "Store its .values() and .offsets(), or the tensors of .unbind() as a list."
    ),
    "torch.Tensor": "Store a plain tensor: .detach().as_subclass(torch.Tensor), or its parts.",
    "torch.storage.UntypedStorage": "Store a tensor over it instead.",
    "torch.storage.TypedStorage": "Store a tensor over it instead.",
    "numpy.memmap": "Store numpy.array(x), a plain array.",
    "numpy.ndarray": "Store a plain array: numpy.asarray(x), or its parts.",
    "numpy.str_": "Store str(x).",
    "numpy.bytes_": "Store bytes(x).",
    "numpy.longdouble": "Its bits differ between machines: convert to numpy.float64.",
    "numpy.clongdouble": "Its bits differ between machines: convert to numpy.complex128.",
    "random.Random": "Store its .getstate() instead.",
    "argparse.Namespace": "Store vars(x).",
    "accelerate.data_loader.DataLoaderAdapter": (
        "Leave it out, or prepare it with DataLoaderConfiguration(use_stateful_dataloader=True)."
    ),
    "types.SimpleNamespace": "Store vars(x).",
    "array.array": "Store numpy.asarray(x), or a list.",
}


def _by_kind(value: object) -> Advice | None:
    for kinds, what, hint in _KINDS:
        if isinstance(value, kinds):
            return f"{what} cannot be stored", hint
    if dataclasses.is_dataclass(value):
        return f"a dataclass ({full_name(type(value))}) cannot be stored", (
            f"{_ADAPTER} Or store dataclasses.asdict(x)."
        )
    return None


_KINDS: tuple[tuple[Any, str, str], ...] = (
    (
        _FUNCTIONS,
        "a function",
        "Store its name or settings, and pass the function again after loading.",
    ),
    (types.ModuleType, "a module", "Store its name or version as a string."),
    (type, "a class", "Store its name as a string; for a numpy type, store numpy.dtype(x)."),
    (enum.Enum, "an enum member", _ADAPTER),
    (
        (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType),
        "a generator",
        "Store its position, and start it again after loading.",
    ),
    (_LOCKS, "a lock or thread", "Leave it out and make a new one after loading."),
    (io.IOBase, "an open file", "Store its path and position."),
    (_WEAK, "a weak reference", "Store the object that it refers to."),
    (memoryview, "a memoryview", "Store bytes(x)."),
)


def _by_base(value: object) -> Advice | None:
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return f"a named tuple ({full_name(type(value))}) cannot be stored", (
            f"{_ADAPTER} Or store x._asdict()."
        )
    for base, plain in _BASES.items():
        if isinstance(value, base):
            return (
                f"a {full_name(type(value))}, a subclass of {base.__name__}, cannot be stored",
                f"Store {plain}, or: {_ADAPTER}",
            )
    if isinstance(value, Mapping):
        return f"a {full_name(type(value))} cannot be stored", "Store dict(x)."
    if isinstance(value, Iterator):
        return f"an iterator ({full_name(type(value))}) cannot be stored", "Store list(x)."
    if inspect.isroutine(value) or isinstance(value, Callable):  # type: ignore[arg-type]
        return f"a callable ({full_name(type(value))}) cannot be stored", (
            f"Store its settings, give it a state_dict(), or: {_ADAPTER}"
        )
    return None


_BASES: dict[type, str] = {
    bool: "bool(x)",
    int: "int(x)",
    float: "float(x)",
    complex: "complex(x)",
    str: "str(x)",
    bytes: "bytes(x)",
    bytearray: "bytearray(x)",
    tuple: "tuple(x)",
    list: "list(x)",
    dict: "dict(x)",
    set: "set(x)",
    frozenset: "frozenset(x)",
}
