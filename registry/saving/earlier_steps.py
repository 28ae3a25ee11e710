"""The alarm for a state of an earlier step that is saved under a later one.

An asynchronous saver that passes on an old buffer saves the bytes of an earlier step again. The
digests of components, which a save computes anyway, show that. Only components that equal those of
an earlier step are examined.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import chain, zip_longest

from holdfast.backends.escape import printable
from holdfast.registry.errors import IncompatibleState
from holdfast.registry.objects import Component, TensorEntry
from holdfast.registry.pytree import DICTS
from holdfast.registry.values import FLOATING, Digest, Json

_LOGGER = logging.getLogger("holdfast")
#: Maximum number of remembered saves, and of component digests in all of them.
_SAVES, _DIGESTS = 64, 4096
#: Where the state of an optimizer, or of several in a dict or a list, begins.
_DEPTH = 3
#: Length of torch's state of a generator on the CPU, in bytes, and of Python's, in numbers.
_TORCH_RNG_BYTES, _PYTHON_RNG_NUMBERS = 5056, 625
#: Element types and shapes of the tensors in which generators of torch and NumPy keep their state.
_GENERATORS = {("uint8", (_TORCH_RNG_BYTES,)), ("uint8", (16,)), ("uint32", (624,))}

Components = Mapping[str, Component]


class EarlierSteps:
    """The components of earlier steps that a handle knows.

    A component that has to change but equals that of an earlier step is refused, or a warning says
    so.
    """

    def __init__(self) -> None:
        self._warned: set[str] = set()
        self.forget()

    def forget(self) -> None:
        """Forget all steps, because training goes back."""
        self._saves: list[tuple[str, int, dict[str, Digest]]] = []
        self._last: tuple[str, int, Components] | None = None

    def remember(self, phase: str, step: int, components: Components) -> None:
        """Remember the components of a step."""
        self._last = phase, step, components
        digests = {name: one.digest for name, one in components.items()}
        self._saves = [save for save in self._saves if save[:2] != (phase, step)]
        self._saves = [*self._saves[1 - _SAVES :], (phase, step, digests)]
        while len(self._saves) > 1 and sum(len(save[2]) for save in self._saves) > _DIGESTS:
            del self._saves[0]

    def check(
        self,
        phase: str,
        step: int,
        components: Components,
        declared: tuple[str, ...] | None,
        where: str,
    ) -> None:
        """Compare a state with those of earlier steps."""
        equal = self._equal(phase, step, components)
        if declared is not None:
            for name, earlier in equal.items():
                if any(fnmatchcase(name, pattern) for pattern in declared):
                    raise IncompatibleState(
                        f"component {printable(name)} has to change, and has the bytes of step "
                        f"{earlier}",
                        where=where,
                        expected=f"another state than at step {earlier}",
                        found=components[name].digest.short,
                        hint="Save a copy that was made at this step; the preset lists the "
                        "component in `must_change`.",
                    )
            return
        found = _suspicious(components, equal)
        self._warn_of_standstill(phase, step, components, where, is_told=bool(found))
        for name in found:
            if name not in self._warned:
                self._warned.add(name)
                _LOGGER.warning(
                    "%s: %s has the bytes of step %d. Was an old copy saved? If it may stay the "
                    "same, the preset's `must_change` can say so",
                    where,
                    printable(name),
                    equal[name],
                )

    def _warn_of_standstill(
        self, phase: str, step: int, components: Components, where: str, *, is_told: bool
    ) -> None:
        """Warn once of a save that has every tensor of the one before it, at an earlier step."""
        if "" in self._warned or self._last is None:
            return
        known_phase, known_step, known = self._last
        if known_phase != phase or known_step >= step or not _stands_still(known, components):
            return
        self._warned.add("")  # no component has this name
        if not is_told:
            _LOGGER.warning(
                "%s: no tensor has changed since step %d. Has the optimizer stopped, or is this "
                "not the state that is trained? If it may stay the same, the preset's "
                "`must_change = []` says so",
                where,
                known_step,
            )

    def _equal(self, phase: str, step: int, components: Components) -> dict[str, int]:
        """Return the newest earlier step of each component that is equal there."""
        found: dict[str, int] = {}
        for known_phase, known_step, digests in self._saves:
            if known_phase != phase or known_step >= step:
                continue
            for name, digest in digests.items():
                if name in components and components[name].digest == digest:
                    found[name] = known_step
        return found


def _stands_still(before: Components, now: Components) -> bool:
    """Return whether two states have the same tensors, some of them, generators left aside.

    The first tensor that differs ends the comparison. With a learning rate of zero nothing has to
    change.
    """
    if not any(_weighty(one) for part in now.values() for one in part.tensors):
        return False
    for name in before.keys() | now.keys():
        parts = [one[name].tensors if name in one else () for one in (before, now)]
        if any(a != b and _weighty(a or b) for a, b in zip_longest(*parts)):
            return False
    groups = _groups([one for part in now.values() for one in _optimizers(part)])
    return not groups or any(_is_learning(group) for group in groups)


def _weighty(tensor: TensorEntry | None) -> bool:
    """Return whether a tensor is not the state of a random generator."""
    return tensor is not None and (tensor.dtype, tensor.shape) not in _GENERATORS


def _suspicious(components: Components, equal: Mapping[str, int]) -> list[str]:
    """Return the components, among those that are equal to earlier ones, that had to change."""
    if not equal:
        return []
    optimizers = [one for part in components.values() for one in _optimizers(part)]
    counting = {name for name, part in components.items() if _has_counters(part)}
    weights = _weights(components, optimizers)
    found = [name for name in equal if name in counting]
    if weights <= equal.keys() and any(_is_learning(group) for group in _groups(optimizers)):
        found += sorted(weights)
    # A training that draws nothing between two steps has the same generators: no dropout, and the
    # order of the data is drawn once an epoch. Then the rest tells that the step is a new one.
    if not (counting | weights) - equal.keys():
        found += [name for name in equal if _has_generator(components[name])]
    return list(dict.fromkeys(found))


def _has_counters(part: Component) -> bool:
    """Return whether a component has an optimizer's counters of steps."""
    kept = (_pairs(one["state"]).values() for one in _optimizers(part))
    return any("step" in _pairs(of) for of in chain.from_iterable(kept))


def _weights(components: Components, optimizers: Sequence[Mapping[str, Json]]) -> set[str]:
    """Return the components that have a floating tensor for each parameter of the optimizers."""
    params = [group.get("params") for group in _groups(optimizers)]
    least = max(sum(len(one) for one in params if isinstance(one, list)), 1)
    return {
        name
        for name, part in components.items()
        if optimizers
        and sum(tensor.dtype in FLOATING for tensor in part.tensors) >= least
        and not any(_optimizers(part))
    }


def _is_learning(group: Mapping[str, Json]) -> bool:
    """Return whether a learning rate is not zero; a tensor is taken for one that is not."""
    rate = group.get("lr", 0)
    return rate not in (0, {"f": "0" * 16})


def _has_generator(part: Component) -> bool:
    """Return whether a component holds the state of a random generator."""
    if any(one.dtype == "uint8" and one.shape == (_TORCH_RNG_BYTES,) for one in part.tensors):
        return True
    stack: list[Json] = [part.skeleton]
    while stack:
        node = stack.pop()
        if isinstance(node, list):
            if len(node) == _PYTHON_RNG_NUMBERS and all(type(one) is int for one in node):
                return True
            stack += [child for child in node if isinstance(child, list | dict)]
        elif isinstance(node, dict):
            if "bit_generator" in _pairs(node):
                return True
            stack += [child for child in node.values() if isinstance(child, list | dict)]
    return False


def _optimizers(part: Component) -> Iterator[dict[str, Json]]:
    """Yield the results of `Optimizer.state_dict` in a component."""
    level: list[Json] = [part.skeleton]
    for _ in range(_DEPTH):
        dicts = [pairs for node in level if (pairs := _pairs(node))]
        yield from (one for one in dicts if {"state", "param_groups"} <= one.keys())
        lists = [node for node in level if isinstance(node, list)]
        level = [child for one in dicts for child in one.values()]
        level += [child for one in lists for child in one if isinstance(child, list | dict)]


def _groups(optimizers: Iterable[Mapping[str, Json]]) -> list[dict[str, Json]]:
    """Return the groups of parameters of optimizers."""
    lists = [one["param_groups"] for one in optimizers]
    return [_pairs(group) for groups in lists if isinstance(groups, list) for group in groups]


def _pairs(node: Json) -> dict[str, Json]:
    """Return a node of a skeleton as a dict, with its keys as texts; empty if it is no dict."""
    if not isinstance(node, dict):
        return {}
    for tag, payload in node.items():
        if tag in DICTS and isinstance(payload, list):
            at = DICTS[tag]
            pairs = payload if at is None else payload[at] if at < len(payload) else None
            if isinstance(pairs, list):
                return {str(one[0]): one[1] for one in pairs if isinstance(one, list) and one[1:]}
    return {}
