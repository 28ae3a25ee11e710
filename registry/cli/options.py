"""Options and arguments that several commands share, and the reading of `name=value`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import typer

_REGISTRY = typer.Option(
    "--registry",
    "-r",
    envvar="HOLDFAST_REGISTRY",
    metavar="URL",
    help="The registry: a path, file://, s3:// or memory:// URL.",
)
Registry = Annotated[str, _REGISTRY]
OptionalRegistry = Annotated[str | None, _REGISTRY]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Run = Annotated[str, typer.Argument(envvar="HOLDFAST_RUN", metavar="RUN", help="Name of a run.")]
Ref = Annotated[
    str,
    typer.Argument(
        metavar="REF", help="A checkpoint: RUN, RUN/best, RUN/phase1/step5, RUN/tags/NAME, RUN/ID."
    ),
]


def pairs(texts: Iterable[str]) -> dict[str, str]:
    """Read `name=value` texts.

    Raises:
        BadParameter: One has no name, or a name stands twice.
    """
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise typer.BadParameter(f"{text!r} is not of the form name=value")
        if name in found:
            raise typer.BadParameter(f"{name!r} is given twice")
        found[name] = value
    return found


def numbers(texts: Iterable[str]) -> dict[str, float]:
    """Read `name=number` texts; nan and inf are numbers here.

    Raises:
        BadParameter: A value is not a number.
    """
    found = {}
    for name, value in pairs(texts).items():
        try:
            found[name] = float(value)
        except ValueError:
            raise typer.BadParameter(f"{name}={value!r} is not a number") from None
    return found
