"""`stats`: what the tensors of a stored state hold."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from registry.cli import options, output
from registry.cli.columns import Column
from registry.content.stats import StateStats, TensorStats
from registry.content.stats import stats as sum_up
from registry.registry import open  # noqa: A004
from registry.stored import Stored

_STATS = (
    Column("tensor", folds=True),
    Column("dtype"),
    Column("shape"),
    *(Column(name, is_number=True) for name in ("min", "max", "mean", "norm", "zeros")),
    Column("nan", is_number=True),
    Column("inf", is_number=True),
    Column(""),
)
_MARK = "not finite"


def stats(
    ref: options.Ref,
    registry: options.Registry,
    patterns: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PATTERN]...", help="Only tensors of such paths, as 'model/*'."),
    ] = None,
    *,
    json: options.Json = False,
) -> None:
    """Read tensors and show extremes, mean, norm, zeros and what is not finite."""
    with open(registry, read_only=True) as opened:
        stored = opened.stored(ref)
        found = sum_up(stored, patterns or ())
    if json:
        output.document(_stats_json(stored, found))
        return
    if found.tensors:
        output.table(_STATS, [_row(one) for one in found.tensors])
    output.line(_total(found))


def share(part: float) -> str:
    """Return a share in per cent, three digits; `100%` is all of it and `0%` nothing."""
    return "100%" if part == 1 else f"{min(100 * part, 99.9):.3g}%"


def _row(one: TensorStats) -> tuple[str, ...]:
    return (
        one.path,
        one.dtype,
        str(list(one.shape)),
        *map(_number, (one.min, one.max, one.mean, one.norm)),
        share(one.zeros_share),
        *(f"{count:,}" for count in (one.nan, one.inf)),
        "" if one.is_finite else _MARK,
    )


def _number(value: complex | None) -> str:
    if value is None:
        return "-"
    if isinstance(value, int | float):
        return output.number(value)
    return f"{value.real:.6g}{value.imag:+.6g}j"


def _total(found: StateStats) -> str:
    parts = [
        output.counted(len(found.tensors), "tensor"),
        output.size(found.nbytes),
        output.counted(found.count, "element"),
        f"norm {output.number(found.norm)}",
        f"{share(found.zeros_share)} zeros",
    ]
    if found.nonfinite:
        parts += [f"{found.nan:,} NaN", f"{found.inf:,} infinite"]
        parts += [f"NOT FINITE: {output.counted(len(found.nonfinite), 'tensor')}"]
    else:
        parts.append("all finite")
    return ", ".join(parts)


def _stats_json(stored: Stored, found: StateStats) -> dict[str, Any]:
    return {
        "ref": stored.ref,
        "id": stored.digest,
        "tensors": [_tensor_json(one) for one in found.tensors],
        "total": {
            "tensors": len(found.tensors),
            "size_bytes": found.nbytes,
            "elements": found.count,
            "norm": found.norm,
            "nan": found.nan,
            "inf": found.inf,
            "zeros": found.zeros,
            "zeros_share": found.zeros_share,
            "nonfinite": [one.path for one in found.nonfinite],
        },
    }


def _tensor_json(one: TensorStats) -> dict[str, Any]:
    mean = one.mean
    return {
        "path": one.path,
        "dtype": one.dtype,
        "shape": list(one.shape),
        "size_bytes": one.nbytes,
        "elements": one.count,
        "min": one.min,
        "max": one.max,
        "mean": [mean.real, mean.imag] if isinstance(mean, complex) else mean,
        "norm": one.norm,
        "nan": one.nan,
        "inf": one.inf,
        "zeros": one.zeros,
        "zeros_share": one.zeros_share,
    }
