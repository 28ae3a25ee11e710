"""Checks before a phase may end: strict parts fit, tensors that must be zero are, metrics suffice.

Each check yields every problem as a clause; none of them changes anything.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from holdfast.registry import pytree
from holdfast.registry.errors import InvalidInput
from holdfast.registry.history import check_metrics
from holdfast.registry.pytree import traversal
from holdfast.registry.spec import Readiness, Transition, first_of
from holdfast.registry.values import near

_Tensors = dict[str, tuple[str, tuple[int, ...]]]


def differences(
    rules: Transition, source: Mapping[str, Any], targets: Mapping[str, Any]
) -> Iterator[str]:
    """Yield the differences between the strict parts and their targets.

    Every tensor of the one must be in the other, with the same shape and dtype (document of Hydra,
    Strict loading).
    """
    known = [name.strip() for part in rules.strict for name in part.split("|")]
    for name in targets:
        if name not in known:
            raise InvalidInput(
                "the transition does not check a part of this name",
                where=f"targets[{name!r}]",
                expected=", ".join(rules.strict) or "none",
                hint=near(name, known),
            )
    for part in rules.strict:
        named = first_of(part, targets)
        if named is None:
            raise InvalidInput(
                "the transition checks a part strictly, but no target is given for it",
                where=f"targets[{part!r}]",
                expected="the module that will load the part, or its state_dict()",
            )
        found = first_of(part, source)
        if found is None:
            yield f"{part} is not in the source"
        else:
            yield from _compare(_tensors(found, source[found]), _tensors(found, targets[named]))


def not_zero(patterns: Iterable[str], source: Mapping[str, Any]) -> Iterator[str]:
    """Yield tensors that must be zero and are not, and patterns that match nothing."""
    leaves = [leaf for name, value in source.items() for leaf in traversal.walk(name, value)]
    for pattern in patterns:
        choices = [one.strip() for one in pattern.split("|")]
        matched = [leaf for leaf in leaves if any(fnmatchcase(leaf[0], one) for one in choices)]
        if not matched:
            yield f"no tensor that must be zero matches: {pattern}"
        for path, value in matched:
            if not traversal.is_zero(value):
                yield f"{path} is not zero"


def readiness(
    rules: Transition,
    enabled: Collection[str],
    known: Mapping[str, float],
    given: Mapping[str, object] | None,
) -> tuple[dict[str, float], list[str]]:
    """Return the checked metrics with their values, and the problems."""
    metrics = {**known, **check_metrics(given)}
    ready = [one for one in rules.ready if one.when is None or one.when in enabled]
    checked = {one.metric: metrics[one.metric] for one in ready if one.metric in metrics}
    wrong = [clause for one in ready if (clause := _unready(one, metrics))]
    return checked, wrong


def _unready(rule: Readiness, metrics: Mapping[str, float]) -> str | None:
    value = metrics.get(rule.metric)
    if value is None:
        return f"{rule.metric} is not known"
    # Written with `not`, so that NaN passes neither.
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
