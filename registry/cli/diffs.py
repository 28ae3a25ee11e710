"""`diff` and `run diff`: the differences between two checkpoints, and between two runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from holdfast.registry.cli import output
from holdfast.registry.cli.columns import Column, Table, numbers
from holdfast.registry.cli.command import Answer, command
from holdfast.registry.cli.describe import picked, tensor_json
from holdfast.registry.cli.opening import reads
from holdfast.registry.cli.options import argument, flag
from holdfast.registry.cli.output import Part
from holdfast.registry.comparing import KINDS, Branches, Diff, Distance, StepPair, TensorDiff
from holdfast.registry.comparing import diff as compare
from holdfast.registry.face import Registry
from holdfast.registry.history import ValueDiff, json_ready, parent_ref, phase_value, step_ref
from holdfast.registry.history.replay import CheckpointRecord
from holdfast.registry.loading import Checkpoint, TensorInfo

_DIFF = (
    Column("component", "name"),
    Column("is", "kind"),
    *numbers(*(f"{kind}=tensors.{kind}" for kind in KINDS), "values", drop=1),
)
#: How many differences a person is shown; `--json` has all.
SHOWN = 40
_BRANCHES = (
    Column("step", "at"),
    Column("first", text=lambda side: _metrics(side), none="-", folds=True),
    Column("second", text=lambda side: _metrics(side), none="-", folds=True),
    Column("state", "same", {True: "same", False: "differs"}.get, none="-"),
)
_SIGNS = {"changed": "~", "reshaped": "~", "moved": ">", "added": "+", "removed": "-"}


@command(reads, table=True)
def diff(
    opened: Registry,
    *,
    before: str = argument("REF", "The first checkpoint."),
    after: str = argument("REF", "The second one."),
    values: bool = flag("--values", "Read changed tensors, and show how far they moved."),
) -> Answer:
    """Compare two checkpoints; only --values reads their data."""
    old, new = opened.checkpoint(before), opened.checkpoint(after)
    found = compare(old.handle, new.handle, values=values)
    return Answer(
        lambda: _diff_json(old, new, found, values=values),
        lambda: [f"the same state: {new.digest.short}"] if found.is_same else _print_diff(found),
    )


@command(reads, table=True)
def run_diff(
    opened: Registry,
    *,
    first: str = argument("RUN", "The first run."),
    second: str = argument("RUN", "The second one."),
) -> Answer:
    """Compare two runs side by side, such as two forks.

    Shows their settings, their metrics by step, and the first difference of their states.
    """
    found = opened.compare(first, second)
    return Answer(lambda: _branches_json(found), lambda: _print_branches(found))


def _print_branches(found: Branches) -> Iterator[Part]:
    fork = found.fork
    yield f"fork: {'none in common' if fork is None else parent_ref(fork)}"
    yield from (str(one) for one in (*found.settings, *found.config))
    yield ""
    yield Table(_BRANCHES, [{**_pair_json(pair), "at": step_ref(pair)} for pair in found.steps])
    yield ""
    if found.difference is None or found.differs_at is None:
        yield "no common step differs"
        return
    yield f"first difference, at {step_ref(found.differs_at)}:"
    yield from _print_diff(found.difference, is_main=False)


def _metrics(side: dict[str, Any]) -> str:
    return output.metrics(side["metrics"]) or side["id"].short


def _branches_json(found: Branches) -> dict[str, Any]:
    fork, at = found.fork, found.differs_at
    return {
        "first": found.first,
        "second": found.second,
        "fork": fork and {"ref": parent_ref(fork), "id": fork.checkpoint, "commit": fork.commit},
        "settings": [_value_json(one) for one in found.settings],
        "config": [_value_json(one) for one in found.config],
        "steps": [_pair_json(pair) for pair in found.steps],
        "differs_at": at and {"phase": phase_value(at.phase), "step": at.step},
        "tensors": differing_json(found.difference),
        "values": [
            _value_json(one) for one in (found.difference.values if found.difference else ())
        ],
    }


def _pair_json(pair: StepPair) -> dict[str, Any]:
    return {
        "phase": phase_value(pair.phase),
        "step": pair.step,
        "same": pair.is_same,
        "first": _record_json(pair.first),
        "second": _record_json(pair.second),
    }


def _record_json(record: CheckpointRecord | None) -> dict[str, Any] | None:
    return None if record is None else {"id": record.manifest, "metrics": record.metrics}


def _value_json(value: ValueDiff) -> dict[str, Any]:
    return {
        **picked(value, "kind path"),
        "before": json_ready(value.before),
        "after": json_ready(value.after),
    }


def _print_diff(found: Diff, *, is_main: bool = True) -> Iterator[Part]:
    yield Table(_DIFF, _components_json(found), is_main=is_main)
    lines = [_tensor_line(tensor) for tensor in found.differing]
    lines += [str(value) for value in found.values]
    if lines:
        yield ""
    yield from lines[:SHOWN]
    yield from output.more(len(lines), SHOWN)


def _tensor_line(tensor: TensorDiff) -> str:
    old, new = tensor.before, tensor.after
    detail = ""
    if tensor.kind == "reshaped" and old and new:
        detail = f": {_form(old)} -> {_form(new)}"
    elif tensor.kind == "moved" and old:
        detail = f": was {old.path}"
    moved = f"  {_distance(tensor.distance)}" if tensor.distance else ""
    return f"{_SIGNS[tensor.kind]} {tensor.path}{detail}  {output.size(tensor.nbytes)}{moved}"


def _form(tensor: TensorInfo) -> str:
    before = "" if tensor.original is None else f" of {tensor.original}"
    return f"{tensor.dtype}{list(tensor.shape)}{before}"


def _distance(found: Distance) -> str:
    parts = [
        f"norm {output.number(found.norm)}",
        f"relative {output.number(found.relative)}",
        f"max {output.number(found.max)}",
        f"{output.share(found.changed_share)} changed",
    ]
    if found.nonfinite:
        parts.append(f"{found.nonfinite:,} NOT FINITE")
    return ", ".join(parts)


def _diff_json(old: Checkpoint, new: Checkpoint, found: Diff, *, values: bool) -> dict[str, Any]:
    return {
        "before": {"ref": old.ref, "id": old.digest},
        "after": {"ref": new.ref, "id": new.digest},
        "same": found.is_same,
        "components": _components_json(found),
        "tensors": [
            tensor_diff_json(tensor) | (_distance_json(tensor.distance) if values else {})
            for tensor in found.differing
        ],
        "values": [_value_json(value) for value in found.values],
    }


def _components_json(found: Diff) -> list[dict[str, Any]]:
    return [
        {
            **picked(part, "name kind"),
            "tensors": {kind: part.tensors.get(kind, 0) for kind in KINDS},
            "size_bytes": {kind: part.nbytes.get(kind, 0) for kind in KINDS},
            "values": part.values,
        }
        for part in found.components
    ]


def tensor_diff_json(found: TensorDiff) -> dict[str, Any]:
    """Return how a tensor differs."""
    return {
        **picked(found, "kind path"),
        "before": found.before and tensor_json(found.before),
        "after": found.after and tensor_json(found.after),
    }


def differing_json(found: Diff | None) -> list[dict[str, Any]]:
    """Return how each tensor differs that does; nothing of no comparison."""
    return [tensor_diff_json(one) for one in found.differing] if found else []


def _distance_json(found: Distance | None) -> dict[str, Any]:
    names = "norm relative max elements=count changed changed_share nonfinite"
    return {"distance": found and picked(found, names)}
