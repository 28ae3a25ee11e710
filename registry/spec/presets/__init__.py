"""Presets: run specifications in TOML, shipped with Holdfast or written by users.

`holdfast.registry.spec.run_spec` has the rules; this package words their errors for people.
docs/presets.md explains every field.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, get_args

from holdfast.registry.errors import InvalidInput, NotFound, RegistryError
from holdfast.registry.spec.run_spec import RunSpec
from holdfast.registry.values import InvalidRecord, Record, near

_MAX_BYTES = 2**20
_HINT = "docs/presets.md explains every field."
#: Name of a list -> the noun for its entries, and the fields that name an entry.
_ENTRIES = {
    "phases": ("phase", ("name",)),
    "gates": ("gate", ("name",)),
    "streams": ("stream", ("name",)),
    "tiers": ("tier", ("name",)),
    "monitors": ("monitor", ("metric",)),
    "dtypes": ("dtype rule", ("path",)),
    "draws": ("draw", ("kind",)),
    "transitions": ("transition", ("from_phase", "to_phase")),
    "ready": ("readiness", ("metric",)),
    "rows": ("row", ("part",)),
}
_SOURCE = "must be gates/NAME, latest or best"
_NAME = "must be letters, digits, '.', '_' and '-', at most 64, a letter or digit first"

_Path = tuple[int | str, ...]


def preset_names() -> list[str]:
    """Return the names of the shipped presets, sorted."""
    shipped = files(__name__).iterdir()
    return sorted(one.name.removesuffix(".toml") for one in shipped if one.name.endswith(".toml"))


def load_preset(preset: str | os.PathLike[str]) -> RunSpec:
    """Return a run specification."""
    if not isinstance(preset, str | os.PathLike):
        raise InvalidInput(
            "not a preset",
            expected="the name of a preset, the path of a TOML file, or a RunSpec",
            found=type(preset).__name__,
            hint=_HINT,
        )
    if isinstance(preset, str) and preset in preset_names():
        return _parse(
            files(__name__).joinpath(f"{preset}.toml").read_text(encoding="utf-8"), preset
        )
    path = Path(preset)
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise NotFound(
            "no such preset",
            where=str(preset),
            expected=f"one of {', '.join(preset_names())}, or the path of a TOML file",
            found=error.strerror,
            hint=near(str(preset), preset_names()),
        ) from error
    if len(data) > _MAX_BYTES:
        raise InvalidInput("not a preset", where=path, expected=f"at most {_MAX_BYTES} bytes")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidInput("not a preset", where=path, expected="UTF-8", found=error) from error
    return _parse(text, str(path))


def _parse(text: str, where: str) -> RunSpec:
    try:
        table = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise InvalidInput("not a preset", where=where, expected="TOML", found=error) from error
    try:
        # Through JSON, which has no dates and times.
        return RunSpec.of(json.loads(json.dumps(table)))
    except InvalidRecord as error:
        raise _wrong(where, describe(error, table)) from error
    except TypeError as error:
        raise _wrong(where, "a date or a time: write it as a text, in quotes") from error
    except RegistryError as error:
        raise _wrong(where, str(error)) from error


def _wrong(where: str, found: str) -> InvalidInput:
    return InvalidInput("breaks the rules of presets", where=where, found=found, hint=_HINT)


def describe(error: InvalidRecord, table: Mapping[str, Any]) -> str:
    """Return all errors of a preset as one text."""
    found = []
    for path, what in _errors(error):
        where = _where(path, table)
        found.append(what if not where or what.startswith(where) else f"{where}: {what}")
    return "; ".join(dict.fromkeys(found))


def _errors(error: InvalidRecord) -> Iterator[tuple[_Path, str]]:
    """Yield the path and the description of each error."""
    for path, text, kind, value in error.problems:
        if kind == "unknown":
            yield path[:-1], _unknown(path)
        elif kind == "missing":
            yield path[:-1], f"{path[-1]!r} {text}"
        elif text.startswith("must match"):
            form = _SOURCE if path[-1] == "source" else _NAME
            yield path, f"{form}, not {value!r}"
        else:
            text = text.replace("an object", "a table")
            shown = isinstance(value, str | int | float) and text.startswith("must")
            yield path, f"{text}, not {value!r}" if shown else text


def _unknown(path: _Path) -> str:
    name, model = str(path[-1]), _model(path[:-1])
    known = list(model.fields()) if model else []
    meant = near(name, known)
    more = meant[0].lower() + meant[1:] if meant else f"known are {', '.join(known)}"
    return f"no field {name!r} ({more})"


def _model(path: _Path) -> type[Record] | None:
    """Return the record at a path of a specification."""
    model: type[Record] | None = RunSpec
    for part in path:
        if model is not None and isinstance(part, str):
            model = _record(model.hints().get(part))
    return model


def _record(annotation: Any) -> type[Record] | None:
    if isinstance(annotation, type) and issubclass(annotation, Record):
        return annotation
    return next(filter(None, map(_record, get_args(annotation))), None)


def _where(path: _Path, table: Any) -> str:
    """Return a path in words, with the names of entries of lists."""
    words: list[str] = []
    for before, part in zip(("", *path), path, strict=False):
        table = _below(table, part)
        if isinstance(part, str):
            words.append(part)
            continue
        noun, fields = _ENTRIES.get(str(before), (f"{before}, entry", ()))
        names = [table.get(name) for name in fields] if isinstance(table, dict) else [None]
        is_named = bool(names) and all(isinstance(name, str) for name in names)
        words[-1:] = [f"{noun} {' to '.join(map(str, names)) if is_named else part + 1}"]
    return ", ".join(words)


def _below(table: Any, part: int | str) -> Any:
    if isinstance(table, dict):
        return table.get(part)
    if isinstance(table, list) and isinstance(part, int) and part < len(table):
        return table[part]
    return None
