"""`merge`: a checkpoint made of several others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from registry.cli import describe, options, output
from registry.cli.opening import watched


def merge(
    refs: Annotated[
        list[str], typer.Argument(metavar="REF...", help="The sources, checkpoints of any run.")
    ],
    registry: options.Registry,
    *,
    into: Annotated[str, typer.Option("--into", metavar="RUN", help="Run of the new checkpoint.")],
    step: Annotated[int, typer.Option("--step", metavar="N", help="Step of the new checkpoint.")],
    average: Annotated[
        list[str] | None,
        typer.Option(
            "--average",
            metavar="NAME",
            help="Component or 'pattern/*' to average; repeatable. All but optimizers without.",
        ),
    ] = None,
    weight: Annotated[
        list[str] | None,
        typer.Option(
            "--weight", metavar="REF=W", help="Weight of a source; all or none. Their sum is 1."
        ),
    ] = None,
    pick: Annotated[
        list[str] | None,
        typer.Option(
            "--pick", metavar="NAME=REF", help="Take a component or 'pattern/*' from there."
        ),
    ] = None,
    phase: Annotated[
        str | None,
        typer.Option("--phase", metavar="NAME", help="Phase; the one that the run is in without."),
    ] = None,
    metric: Annotated[
        list[str] | None,
        typer.Option("--metric", metavar="NAME=NUMBER", help="A metric; any number of times."),
    ] = None,
    create: Annotated[
        bool, typer.Option("--create", help="Begin the run where it does not exist.")
    ] = False,
    json: options.Json = False,
) -> None:
    """Average checkpoints, or pick parts of them, into a new one; sources stay as they are.

    Nothing that is kept as it is, is stored again. What differs must be averaged or picked.
    """
    weights = _weights(refs, weight or ())
    picks = _picks(pick or ())
    metrics = options.numbers(metric or ())
    with watched(registry, "merging") as opened:
        found = {ref: opened.stored(ref) for ref in [*refs, *picks.values()]}
        run = opened.run(into, create=create)
        known = run.manifest.count
        made = run.merge(
            [found[ref] for ref in refs],
            step=step,
            weights=weights,
            average=average or None,
            pick={name: found[ref] for name, ref in picks.items()},
            phase=phase,
            metrics=metrics,
        )
        is_new = run.manifest.count > known
        pointed = describe.marks(run.manifest).get(made.n, [])
        shape = describe.checkpoint_json(made, pointed)
    if json:
        output.document({**shape, "new": is_new})
        return
    how = "merged" if is_new else "there already"
    output.line(f"{how}: {made.ref}  {made.digest.short}  {output.size(made.size_bytes)}")


def _weights(refs: Sequence[str], texts: Sequence[str]) -> list[float] | None:
    given: dict[str, float] = {}
    for ref, text in map(_split, texts):
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
    for name, ref in map(_split, texts):
        if name in picks:
            raise typer.BadParameter(f"--pick {name} is given twice")
        picks[name] = ref
    return picks


def _split(text: str) -> tuple[str, str]:
    """Read `NAME=REF` or `REF=W`; patterns may hold an equals sign, refs and numbers do not."""
    name, equals, value = text.rpartition("=")
    if not name or not equals or not value:
        raise typer.BadParameter(f"{text!r} is not of the form NAME=VALUE")
    return name, value
