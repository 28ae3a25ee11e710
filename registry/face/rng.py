"""Capture and restore the random number generators of a process, as one plain state.

`capture` returns it, `restore` sets it. A state of Holdfast stores it exactly. A library that this
process has not imported has no generator in use, so it is neither captured nor imported; `restore`
imports a library only if the state has a generator of it.
"""

from __future__ import annotations

import importlib
import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeGuard

from holdfast.backends.escape import quoted
from holdfast.registry.errors import IncompatibleState, InvalidInput

__all__ = ["capture", "restore"]

_FORMAT = "holdfast.rng/2"
_MARK = json.dumps(_FORMAT)
#: The format before, which is nested and has arrays of NumPy.
_NESTED = "holdfast.rng/1"
_PARTS = {"format", "python", "numpy", "torch", "generators"}
#: Where a part of the nested format stands: a part of torch's is bytes, any other is JSON.
_CPU, _CUDA, _OF_TORCH, _GIVEN = "torch.cpu", "torch.cuda.", "torch.generators.", "generators."
#: How often each state was restored in this process, by its fingerprint.
_RESTORED = Counter[int]()
_Setter = Callable[[], object]
_Set = Callable[[Any], object]


def capture(generators: Mapping[str, object] | None = None) -> dict[str, Any]:
    """Return the states of all generators, to be a part of a saved state.

    These are Python's `random`; NumPy's legacy global generator (`numpy.random.seed`); torch's, of
    the CPU and, if the process has used CUDA, of every CUDA device; and the given ones. NumPy has
    no list of the `Generator`s that a program made, nor has torch: name each in `generators`.

    Args:
        generators: Generators by name: `numpy.random.Generator`, `numpy.random.RandomState`,
            `random.Random` or `torch.Generator`.

    Returns:
        A flat dict of torch tensors (uint8, on the CPU), which a `.pt` or `.safetensors` file can
        hold; in a process that has not imported torch, of plain values.

    Raises:
        InvalidInput: A value of `generators` is not one of these, or a key is no string.
    """
    state: dict[str, Any] = {"format": _FORMAT, "python": random.getstate()}
    if (numpy := sys.modules.get("numpy")) is not None:
        state["numpy"] = numpy.random.get_state(legacy=False)
    if (torch := sys.modules.get("torch")) is not None:
        devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        state[_CPU] = torch.get_rng_state()
        state |= {f"{_CUDA}{number}": one for number, one in enumerate(devices)}
    for name, generator in _by_name(generators).items():
        own = _state_of(name, generator)
        state[(_OF_TORCH if _kind(own) == "torch.Generator" else _GIVEN) + name] = own
    return {name: _packed(one) for name, one in state.items()}


def restore(state: Mapping[str, Any], generators: Mapping[str, object] | None = None) -> None:
    """Set all generators to the states that `capture` returned. All are set, or none.

    Args:
        state: Result of `capture`, also after a save and a load, to any device.
        generators: The generators that were given to `capture`, by the same names.

    Raises:
        IncompatibleState: It is no such state; it has generators of more CUDA devices than this
            machine, of other names than `generators`, or of other kinds; or a library that it
            needs is not installed.
        InvalidInput: A key of `generators` is no string.
    """
    flat, state = state, _nested(state)
    is_known = isinstance(state, Mapping) and str(state.get("format")) == _NESTED
    if not is_known or state.keys() - _PARTS:
        raise IncompatibleState(
            "not a state of random number generators",
            expected="what holdfast.rng.capture() returned",
            found=quoted(state.get("format", list(state)) if isinstance(state, Mapping) else state),
        )
    setters = [_checked("python", random.Random().setstate, random.setstate, state.get("python"))]
    if "numpy" in state:
        legacy = _library("numpy").random
        # A program may have given the global generator another kind of bits.
        bits = getattr(legacy, "get_bit_generator", legacy.MT19937)()
        trial = legacy.RandomState(type(bits)()).set_state
        setters.append(_checked("numpy", trial, legacy.set_state, state["numpy"]))
    if "torch" in state:
        setters += _torch_setters(state["torch"])
    setters += _given_setters(state.get("generators", {}), _by_name(generators))
    for setter in setters:
        setter()
    _RESTORED[_fingerprint(flat)] += 1


def has(state: Mapping[str, Any], name: str) -> bool:
    """Return whether a state has a generator of torch's under this name."""
    return _OF_TORCH + name in state


def is_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two states are equal; a saved one may have come back in another form."""
    return one.keys() == other.keys() and all(
        _text(one[name]) == _text(other[name]) for name in one
    )


def is_capture(state: object) -> TypeGuard[Mapping[str, Any]]:
    """Return whether a part of a state is what `capture` returned."""
    if not isinstance(state, Mapping) or not {"format", "python"} <= state.keys():
        return False
    return state["format"] == _NESTED or _text(state["format"]) == _MARK


def times_restored(state: Mapping[str, Any]) -> int:
    """Return how often `restore` has set the generators to a state in this process."""
    return _RESTORED[_fingerprint(state)]


def restores() -> int:
    """Return how often `restore` has set the generators in this process."""
    return _RESTORED.total()


def of_torch(state: Mapping[str, Any]) -> list[Any]:
    """Return the states of torch's generators on the CPU in a state; none of the nested format."""
    return [one for name, one in state.items() if name == _CPU or str(name).startswith(_OF_TORCH)]


def _fingerprint(state: Mapping[str, Any]) -> int:
    return hash(tuple(sorted((str(name), _text(one)) for name, one in state.items())))


def _packed(value: Any) -> Any:
    """Return a state of a generator as a tensor: torch's own, or JSON; without torch as it is."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return value.cpu()
    text = json.dumps(value, default=_as_json)
    if torch is None:
        return json.loads(text) if isinstance(value, dict) else value
    return torch.frombuffer(bytearray(text, "ascii"), dtype=torch.uint8)


def _as_json(value: Any) -> Any:
    """Return a number or an array of NumPy's as JSON has it."""
    return {"dtype": str(value.dtype), "values": value.tolist()} if value.shape else value.item()


def _nested(state: Any) -> Any:
    """Return a state in the nested format; one of no known format as it is."""
    if not isinstance(state, Mapping) or _text(state.get("format")) != _MARK:
        return state
    nested: dict[str, Any] = {"format": _NESTED, "generators": {}}
    # A file may have sorted the names; devices go by their numbers.
    for name, value in sorted(
        ((str(key), one) for key, one in state.items()), key=lambda pair: (len(pair[0]), pair[0])
    ):
        if name == _CPU:
            nested.setdefault("torch", {"cuda": []})["cpu"] = value
        elif name.startswith(_CUDA):
            nested.setdefault("torch", {"cuda": []})["cuda"].append(value)
        elif name.startswith(_OF_TORCH):
            nested["generators"][name.removeprefix(_OF_TORCH)] = value
        elif name != "format":
            into = nested["generators"] if name.startswith(_GIVEN) else nested
            into[name.removeprefix(_GIVEN)] = _from_json(name, value)
    return nested


def _from_json(name: str, value: Any) -> Any:
    def found(parts: dict[str, Any]) -> Any:
        if parts.keys() != {"dtype", "values"}:
            return parts
        return _library("numpy").array(parts["values"], dtype=parts["dtype"])

    try:
        read = json.loads(_text(value), object_hook=found)
    except (ValueError, TypeError, RecursionError, OverflowError) as error:
        raise _malformed(name, error) from error
    if not isinstance(read, list):
        return read
    return tuple(tuple(one) if isinstance(one, list) else one for one in read)  # Python's own


def _text(value: Any) -> str:
    """Return a part of a flat state as JSON."""
    if type(value).__module__.partition(".")[0] != "torch":
        return json.dumps(value, default=repr)
    return bytes(value.cpu().byte().flatten().tolist()).decode("latin-1")


def _torch_setters(state: Any) -> list[_Setter]:
    torch = _library("torch")
    cpu, cuda = _parts_of_torch(state)
    trial = torch.Generator().set_state
    setters = [_checked("torch/cpu", trial, torch.set_rng_state, cpu)]
    found = torch.cuda.device_count() if cuda else 0
    if len(cuda) > found:
        raise IncompatibleState(
            "the state has generators of more CUDA devices than this machine has",
            where="torch/cuda",
            expected=f"{len(cuda)} devices",
            found=f"{found}",
            hint="An exact resume needs as many devices. To continue without it, take the keys "
            f"'{_CUDA}N' out of the state, and seed them yourself.",
        )
    for index, one in enumerate(cuda):
        trial = torch.Generator(f"cuda:{index}").set_state
        really = partial(torch.cuda.set_rng_state, device=index)
        setters.append(_checked(f"torch/cuda/{index}", trial, really, one))
    return setters


def _parts_of_torch(state: Any) -> tuple[Any, list[Any]]:
    try:
        # Loading with `map_location` may have moved them to a device.
        return state["cpu"].cpu(), [one.cpu() for one in state["cuda"]]
    except (TypeError, KeyError, AttributeError) as error:
        raise _malformed("torch", error) from error


def _given_setters(state: Any, generators: Mapping[str, object]) -> list[_Setter]:
    if not isinstance(state, Mapping):
        raise _malformed("generators", quoted(state))
    if set(state) != set(generators):
        raise IncompatibleState(
            "other generators are given than were captured",
            where="generators",
            expected=", ".join(map(str, state)) or "none",
            found=", ".join(map(str, generators)) or "none",
        )
    setters: list[_Setter] = []
    for name, generator in generators.items():
        before = _state_of(name, generator)
        if _kind(before) != _kind(state[name]):
            raise IncompatibleState(
                "the generator is of another kind than the captured one",
                where=f"generators/{name}",
                expected=_kind(state[name]),
                found=_kind(before),
            )
        set_state = _setter_of(generator)
        setters.append(_checked(f"generators/{name}", set_state, set_state, state[name]))
        set_state(before)  # the check above has set it; nothing may change before all are checked
    return setters


def _checked(where: str, trial: _Set, really: _Set, value: Any) -> _Setter:
    """Return a call that sets a state, after it was tried on another generator."""
    try:
        trial(value)
    except (TypeError, ValueError, KeyError, RuntimeError, IndexError, OverflowError) as error:
        raise _malformed(where, error) from error
    return lambda: really(value)


def _by_name(generators: Mapping[str, object] | None) -> Mapping[str, object]:
    given = {} if generators is None else generators
    if isinstance(given, Mapping) and all(isinstance(name, str) for name in given):
        return given
    raise InvalidInput(
        "generators are given by name", expected="a dict with strings as keys", found=quoted(given)
    )


def _state_of(name: str, generator: object) -> Any:
    """Return the state of a generator that was given."""
    match generator:
        case random.Random() if not isinstance(generator, random.SystemRandom):  # has no state
            return generator.getstate()
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None and isinstance(generator, numpy.random.Generator):
        return generator.bit_generator.state
    if numpy is not None and isinstance(generator, numpy.random.RandomState):
        return generator.get_state(legacy=False)
    if torch is not None and isinstance(generator, torch.Generator):
        return generator.get_state()
    raise InvalidInput(
        "not a random number generator",
        where=f"generators[{name!r}]",
        expected="numpy.random.Generator or RandomState, random.Random, or torch.Generator",
        found=quoted(type(generator).__name__),
    )


def _setter_of(generator: Any) -> _Set:
    if isinstance(generator, random.Random):
        return generator.setstate
    if hasattr(generator, "bit_generator"):
        return lambda value: setattr(generator.bit_generator, "state", value)
    if type(generator).__module__.partition(".")[0] == "torch":
        return lambda value: generator.set_state(value.cpu())
    return generator.set_state  # type: ignore[no-any-return]  # numpy.random.RandomState


def _kind(state: Any) -> str:
    """Return the kind of a generator by its state."""
    if isinstance(state, Mapping):
        return str(state.get("bit_generator"))
    return "random.Random" if isinstance(state, tuple) else "torch.Generator"


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise IncompatibleState(
            f"the state has a generator of {name}, which cannot be imported",
            where=name,
            found=error,
            hint=f"Install it: pip install {name}.",
        ) from error


def _malformed(where: str, found: object) -> IncompatibleState:
    return IncompatibleState(
        "not the state of a generator",
        where=where,
        expected="what holdfast.rng.capture() returned",
        found=found,
    )
