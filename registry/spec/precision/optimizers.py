"""Find the optimizer state within a state, by its keys and by its shape.

Pure. Every other tensor counts as a model's: it is averaged and may lose precision.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

from holdfast.registry.pytree import FlatComponent
from holdfast.registry.values import Json

#: Keys that optimizers have in a state: `optimizer`, `actor_optim`, `opt_state`.
_OPTIMIZER = re.compile(
    r"(?:.*[_.-])?opt(?:im)?s?(?:[_.\-\d].*)?|.*optimi[sz]er.*", re.IGNORECASE | re.DOTALL
)
#: Names of the tensors that torch's optimizers keep for a parameter, alone or after a dot. They are
#: enough without `param_groups`. Names that models use too (`sum`, `step`) are not in this list.
_MOMENT = re.compile(
    r"(?:.*\.)?(?:(?:max_)?exp_avg(?:_.*)?|exp_inf|momentum_buffer|square_avg|grad_avg|acc_delta)",
    re.DOTALL,
)
#: The names of optax, which are moments only together; one of them alone may be a model's mean.
_MU_NU = frozenset(("mu", "nu"))
#: Keys of the result of `torch.optim.Optimizer.state_dict`.
_OPTIMIZER_KEYS = {"state", "param_groups"}
#: Tag of a dict -> the position of its pairs in the payload; `None` if they are the payload.
_PAIRS = {"d": None, "od": None, "sd": 0, "dd": 1}


def optimizer_leaves(part: FlatComponent) -> set[int]:
    """Return the numbers of the leaves that are optimizer state, by their keys or by its shape."""
    paths = [leaf.path for leaf in part.leaves]
    moments = _moments(paths)
    found = {
        number
        for number, path in enumerate(paths)
        if any(_is_optimizer_key(step) for step in _containers(path))
        or any(_is_moment_key(step) for step in path.split("/"))
        or path in moments
    }
    stack: list[tuple[Json, bool]] = [(part.skeleton, False)]
    while stack:
        node, inside = stack.pop()
        if isinstance(node, list):
            stack += [(child, inside) for child in node if isinstance(child, (list, dict))]
        elif isinstance(node, dict):
            for tag, payload in node.items():
                if inside and tag in ("t", "n") and isinstance(payload, int):
                    found.add(payload)
                elif isinstance(payload, (list, dict)):
                    stack.append((payload, inside or _is_optimizer(tag, payload)))
    return found


def _moments(paths: Iterable[str]) -> set[str]:
    """Return the paths below a `mu` and a `nu` with the same parent."""
    beside: dict[str, set[str]] = {}
    below: dict[str, list[str]] = {}
    for path in paths:
        steps = path.split("/")
        for at, step in enumerate(steps):
            if step in _MU_NU:
                parent = "/".join(steps[:at])
                beside.setdefault(parent, set()).add(step)
                below.setdefault(parent, []).append(path)
    return {path for parent, met in beside.items() if met == _MU_NU for path in below[parent]}


def _containers(path: str) -> list[str]:
    """Return the keys of the containers of a tensor; for a bare tensor its own key."""
    steps = path.split("/")
    return steps[:-1] or steps


@lru_cache(maxsize=4096)  # a state has thousands of tensors under a few keys
def _is_optimizer_key(step: str) -> bool:
    return _OPTIMIZER.fullmatch(step) is not None


@lru_cache(maxsize=4096)  # the tensors' own keys repeat as well
def _is_moment_key(step: str) -> bool:
    return _MOMENT.fullmatch(step) is not None


def _is_optimizer(tag: str, payload: Json) -> bool:
    """Return whether a node is a dict with the keys of an optimizer's state_dict."""
    if tag not in _PAIRS or not isinstance(payload, list):
        return False
    index = _PAIRS[tag]
    pairs = payload if index is None else payload[index] if index < len(payload) else None
    if not isinstance(pairs, list):
        return False
    keys = [pair[0] for pair in pairs if isinstance(pair, list) and pair]
    return all(key in keys for key in _OPTIMIZER_KEYS)
