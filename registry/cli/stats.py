"""`stats`: extremes, means and norms of the tensors of a stored state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from holdfast.registry.cli import options, output
from holdfast.registry.cli.columns import Column, Table, numbers
from holdfast.registry.cli.command import Answer, command
from holdfast.registry.cli.describe import picked
from holdfast.registry.cli.opening import DASK, reads, workers_at
from holdfast.registry.cli.options import argument
from holdfast.registry.cli.output import Part, Sentence
from holdfast.registry.comparing import StateStats, TensorStats
from holdfast.registry.comparing import stats as sum_up
from holdfast.registry.face import Registry
from holdfast.registry.loading import Stored

_STATS = (
    Column("tensor", "path"),
    Column("dtype", drop=5),
    Column("shape", drop=6),
    *numbers("min", "max", text=lambda value: _number(value), none="-", drop=1),
    *numbers("mean", text=lambda value: _number(value), none="-", drop=2),
    *numbers("norm", text=output.number, none="-"),
    *numbers("zeros=zeros_share", text=output.share, drop=3),
    *numbers("nan", "inf", text="{:,}".format, drop=4),
    Column("", "fault"),
)


@command(reads, table=True)
def stats(
    opened: Registry,
    *,
    ref: options.Ref,
    patterns: list[str] | None = argument(
        "[PATTERN]...", "Only tensors whose paths match, such as 'model/*'.", default=None
    ),
    dask: str | None = DASK,
) -> Answer:
    """Show minimum, maximum, mean, norm, zeros and NaN of tensors.

    This reads the tensors.
    """
    stored = opened.stored(ref)
    with workers_at(dask) as executor:
        found = sum_up(stored.handle, patterns or (), executor=executor)
    return Answer(lambda: _stats_json(stored, found), lambda: _text(found))


def _text(found: StateStats) -> Iterator[Part]:
    rows = [
        {**_tensor_json(one), "fault": None if one.is_finite else "not finite"}
        for one in found.tensors
    ]
    if rows:
        yield Table(_STATS, rows)
    yield Sentence(_total(found))


def _number(value: float | list[float]) -> str:
    """Return a number in words; a complex one is a list in JSON."""
    if isinstance(value, int | float):
        return output.number(value)
    real, imaginary = value
    return f"{real:.6g}{imaginary:+.6g}j"


def _total(found: StateStats) -> str:
    parts = [
        output.counted(len(found.tensors), "tensor"),
        output.size(found.nbytes),
        output.counted(found.count, "element"),
        f"norm {output.number(found.norm)}",
        f"{output.share(found.zeros_share)} zeros",
    ]
    if found.nonfinite:
        parts += [f"{found.nan:,} NaN", f"{found.inf:,} infinite"]
        parts += [f"NOT FINITE: {output.counted(len(found.nonfinite), 'tensor')}"]
    else:
        parts.append("all finite")
    return ", ".join(parts)


def _stats_json(stored: Stored, found: StateStats) -> dict[str, Any]:
    sums = "size_bytes=nbytes elements=count norm nan inf zeros zeros_share"
    total = {"tensors": len(found.tensors), **picked(found, sums)}
    return {
        "ref": stored.ref,
        "id": stored.digest,
        "tensors": [_tensor_json(one) for one in found.tensors],
        "total": {**total, "nonfinite": [one.path for one in found.nonfinite]},
    }


def _tensor_json(one: TensorStats) -> dict[str, Any]:
    mean = one.mean
    return {
        **picked(one, "path dtype"),
        "shape": list(one.shape),
        **picked(one, "size_bytes=nbytes elements=count min max"),
        "mean": [mean.real, mean.imag] if isinstance(mean, complex) else mean,
        **picked(one, "norm nan inf zeros zeros_share"),
    }
