"""What must hold before a phase may end: the source fits, what must be zero is, metrics are there.

Each check gives everything that is wrong as clauses; none of them changes anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from holdfast.registry import pytree
from holdfast.registry.errors import InvalidInput
from holdfast.registry.history.log_values import check_metrics
from holdfast.registry.pytree import traversal
from holdfast.registry.spec import Readiness, Transition
from holdfast.registry.spec.requirements import first_of
from holdfast.registry.values.suggest import near

_Tensors = dict[str, tuple[str, tuple[int, ...]]]


def differences(
    rules: Transition, source: Mapping[str, Any], targets: Mapping[str, Any]
) -> Iterator[str]:
    """Yield how the strict parts differ from the targets that they are for.

    Both ways: every tensor of the one is in the other, with the same shape and dtype
    (seeds/hydra.md, Strict loading).

    Raises:
        InvalidInput: A strict part has no target, or a target is of no strict part.
    """
    known = [name.strip() for part in rules.strict for name in part.split("|")]
    for name in targets:
        if name not in known:
            raise InvalidInput(
                "a target is of no part that is checked",
                where=f"targets[{name!r}]",
                expected=", ".join(rules.strict) or "none",
                hint=near(name, known),
            )
    for part in rules.strict:
        named = first_of(part, targets)
        if named is None:
            raise InvalidInput(
                "the transition checks a part strictly, and no target is given for it",
                where=f"targets[{part!r}]",
                expected="the module that it is to be loaded into, or its state_dict()",
            )
        found = first_of(part, source)
        if found is None:
            yield f"{part} is not in the source"
        else:
            yield from _compare(_tensors(found, source[found]), _tensors(found, targets[named]))


def not_zero(rules: Transition, source: Mapping[str, Any]) -> Iterator[str]:
    """Yield what must be zero and is not, and patterns that nothing in the source matches."""
    leaves = [leaf for name, value in source.items() for leaf in traversal.walk(name, value)]
    for pattern in rules.zero:
        ways = [one.strip() for one in pattern.split("|")]
        matched = [leaf for leaf in leaves if any(fnmatchcase(leaf[0], way) for way in ways)]
        if not matched:
            yield f"nothing is there to be zero: {pattern}"
        for path, value in matched:
            if not traversal.is_zero(value):
                yield f"{path} is not zero"


def readiness(
    rules: Transition, known: Mapping[str, float], given: Mapping[str, object] | None
) -> tuple[dict[str, float], list[str]]:
    """Return the metrics that are checked with their values, and what is wrong with them.

    Args:
        rules: The transition.
        known: Metrics of the source.
        given: Those that the caller gives; they count before the source's.

    Raises:
        InvalidInput: What is given are no metrics.
    """
    metrics = {**known, **check_metrics(given)}
    checked = {one.metric: metrics[one.metric] for one in rules.ready if one.metric in metrics}
    wrong = [clause for one in rules.ready if (clause := _unready(one, metrics))]
    return checked, wrong


def _unready(rule: Readiness, metrics: Mapping[str, float]) -> str | None:
    value = metrics.get(rule.metric)
    if value is None:
        return f"{rule.metric} is not known"
    # Asked this way round, so that NaN passes neither.
    if rule.at_least is not None and not value >= rule.at_least:
        return f"{rule.metric} is {value:g}, must be at least {rule.at_least:g}"
    if rule.at_most is not None and not value <= rule.at_most:
        return f"{rule.metric} is {value:g}, must be at most {rule.at_most:g}"
    return None


def _tensors(name: str, value: Any) -> _Tensors:
    leaves = traversal.walk(name, value)
    return {path: pytree.describe(leaf) for path, leaf in leaves if traversal.is_array(leaf)}


def _compare(source: _Tensors, target: _Tensors) -> Iterator[str]:
    for path, (dtype, shape) in source.items():
        if path not in target:
            yield f"{path} is not in the target"
        elif target[path] != (dtype, shape):
            wanted, axes = target[path]
            yield f"{path} is {dtype}{list(shape)}, target {wanted}{list(axes)}"
    for path in target:
        if path not in source:
            yield f"{path} is not in the source"
