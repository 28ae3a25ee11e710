"""`release publish`, `ls`, `show` and `rollback`: checkpoints published under versions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from holdfast.registry.cli import describe, options, output
from holdfast.registry.cli.columns import Column, Table, metrics, numbers
from holdfast.registry.cli.command import Answer, answer_of, command
from holdfast.registry.cli.opening import reads, writes
from holdfast.registry.cli.options import argument, option
from holdfast.registry.cli.output import Part
from holdfast.registry.curation import Release, write_card
from holdfast.registry.face import Registry

_LS = (
    Column("version"),
    Column("id", text=describe.short, drop=3),
    Column("source", none="-", drop=2),
    metrics(drop=4),
    *numbers("age=published", text=describe.age, drop=1),
    Column("marks", "latest", lambda is_latest: "latest" if is_latest else ""),
)
_VERSION = argument("VERSION", "The release, such as 1.4.0.")


def _json(release: Release) -> dict[str, Any]:
    """Return a release; its card is read for it."""
    return {**_row(release), "card": release.card}


def _row(release: Release) -> dict[str, Any]:
    return {
        **describe.picked(release, "ref id=digest version"),
        "published": describe.iso(release.record.time_ms),
        **describe.picked(release, "latest=is_latest source metrics"),
    }


@command(writes)
def publish(
    opened: Registry,
    *,
    ref: options.Ref,
    version: str = argument("VERSION", "Semantic version, given once: 1.4.0."),
    card: Path | None = option("--card", "FILE", "Model card, a file of YAML."),
    metric: list[str] | None = option(
        "--metric", "NAME=NUMBER", "A metric; repeatable. By default the metrics of the checkpoint."
    ),
    only: list[str] | None = option(
        "--only",
        "COMPONENT",
        "Only this component; repeatable. By default the preset's components for inference.",
    ),
) -> Answer:
    """Publish a checkpoint, or parts of it, under a version.

    A version is permanent. No data is stored again. RUN/releases/VERSION and RUN/releases/latest
    then find it.
    """
    metrics = options.numbers(metric) if metric else None
    checkpoint = opened.checkpoint(ref)
    releases = opened.run(checkpoint.run_id).releases
    release = releases.publish(version, checkpoint, card=card, metrics=metrics, only=only or None)
    return Answer(lambda: _json(release), lambda: [f"published: {describe.named(release)}"])


@command(reads, table=True)
def ls(opened: Registry, *, run: options.Run) -> Answer:
    """List the releases of a run in the order of publication."""
    of = opened.run(run)
    releases, first = of.releases.list(), describe.monitored(of)
    return Answer(
        lambda: list(map(_json, releases)),
        lambda: [Table(_LS, map(_row, releases), none="no releases yet", first=first)],
    )


@command(reads)
def show(opened: Registry, *, run: options.NamedRun, version: str = _VERSION) -> Answer:
    """Show a release and its model card.

    The card is printed as YAML.
    """
    releases = opened.run(run).releases
    release = releases.latest() if version == "latest" else releases.get(version)
    return Answer(lambda: _json(release), lambda: _text(release))


def _text(release: Release) -> list[Part]:
    fields: dict[str, object] = {
        "ref": release.ref,
        "id": release.digest.hex(),
        "published": output.date(release.record.time_ms),
        "marks": "latest" if release.is_latest else "",
        "source": release.source,
        "size": output.size(release.size_bytes),
        "metrics": output.metrics(release.metrics),
    }
    card = release.card
    return [fields, f"\n{write_card(card)}".rstrip("\n")] if card else [fields]


@command(writes)
def rollback(
    opened: Registry,
    *,
    run: options.NamedRun,
    version: str = _VERSION,
    reason: str = option("--reason", "TEXT", "The reason, for the history of the run.", default=""),
) -> Answer:
    """Point RUN/releases/latest at an earlier release.

    Nothing else changes.
    """
    release = opened.run(run).releases.rollback(version, reason)
    return answer_of(_json(release), f"{release.run_id}/releases/latest -> {release.ref}")
