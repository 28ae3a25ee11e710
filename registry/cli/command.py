"""The one shape of a command: open a registry, ask it, print the answer as text or as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Any

import typer

from holdfast.registry.cli import failures, options, output
from holdfast.registry.cli.columns import Column, Table, View
from holdfast.registry.cli.opening import address_of, exported
from holdfast.registry.cli.output import Note, Part
from holdfast.registry.errors import RegistryError

#: Opens the registry at an address; `dry_run` says whether the command must not write.
Opener = Callable[..., AbstractContextManager[object]]
#: Parameters of a function that no user gives.
_GIVEN = ("opened", "address", "advance", "json")


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of a command, in two forms; only the form that is printed is made."""

    document: Callable[[], object]  # returns the value that `--json` prints
    text: Callable[[], Iterable[Part]]  # returns the lines and tables that are printed without it
    notes: Sequence[str] = ()  # lines for stderr, printed first in both forms
    status: int = 0
    #: The errors of runs that could not be read, by name, known once a form is made.
    damaged: Mapping[str, RegistryError] = field(default_factory=dict)
    #: Whether it is printed while it is made: each part of the text, or each value of the document
    #: as a line of JSON.
    is_live: bool = False


def answer_of(document: object, *text: Part) -> Answer:
    """Return an answer from a finished document and its text."""
    return Answer(lambda: document, lambda: text)


def listed(
    columns: Sequence[Column],
    things: Iterable[Any],
    to_json: Callable[[Any], Mapping[str, Any]],
    *,
    none: str = "",
    more: Callable[[Any], Mapping[str, Any]] = lambda thing: {},  # noqa: ARG005
    first: Sequence[str] = (),
) -> Answer:
    """Return a list as an answer: a JSON value for each thing, and a row of it in a table."""
    return Answer(
        lambda: [to_json(thing) for thing in things],
        lambda: [
            Table(
                columns, [{**to_json(one), **more(one)} for one in things], none=none, first=first
            )
        ],
    )


def command(
    opens: Opener | None = None,
    *,
    bar: str = "",
    table: bool = False,
    url: bool = False,
    metrics: bool = False,
    epilog: str | None = None,
) -> Callable[[Callable[..., Answer | str]], Callable[..., None]]:
    """Make a command of a function that returns an answer, or a line of text.

    The parameters of the function are those of the command line. Four are not: `opened` is the
    registry that `--registry` and `--storage-option` name, `address` is where that is, `advance`
    moves the bar, and `json` says whether a program reads the output. The command has `--json` if
    the function returns an `Answer`, and `--metrics` where that is asked for. Its help ends with
    `epilog`.
    """

    def decorate(ask: Callable[..., Answer | str]) -> Callable[..., None]:
        asking = signature(ask, eval_str=True)
        asked = asking.parameters

        def run(**given: Any) -> None:
            json, view = given.get("json", False), _view(given) if table else View()
            given["json"] = json or view.is_csv
            if _has_registry(asked):
                where = (url and given["url"]) or given["registry"]
                given["address"] = address_of(where, given["storage_option"])
            with ExitStack() as stack:
                if metrics:
                    stack.enter_context(exported(given))
                given["advance"] = advance = stack.enter_context(
                    output.bar("" if given.get("watch") else bar)
                )
                if opens:
                    place, dry_run = given["address"], given.get("dry_run", False)
                    given["opened"] = stack.enter_context(opens(place, advance, dry_run=dry_run))
                found = ask(**{name: given[name] for name in asked})
                answer = answer_of(None, found) if isinstance(found, str) else found
                made: Any = answer.document() if json else answer.text()
                if answer.is_live:
                    _print(answer, made, view, json=json)
                    return
                made = made if json else list(made)
            _print(answer, made, view, json=json)

        run.__doc__ = ask.__doc__
        run.epilog = epilog  # type: ignore[attr-defined]
        has_json = asking.return_annotation is Answer
        parameters = list(_parameters(asked, has_json, table, url, metrics))
        run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {one.name: one.annotation for one in parameters}
        return run

    return decorate


def _view(given: Mapping[str, Any]) -> View:
    names = [name.strip() for name in (given["columns"] or "").split(",") if name.strip()]
    view = View(names, given["sort"] or "", given["csv"])
    if given.get("json") and view != View([]):
        raise typer.BadParameter("--columns, --sort and --csv are about the table, not --json")
    return view


def _print(answer: Answer, made: Any, view: View, *, json: bool) -> None:
    for text in answer.notes:
        output.note(text)
    if not json:
        _print_parts(made, view)
    elif answer.is_live:
        for value in made:
            output.json_line(value)
    else:
        output.document(made)
    failures.end_damaged(answer.damaged)
    if answer.status:
        raise typer.Exit(answer.status)


def _print_parts(parts: Iterable[Part], view: View) -> None:
    for part in parts:
        if isinstance(part, Table) and part.is_main:
            output.show(view.of(part), as_csv=view.is_csv)
        elif not view.is_csv or isinstance(part, Note):
            output.show(part)


def _has_registry(asked: Mapping[str, Parameter]) -> bool:
    return "opened" in asked or "address" in asked


def _parameters(
    asked: Mapping[str, Parameter], has_json: bool, has_table: bool, has_url: bool, exports: bool
) -> Iterator[Parameter]:
    """Yield the parameters of the command line."""

    def shared(name: str, annotation: object, default: object = Parameter.empty) -> Parameter:
        return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)

    if has_url:
        if "url" not in asked:  # otherwise the function says how it is given
            yield shared("url", options.Url, None)
        yield shared("registry", options.OptionalRegistry, None)
    elif _has_registry(asked):
        yield shared("registry", options.Registry)
    if _has_registry(asked):
        yield shared("storage_option", options.StorageOptions, None)
    for name, parameter in asked.items():
        if name not in _GIVEN:
            if parameter.annotation in (Path, Path | None):
                parameter.default.parser = options.path
            yield parameter.replace(kind=Parameter.KEYWORD_ONLY)
    if has_table:
        yield shared("columns", options.Columns, None)
        yield shared("sort", options.Sort, None)
        yield shared("csv", options.Csv, False)
    if exports:
        yield shared("metrics", options.MetricsAt, None)
        yield shared("metrics_runs", options.MetricsRuns, False)
    if has_json:
        yield shared("json", options.Json, False)
