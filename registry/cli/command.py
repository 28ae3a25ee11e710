"""The one shape of a command: open a registry, ask it, print the answer as text or as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from inspect import Parameter, Signature, signature
from typing import Any

import typer

from holdfast.registry.cli import failures, options, output, progress
from holdfast.registry.cli.columns import Column, Table
from holdfast.registry.cli.opening import address_of
from holdfast.registry.cli.output import Note, Part
from holdfast.registry.errors import RegistryError

#: Opens the registry at an address; `dry_run` says whether the command must not write.
Opener = Callable[..., AbstractContextManager[object]]


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of a command, in two forms; only the form that is printed is made.

    Attributes:
        document: Returns the value that `--json` prints.
        text: Returns the lines and tables that are printed without it.
        notes: Lines for stderr, printed first in both forms.
        status: The exit status.
        damaged: The errors of runs that could not be read, by name, known once a form is made.
    """

    document: Callable[[], object]
    text: Callable[[], Iterable[Part]]
    notes: Sequence[str] = ()
    status: int = 0
    damaged: Mapping[str, RegistryError] = field(default_factory=dict)


def answer_of(document: object, *text: Part) -> Answer:
    """Return an answer from a finished document and its text."""
    return Answer(lambda: document, lambda: text)


def listed(
    columns: Sequence[Column], things: Sequence[Any], to_json: Callable[[Any], object], *, none: str
) -> Answer:
    """Return a list as an answer: a row and a JSON value for each thing, or a note for none.

    Args:
        columns: The columns of the table.
        things: The things to list.
        to_json: Returns the JSON value of a thing.
        none: The note for an empty list.
    """
    return Answer(
        lambda: [to_json(thing) for thing in things],
        lambda: [Table(columns, things) if things else Note(none)],
    )


def command(
    opens: Opener | None = None, *, bar: str = ""
) -> Callable[[Callable[..., Answer | str]], Callable[..., None]]:
    """Make a command of a function that returns an answer, or a line of text.

    The parameters of the function are those of the command line. Three are not: `opened` is the
    registry that `--registry` and `--storage-option` name, `address` is where that is, and
    `advance` moves the bar. The command has `--json` if the
    function returns an `Answer`; the function has a parameter `json` only if it needs to know.

    Args:
        opens: Opens the registry, for a function that has `opened`.
        bar: Label of a bar on a terminal, which the function moves.
    """

    def decorate(ask: Callable[..., Answer | str]) -> Callable[..., None]:
        asking = signature(ask, eval_str=True)
        asked = asking.parameters

        def run(**given: Any) -> None:
            json = given.setdefault("json", False)
            if _has_registry(asked):
                given["address"] = address_of(given["registry"], given.get("storage_option"))
            with ExitStack() as stack:
                if opens:
                    opening = opens(given["address"], dry_run=given.get("dry_run", False))
                    given["opened"] = stack.enter_context(opening)
                if bar:
                    given["advance"] = stack.enter_context(progress.bar(bar))
                found = ask(**{name: given[name] for name in asked})
                answer = answer_of(None, found) if isinstance(found, str) else found
                made = answer.document() if json else list(answer.text())
            _print(answer, made, json=json)

        run.__doc__ = ask.__doc__
        parameters = list(_parameters(asked, has_json=asking.return_annotation is Answer))
        run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {one.name: one.annotation for one in parameters}
        return run

    return decorate


def _print(answer: Answer, made: Any, *, json: bool) -> None:
    for text in answer.notes:
        output.note(text)
    if json:
        output.document(made)
    else:
        for part in made:
            output.show(part)
    failures.end_damaged(answer.damaged)
    if answer.status:
        raise typer.Exit(answer.status)


def _has_registry(asked: Mapping[str, Parameter]) -> bool:
    return "opened" in asked or "address" in asked


def _parameters(asked: Mapping[str, Parameter], *, has_json: bool) -> Iterator[Parameter]:
    """Yield the parameters of the command line."""
    if _has_registry(asked):
        for name, annotation, default in (
            ("registry", options.Registry, Parameter.empty),
            ("storage_option", options.StorageOptions, None),
        ):
            yield Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
    for name, parameter in asked.items():
        if name not in ("opened", "address", "advance", "json"):
            yield parameter.replace(kind=Parameter.KEYWORD_ONLY)
    if has_json:
        yield Parameter("json", Parameter.KEYWORD_ONLY, default=False, annotation=options.Json)
