"""`flatten`: split a state into components, each a skeleton and its array leaves."""

from __future__ import annotations

import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from holdfast.registry.errors import Malformed, UnsupportedValue
from holdfast.registry.pytree import containers, libraries, scalars, tensor_bytes  # noqa: F401 - they register codecs
from holdfast.registry.pytree.encoding import Encoder, has_state_dict, state_dict_of
from holdfast.registry.pytree.leaves import ArrayLeaf
from holdfast.registry.pytree.paths import clip, component_path, segment, shown
from holdfast.registry.pytree.survey import ARRAY_TAGS
from holdfast.registry.values import Json

#: Metadata of modules that `load_state_dict` treats like none.
_FIRST_VERSION = frozenset({"{}", "{'version': 1}", "{'version': None}"})
_BARE_TAGS = frozenset({"t", "n", "nt"})


@dataclass(frozen=True, slots=True)
class FlatComponent:
    """A top-level entry of a state."""

    name: str  # its key
    skeleton: Json  # canonical JSON with every value; a number replaces each array
    leaves: tuple[ArrayLeaf, ...]  # the arrays, by number

    @property
    def is_bare(self) -> bool:
        """Whether the entry is itself an array and not a container."""
        return type(self.skeleton) is dict and not _BARE_TAGS.isdisjoint(self.skeleton)


@dataclass(frozen=True, slots=True)
class FlatState:
    """A state as components."""

    kind: str  # `dict` or `odict` (OrderedDict)
    components: tuple[FlatComponent, ...]  # the entries, in their order

    @property
    def leaves(self) -> list[ArrayLeaf]:
        """Return the arrays of all components, in order."""
        return [leaf for part in self.components for leaf in part.leaves]

    @property
    def nbytes(self) -> int:
        """Return the bytes of all arrays."""
        return sum(leaf.nbytes for leaf in self.leaves)


def flatten(state: object, new_encoder: Callable[[], Encoder] = Encoder) -> FlatState:
    """Split a state into components without copying its arrays.

    Parameters are loaded as plain tensors. Tied memory, strides and requires_grad are not kept. If
    the whole state is a state_dict, the versions that torch adds to it are not kept either: any but
    1 is warned of.
    """
    libraries.load_seen()
    if has_state_dict(state):
        state = state_dict_of(state, "state")
    if type(state) is dict:
        kind = "dict"
    elif type(state) is OrderedDict:
        kind = "odict"
        _check_attributes(state)
    else:
        raise UnsupportedValue(
            "a state must be a dict with string keys, or have state_dict()",
            where="state",
            found=type(state).__name__,
            hint="Wrap it: {'model': ...}.",
        )
    return FlatState(kind, tuple(_component(state, name, new_encoder()) for name in state))


def _check_attributes(state: OrderedDict[str, object]) -> None:
    """Refuse attributes of a state, and warn of versions in its `_metadata`: they are not kept."""
    for name in vars(state).keys() - {"_metadata"}:
        what = f"an OrderedDict with an attribute ({name}) cannot be stored"
        raise UnsupportedValue(what, where="state", hint="Store both apart.")
    metadata = vars(state).get("_metadata", {})
    for module, known in metadata.items() if isinstance(metadata, Mapping) else [("", metadata)]:
        if isinstance(known, Mapping):  # how it was loaded before is no version
            known = {key: one for key, one in known.items() if key != "assign_to_params_buffers"}
        # Version 2 of a BatchNorm says only that it has this key.
        tracked = f"{module}.num_batches_tracked".lstrip(".")
        if clip(known) not in _FIRST_VERSION and tracked not in state:
            text = (
                f"the versions of modules are not kept in a state that is a state_dict itself: "
                f"module {module!r} has {clip(known)}. Save {{'model': model}} instead."
            )
            warnings.warn(text, UserWarning, stacklevel=2)
            return


def await_devices(state: FlatState) -> None:
    """Wait for the caller's own CUDA streams, so that threads copy the values that the caller sees.

    Copies in the thread pool run on streams of their own, which do not wait for the caller's.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return
    sources = (leaf.source for leaf in state.leaves)
    for device in {tensor.device for tensor in sources if getattr(tensor, "is_cuda", False)}:
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
    return FlatComponent(name, skeleton, tuple(encoder.leaves))


# Cut a stored component down to some of the values in its dicts, without rebuilding any value.


#: Tag of a dict -> the place of its pairs in the payload; `None` if the payload is the pairs.
DICTS: dict[str, int | None] = {"d": None, "od": None, "sd": 0, "dd": 1}


def cut_down(
    name: str, skeleton: Json, wanted: Collection[str], count: int
) -> tuple[Json, list[int]] | None:
    """Return the skeleton of the wanted values and the dicts around them, and their arrays.

    Lists and tuples are kept as a whole, for their items have no names.
    """
    found: set[str] = set()
    kept = _kept(component_path(name), skeleton, wanted, found)
    if kept is None or found != set(wanted):
        return None
    return renumbered(name, kept[0], count)


def renumbered(name: str, node: Json, count: int) -> tuple[Json, list[int]]:
    """Return a node of a component as a skeleton of its own, whose arrays are numbered from 0."""
    numbers: list[Any] = []
    cut = _renumbered(node, numbers)
    are_numbers = all(type(number) is int and number < count for number in numbers)
    if not are_numbers or any(one >= other for one, other in pairwise([-1, *numbers])):
        raise Malformed("an array where none may be, in a skeleton", where=name)
    return cut, numbers


def steps_at(name: str, skeleton: Json, path: str) -> tuple[int, list[str]] | None:
    """Return the depth of a dict in a component and the steps that lead on from it."""
    here, depth = component_path(name), 1
    while here != path:
        for step, child in _named(here, skeleton):
            if path == step or path.startswith(f"{step}/"):
                here, skeleton, depth = step, child, depth + 1
                break
        else:
            return None
    if pairs_of(skeleton) is None:
        return None
    return depth, [step.removeprefix(f"{path}/") for step, _ in _named(path, skeleton)]


def _kept(path: str, node: Any, wanted: Collection[str], found: set[str]) -> Any:
    """Return a list of the wanted parts of a node; `None` if there are none."""
    if path in wanted:
        found.add(path)
        found.update(
            one for one in wanted if one.startswith(f"{path}/") and _leads(path, node, one)
        )
        return [node]
    pairs = pairs_of(node)
    if pairs is None or not any(one.startswith(f"{path}/") for one in wanted):
        return None
    inner = []
    for key, child in pairs:
        rest = _kept(f"{path}/{segment(key)}", child, wanted, found)
        if rest is not None:
            inner.append([key, rest[0]])
    [(tag, payload)] = node.items()
    at = DICTS[tag]
    if at is None:
        return [{tag: inner}]
    return [{tag: [*payload[:at], inner, *payload[at + 1 :]]}]


def _leads(path: str, node: Any, wanted: str) -> bool:
    return any(
        step == wanted or (wanted.startswith(f"{step}/") and _leads(step, child, wanted))
        for step, child in _named(path, node)
    )


def _named(path: str, node: Any) -> Iterator[tuple[str, Any]]:
    for key, child in pairs_of(node) or ():
        yield f"{path}/{segment(key)}", child


def pairs_of(node: Any, dicts: Mapping[str, int | None] = DICTS) -> list[Any] | None:
    """Return the pairs of a dict in a skeleton, or `None` if the node is no dict of these tags."""
    if type(node) is not dict or len(node) != 1:
        return None
    [(tag, payload)] = node.items()
    if tag not in dicts:
        return None
    at = dicts[tag]
    pairs: list[Any] = payload if at is None else payload[at]
    return pairs


def _renumbered(node: Any, numbers: list[Any]) -> Any:
    """Return a node whose arrays are numbered in their order; add their old numbers.

    It also sees payloads without nodes, in which a hostile skeleton can hide anything.
    """
    if type(node) is list:
        return [_renumbered(item, numbers) for item in node]
    if type(node) is not dict or len(node) != 1:
        return node
    [(tag, payload)] = node.items()
    if tag not in ARRAY_TAGS:
        return {tag: _renumbered(payload, numbers)}
    has_unit = tag == "nt" and type(payload) is list and payload
    numbers.append(payload[0] if has_unit else payload)
    new = len(numbers) - 1
    return {tag: [new, *payload[1:]] if has_unit else new}
