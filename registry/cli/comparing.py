"""`diff`, and the figures of `show --stats`: compare checkpoints and runs, sum up tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import typer

from holdfast.registry.cli import completing, options, output
from holdfast.registry.cli.columns import Column, Table, metrics, numbers
from holdfast.registry.cli.command import Answer, answer_of, command
from holdfast.registry.cli.describe import picked, ref, tensor_json
from holdfast.registry.cli.opening import reads, workers_at
from holdfast.registry.cli.options import argument, flag, option
from holdfast.registry.cli.output import Note, Part, Sentence
from holdfast.registry.cli.run_listing import fitting
from holdfast.registry.comparing import (
    KINDS,
    Branches,
    Diff,
    Distance,
    StateStats,
    StepPair,
    TensorDiff,
    TensorStats,
    settings_of,
)
from holdfast.registry.comparing import diff as compare
from holdfast.registry.comparing import stats as sum_up
from holdfast.registry.curation import Release
from holdfast.registry.errors import InvalidInput
from holdfast.registry.face import Attestation, Registry
from holdfast.registry.history import (
    ValueDiff,
    config_by_path,
    json_ready,
    parent_ref,
    phase_value,
    step_ref,
)
from holdfast.registry.history.replay import RunManifest
from holdfast.registry.hub import engines
from holdfast.registry.loading import Checkpoint, Stored, TensorInfo
from holdfast.registry.values import abridged

_DIFF = (
    Column("component", "name"),
    Column("is", "kind"),
    *numbers(*(f"{kind}=tensors.{kind}" for kind in KINDS), "values", drop=1),
)
_METRICS = (Column("metric"), *numbers("before", "after", text=output.number, none="-"))
#: How many differences a person is shown; `--json` has all.
SHOWN = 40
#: The most names of an attestation in a line, and in a list of its JSON.
_NAMES, _IN_JSON = 10, 1000
_BRANCHES = (
    Column("step", "at"),
    Column("first", text=lambda side: _metrics(side), none="-", folds=True),
    Column("second", text=lambda side: _metrics(side), none="-", folds=True),
    Column("state", "same", {True: "same", False: "differs"}.get, none="-"),
)
_SWEEP = (
    Column("run"),
    Column("config", none="-", spreads=True),
    Column("settings", none="-", drop=3, spreads=True),
    Column("checkpoint", "ref", lambda ref: ref.partition("/")[2], none="-", drop=2),
    metrics(drop=1),
)
_RANKS = (
    Column("key"),
    *numbers("strength", "chance", text="{:.1%}".format),
    *numbers("correlation", text="{:+.2f}".format, none="-"),
    Column("best"),
    *numbers("mean=best_mean", text=output.number),
    *numbers("runs=best_runs"),
)
_DISTANCE = "norm relative max elements=count changed changed_share nonfinite"
_SIGNS = {"changed": "~", "reshaped": "~", "moved": ">", "added": "+", "removed": "-"}


@command(reads, table=True)
def diff(
    opened: Registry,
    *,
    refs: list[str] = argument(
        "REF...",
        "Two checkpoints or releases; with --runs names of runs or patterns.",
        autocompletion=completing.REFS,
    ),
    values: bool = flag("--values", "Read changed tensors, and show how far they moved."),
    runs: bool = flag("--runs", "Compare runs side by side, such as two forks or a sweep."),
    rank: str | None = option(
        "--rank", "METRIC:min|max", "With --runs: rank keys of configurations by it, from six runs."
    ),
    where: str = options.WHERE,
) -> Answer:
    """Compare two checkpoints, or runs; only --values reads data.

    Of two runs shows their settings, their metrics by step, and the first difference of their
    states. Of more runs shows a row each: the values of configuration and settings that are not
    the same in all, and the metrics of the best checkpoint, or of the newest without a monitor.
    With --rank the keys of their configurations, by how strongly they go with a metric: no cause.
    """
    if runs:
        if values:
            raise typer.BadParameter("--values compares two checkpoints, not runs")
        names, damaged = fitting(opened, refs, where)
        answer = _runs(opened, names) if rank is None else _ranked(opened, names, rank)
        return replace(answer, damaged={**damaged, **answer.damaged})
    if len(refs) != 2 or rank or where:
        raise typer.BadParameter("two checkpoints are compared; --runs compares runs")
    for name in refs:
        if Path(name).suffix and Path(name).is_file():
            hint = f"Push it first. Or compare it with a checkpoint: `holdfast attest {name} REF`."
            raise InvalidInput("a file, not a checkpoint", where=name, hint=hint)
    old, new = map(opened.stored, refs)
    found = compare(old.handle, new.handle, values=values)
    return Answer(
        lambda: _diff_json(old, new, found, values=values),
        lambda: _print_states(old, new, found),
    )


def _print_states(old: Stored, new: Stored, found: Diff) -> Iterator[Part]:
    yield from [f"the same state: {new.digest.short}"] if found.is_same else _print_diff(found)
    if rows := _metrics_json(old, new):
        yield from ("", Table(_METRICS, rows, is_main=False))


def _metrics_json(old: Stored, new: Stored) -> list[dict[str, Any]]:
    before, after = (
        one.metrics if isinstance(one, Checkpoint | Release) else {} for one in (old, new)
    )
    names = dict.fromkeys((*before, *after))
    return [{"metric": one, "before": before.get(one), "after": after.get(one)} for one in names]


@command(reads)
def attest(
    opened: Registry,
    *,
    file: Path = argument("FILE", "The file, or a folder of Hugging Face; none with --engine."),
    ref: str | None = argument(
        "REF",
        "The checkpoint; by default the runs are searched.",
        default=None,
        autocompletion=completing.REFS,
    ),
    format_name: str | None = option("--format", "NAME", "Its format, as for push."),
    most: int = option(
        "--most", "N", "Without REF: the most states to compare it with.", default=200, min=1
    ),
    max_bytes: int | None = options.MAX_BYTES,
    engine: str | None = option("--engine", "URL", "An SGLang or vLLM, in place of FILE."),
    baseline: Path | None = option("--baseline", "FILE", "Its digests after a verified load."),
    key_file: Path | None = options.KEY_FILE,
) -> Answer:
    """Say which checkpoint's bytes a file has, from digests alone.

    Each tensor is hashed, and compared with the manifest: no tensor data is read from the registry.
    Without REF the runs are searched, the newest first, until a state matches as a whole. The exit
    status is 0 for a whole match, and else 1. With --engine URL REF an engine hashes the weights
    that it has in memory, and the tensors of REF are read.
    """
    if engine is None and not (baseline or key_file):
        found = opened.attest(file, ref, format=format_name, most=most, max_bytes=max_bytes)
    elif engine is None or ref is not None:
        raise typer.BadParameter("--engine URL REF, with --baseline and --key-file, but no FILE")
    else:
        found = engines.attest(opened.stored(str(file)), engine, key_file, baseline)
    status = 0 if found.is_whole else 1
    return Answer(lambda: _attestation_json(found), lambda: _attestation(found), status=status)


def _attestation(found: Attestation) -> Iterator[Part]:
    name = f"{found.ref}  {found.id.short}" if found.id else "no state that was looked at"
    yield f"{'whole' if found.is_whole else 'not whole'}: {name}"
    lines = {
        f"{output.counted(len(some), 'tensor')} {kind}": some
        for kind, some in found.tensors.items()
    }
    lines |= {"values differ": found.values, "not compared": found.uncompared}
    for about, names in {**lines, "not in the file": found.absent}.items():
        is_said = names and not about.endswith(" equal")
        text = f": {abridged(names, ', ', most=_NAMES)}" if is_said else ""
        yield from [about + text] if names else []
    for where, reason in found.unread.items():
        yield Note(f"not read: {where}: {reason}")
    if found.left or found.unopened:
        runs = output.counted(found.unopened, "run")
        yield Note(f"not looked at: {output.counted(found.left, 'state')}, and {runs} not opened")


def _attestation_json(found: Attestation) -> dict[str, Any]:
    paths = {**found.tensors, "values": found.values, "uncompared": found.uncompared}
    return {
        "whole": found.is_whole,
        **picked(found, "ref id format"),
        "counts": {kind: len(some) for kind, some in paths.items()},
        "paths": {kind: some[:_IN_JSON] for kind, some in paths.items() if kind != "equal"},
        **picked(found, "absent equal_bytes looked_at left unopened unread"),
    }


def _runs(opened: Registry, names: list[str]) -> Answer:
    if len(names) < 2:
        raise InvalidInput(
            "a run is compared with others",
            where="--runs",
            expected="two runs or more",
            found=", ".join(names) or "none that fits",
        )
    if len(names) == 2:
        found = opened.diff_runs(*names)
        return Answer(lambda: _branches_json(found), lambda: _print_branches(found))
    rows = _sweep([opened.run(name).manifest for name in names])
    return answer_of(rows, Table(_SWEEP, rows))


def _ranked(opened: Registry, names: list[str], metric: str) -> Answer:
    by = options.monitor(metric)
    found = opened.rank_config(by, runs=names)
    rows = [asdict(one) for one in found.keys]
    others = ", ".join(f"{key} ({why})" for key, why in found.unranked.items())
    about = {**picked(by, "metric mode"), **picked(found, "runs unlike unranked")}
    return Answer(
        lambda: {**about, "keys": rows},
        lambda: [Table(_RANKS, rows, none="no key of the configurations varies"), "", *found.about],
        [f"not ranked: {others}"] if others else (),
        damaged=found.damaged,
    )


def _sweep(runs: Sequence[RunManifest]) -> list[dict[str, Any]]:
    settings = _differing([settings_of(run) for run in runs])
    config = _differing([config_by_path(run.config) if run.created else {} for run in runs])
    keys = {key for one in config for key in one}
    return [
        {
            "run": run.run_id,
            "settings": {f"run.{key}" if key in keys else key: one for key, one in mine.items()},
            "config": own,
            **_best(run),
        }
        for run, mine, own in zip(runs, settings, config, strict=True)
    ]


def _differing(each: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """Return the values whose names do not have one value in all."""
    names = dict.fromkeys(name for one in each for name in one)
    differ = [name for name in names if len({repr(one.get(name, ...)) for one in each}) > 1]
    return [{name: json_ready(one[name]) for name in differ if name in one} for one in each]


def _best(run: RunManifest) -> dict[str, Any]:
    """Return the best checkpoint of a run by its first monitor, or its newest one."""
    one = run.own_best() or run.latest()
    return {"ref": one and ref(run.run_id, one), "metrics": one.metrics if one else {}}


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
        "values": [*map(_value_json, found.difference.values if found.difference else ())],
    }


def _pair_json(pair: StepPair) -> dict[str, Any]:
    named = "id=manifest metrics"
    return {
        "phase": phase_value(pair.phase),
        **picked(pair, "step same=is_same"),
        "first": pair.first and picked(pair.first, named),
        "second": pair.second and picked(pair.second, named),
    }


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


def _diff_json(old: Stored, new: Stored, found: Diff, *, values: bool) -> dict[str, Any]:
    return {
        "before": {"ref": old.ref, "id": old.digest},
        "after": {"ref": new.ref, "id": new.digest},
        "same": found.is_same,
        "components": _components_json(found),
        "tensors": [
            tensor_diff_json(one)
            | ({"distance": one.distance and picked(one.distance, _DISTANCE)} if values else {})
            for one in found.differing
        ],
        "values": [_value_json(value) for value in found.values],
        "metrics": _metrics_json(old, new),
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


def stats(stored: Stored, patterns: Sequence[str], dask: str | None) -> Answer:
    """Return the extremes, means, norms, zeros and NaN of tensors, which are read for it."""
    with workers_at(dask) as executor:
        found = sum_up(stored.handle, patterns, executor=executor)
    return Answer(lambda: _stats_json(stored, found), lambda: _stats_text(found))


def _stats_text(found: StateStats) -> Iterator[Part]:
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
