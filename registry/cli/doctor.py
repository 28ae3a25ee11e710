"""`init` and `doctor`: making a registry, and telling whether this place can be worked with."""

from __future__ import annotations

from typing import Annotated

import typer

from registry.cli import checks, options, output, progress
from registry.cli.checks import Check
from registry.errors import StoreUnsuitable
from registry.registry import init as make_registry

Place = Annotated[
    str | None, typer.Argument(metavar="URL", help="Where: a path or a URL; -r without it.")
]


def init(
    url: Place = None,
    registry: options.OptionalRegistry = None,
    *,
    compression: Annotated[
        str | None,
        typer.Option(
            "--compression",
            help="How chunks are stored: none (raw, as without it), zstd, lz4.",
        ),
    ] = None,
    keyframe_every: Annotated[
        int | None,
        typer.Option(
            "--keyframe-every",
            metavar="N",
            help="Store changing chunks as deltas, whole each N versions: 1 (no deltas) to 32.",
        ),
    ] = None,
    skip_race_probe: Annotated[
        bool,
        typer.Option("--skip-race-probe", help="For emulators: do not race the store first."),
    ] = False,
    json: options.Json = False,
) -> None:
    """Make a registry.

    The store's exclusive create is raced first; one that lets two writers win is refused.
    """
    place = url or registry
    if place is None:
        raise typer.BadParameter("no URL is given, neither here nor in HOLDFAST_REGISTRY")
    with (
        progress.bar("racing the store"),
        make_registry(
            place,
            compression=compression,  # type: ignore[arg-type]  # checked there
            keyframe_every=keyframe_every,
            skip_race_probe=skip_race_probe,
        ) as made,
    ):
        config = made.store.config
        shape = {
            "url": made.url,
            "id": config.id,
            "race_probe": config.race_probe,
            "compression": config.compression or "none",
            "keyframe_every": config.keyframe_every or 1,
        }
    if json:
        output.document(shape)
        return
    output.line(f"made: {shape['url']}  {shape['id']}")
    if config.compression:
        output.line(f"Chunks are compressed: {config.compression}.")
    if config.keyframe_every:
        every = config.keyframe_every
        output.line(f"What changes is stored as deltas, whole each {every} versions.")
    if config.race_probe == "passed":
        output.line("The probe found no race. It cannot prove that there is none.")
    else:
        output.note("warning: the race probe was skipped; two writers may both win here.")


def doctor(registry: options.Registry, *, json: options.Json = False) -> None:
    """Check whether a registry can be worked with.

    One line for each check; the exit status is 8 where one fails.
    """
    found: list[Check] = []
    for check in checks.run(registry):
        found.append(check)
        if not json:
            output.hanging(f"{check.status:4}  {check.name:12}  ", check.message)
    ok = all(check.status != "fail" for check in found)
    if json:
        output.document({"ok": ok, "checks": [check.to_json() for check in found]})
    if not ok:
        raise typer.Exit(StoreUnsuitable.exit_code)
