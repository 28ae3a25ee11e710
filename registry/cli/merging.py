"""`metric add` and `merge`: add metrics to checkpoints, and make one of several."""

from __future__ import annotations

from collections.abc import Sequence

import typer

from holdfast.registry.cli import completing, describe, options, output
from holdfast.registry.cli.command import Answer, command
from holdfast.registry.cli.opening import moves, writes
from holdfast.registry.cli.options import argument, option
from holdfast.registry.face import Registry


@command(writes)
def add_metric(
    opened: Registry,
    *,
    ref: options.Ref,
    metric: list[str] = argument("NAME=NUMBER", "The metrics."),
) -> str:
    """Add metrics, or replace their values."""
    values = options.numbers(metric)
    checkpoint = opened.checkpoint(ref)
    checkpoint.report(values)
    return f"{checkpoint.ref}: {output.metrics(checkpoint.metrics)}"


@command(moves, bar="merging")
def merge(
    opened: Registry,
    *,
    refs: list[str] = argument(
        "REF...", "The sources, checkpoints of any run.", autocompletion=completing.REFS
    ),
    into: str = option("--into", "RUN", "Run of the new checkpoint.", default=...),
    step: int = option("--step", "N", "Step of the new checkpoint.", default=...),
    average: list[str] | None = option(
        "--average",
        "NAME",
        "Component or 'pattern/*' to average; repeatable. By default all but optimizers.",
    ),
    weight: list[str] | None = option(
        "--weight", "REF=W", "Weight of a source; for all or for none. Their sum is 1."
    ),
    pick: list[str] | None = option(
        "--pick", "NAME=REF", "Take a component or 'pattern/*' from this checkpoint."
    ),
    phase: str | None = options.PHASE,
    metric: list[str] | None = options.METRICS,
    create: bool = options.CREATE,
) -> Answer:
    """Average checkpoints, or pick parts of them, into a new one.

    The sources do not change, and data that is the same as theirs is not stored again. Parts that
    differ must be averaged or picked.
    """
    weights = _weights(refs, weight or ())
    picks = _picks(pick or ())
    metrics = options.numbers(metric or ())
    found = {ref: opened.stored(ref) for ref in [*refs, *picks.values()]}
    run = opened.run(into, create=create)
    known = run.manifest.count
    made = run.exchange.merge(
        [found[ref] for ref in refs],
        step=step,
        weights=weights,
        average=average or None,
        pick={name: found[ref] for name, ref in picks.items()},
        phase=phase,
        metrics=metrics,
    )
    is_new = run.manifest.count > known
    how = "merged" if is_new else "there already"
    return Answer(
        lambda: {**describe.checkpoint_json(run.handle.store, run.manifest, made), "new": is_new},
        lambda: [f"{how}: {describe.named(made)}"],
    )


def _weights(refs: Sequence[str], texts: Sequence[str]) -> list[float] | None:
    given: dict[str, float] = {}
    for ref, text in map(_pick, texts):
        if ref in given or ref not in refs:
            raise typer.BadParameter(f"--weight {ref}: one for each of {', '.join(refs)}")
        try:
            given[ref] = float(text)
        except ValueError:
            raise typer.BadParameter(f"--weight {ref}={text}: not a number") from None
    if not given:
        return None
    lacking = [ref for ref in refs if ref not in given]
    if lacking:
        raise typer.BadParameter(f"no --weight for {', '.join(lacking)}")
    return [given[ref] for ref in refs]


def _picks(texts: Sequence[str]) -> dict[str, str]:
    picks: dict[str, str] = {}
    for name, ref in map(_pick, texts):
        if name in picks:
            raise typer.BadParameter(f"--pick {name} is given twice")
        picks[name] = ref
    return picks


def _pick(text: str) -> tuple[str, str]:
    """Read `NAME=REF` or `REF=W`; patterns may hold an equals sign, refs and numbers do not."""
    name, equals, value = text.rpartition("=")
    if not name or not equals or not value:
        raise typer.BadParameter(f"{text!r} is not of the form NAME=VALUE")
    return name, value
