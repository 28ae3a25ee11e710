"""`release publish`, `ls`, `show` and `rollback`: versions that are handed over."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from registry.cards import write_card
from registry.cli import describe, options, output
from registry.cli.columns import Column
from registry.registry import open  # noqa: A004
from registry.releases import Release

_LS = (
    Column("version"),
    Column("id"),
    Column("source", folds=True),
    Column("metrics", folds=True),
    Column("age", is_number=True),
    Column("marks"),
)
Run = Annotated[str, typer.Argument(metavar="RUN", help="Name of a run.")]
Version = Annotated[str, typer.Argument(metavar="VERSION", help="The release, such as 1.4.0.")]


def publish(
    ref: options.Ref,
    version: Annotated[
        str, typer.Argument(metavar="VERSION", help="Semantic version, given once: 1.4.0.")
    ],
    registry: options.Registry,
    *,
    card: Annotated[
        Path | None, typer.Option("--card", metavar="FILE", help="Model card, a file of YAML.")
    ] = None,
    metric: Annotated[
        list[str] | None,
        typer.Option(
            "--metric",
            metavar="NAME=NUMBER",
            help="A metric; any number of times. The checkpoint's without any.",
        ),
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            "--only",
            metavar="COMPONENT",
            help="Only this component; repeatable. What the preset names for inference without.",
        ),
    ] = None,
    json: options.Json = False,
) -> None:
    """Publish a checkpoint, or the components that inference needs, under a version, for good.

    No data is stored again. RUN/releases/VERSION and RUN/releases/latest then find it.
    """
    metrics = options.numbers(metric) if metric else None
    with open(registry) as opened:
        checkpoint = opened.checkpoint(ref)
        releases = opened.run(checkpoint.run_id).releases
        release = releases.publish(
            version, checkpoint, card=card, metrics=metrics, only=only or None
        )
        if json:
            output.document(describe.release_json(release))
            return
        size = output.size(release.size_bytes)
    output.line(f"published: {release.ref}  {release.digest.short}  {size}")


def ls(run: options.Run, registry: options.Registry, *, json: options.Json = False) -> None:
    """List the releases of a run in the order of publication."""
    with open(registry, read_only=True) as opened:
        found = opened.run(run).releases.list()
        if json:
            output.document([describe.release_json(release) for release in found])
        elif found:
            output.table(_LS, [_row(release) for release in found])
        else:
            output.note("no releases yet")


def _row(release: Release) -> tuple[object, ...]:
    return (
        release.version,
        release.digest.short,
        release.source or "",
        output.metrics(release.metrics),
        output.age(release.record.time_ms),
        "latest" if release.is_latest else "",
    )


def show(
    run: Run, version: Version, registry: options.Registry, *, json: options.Json = False
) -> None:
    """Show a release and its model card, that as YAML."""
    with open(registry, read_only=True) as opened:
        releases = opened.run(run).releases
        release = releases.latest() if version == "latest" else releases.get(version)
        shape = describe.release_json(release)
        size = output.size(release.size_bytes)
    if json:
        output.document(shape)
        return
    output.fields(
        {
            "ref": release.ref,
            "id": release.digest.hex(),
            "published": output.date(release.record.time_ms),
            "marks": "latest" if release.is_latest else "",
            "source": release.source,
            "size": size,
            "metrics": output.metrics(release.metrics),
        }
    )
    if shape["card"]:
        output.line(f"\n{write_card(shape['card'])}".rstrip("\n"))


def rollback(
    run: Run,
    version: Version,
    registry: options.Registry,
    *,
    reason: Annotated[
        str, typer.Option("--reason", metavar="TEXT", help="Why, for the history of the run.")
    ] = "",
    json: options.Json = False,
) -> None:
    """Let RUN/releases/latest name a release that was published before; nothing else changes."""
    with open(registry) as opened:
        release = opened.run(run).releases.rollback(version, reason)
        if json:
            output.document(describe.release_json(release))
            return
    output.line(f"{release.run_id}/releases/latest -> {release.ref}")
