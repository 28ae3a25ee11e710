"""`flatten`: split a state into components, each a skeleton and its array leaves."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from holdfast.registry.errors import UnsupportedValue
from holdfast.registry.pytree import libraries
from holdfast.registry.pytree.encoding import Encoder, has_state_dict, state_dict_of
from holdfast.registry.pytree.leaves import ArrayLeaf
from holdfast.registry.pytree.paths import clip, shown
from holdfast.registry.values.canonical import Json

_BARE_TAGS = frozenset({"t", "n", "nt"})


@dataclass(frozen=True, slots=True)
class FlatComponent:
    """A top-level entry of a state.

    Attributes:
        name: Its key.
        skeleton: Canonical JSON with every value; a number replaces each array.
        leaves: The arrays, by number.
        is_bare: Whether the entry is itself an array and not a container.
    """

    name: str
    skeleton: Json
    leaves: tuple[ArrayLeaf, ...]
    is_bare: bool


@dataclass(frozen=True, slots=True)
class FlatState:
    """A state as components.

    Attributes:
        kind: `dict` or `odict` (OrderedDict).
        components: The entries, in their order.
    """

    kind: str
    components: tuple[FlatComponent, ...]


def flatten(state: object, new_encoder: Callable[[], Encoder] = Encoder) -> FlatState:
    """Split a state into components without copying its arrays.

    Parameters are loaded as plain tensors. Tied memory, strides and requires_grad are not kept. If
    the whole state is a state_dict, the version metadata that torch adds to it is not kept either.

    Args:
        state: A dict or OrderedDict with string keys, or an object with `state_dict()`.
        new_encoder: Makes the encoder of a component.

    Raises:
        UnsupportedValue: A value in it cannot be stored; the message names its path.
    """
    libraries.load_seen()
    if has_state_dict(state):
        state = state_dict_of(state, "state")
    if type(state) is dict:
        kind = "dict"
    elif type(state) is OrderedDict:
        kind = "odict"
    else:
        raise UnsupportedValue(
            "a state must be a dict with string keys, or have state_dict()",
            where="state",
            found=type(state).__name__,
            hint="Wrap it: {'model': ...}.",
        )
    return FlatState(kind, tuple(_component(state, name, new_encoder()) for name in state))


def await_devices(state: FlatState) -> None:
    """Wait for the caller's own CUDA streams, so that threads copy the values that the caller sees.

    Copies in the thread pool run on streams of their own, which do not wait for the caller's.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return
    leaves = (leaf.source for part in state.components for leaf in part.leaves)
    for device in {tensor.device for tensor in leaves if getattr(tensor, "is_cuda", False)}:
        torch.cuda.current_stream(device).synchronize()


def _component(state: dict[str, object], name: object, encoder: Encoder) -> FlatComponent:
    if type(name) is not str:
        raise UnsupportedValue(
            "the top-level keys of a state must be strings",
            where=shown((None, name)),
            found=clip(name),
            hint="Use str(key), or wrap the dict: {'state': ...}.",
        )
    link = (None, name)
    encoder.text(name, link)
    encoder.enter(state, (None, name), 0)
    skeleton = encoder.node(state[name], link, 1)
    is_bare = type(skeleton) is dict and not _BARE_TAGS.isdisjoint(skeleton)
    return FlatComponent(name, skeleton, tuple(encoder.leaves), is_bare)
