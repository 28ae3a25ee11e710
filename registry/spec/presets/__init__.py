"""Presets: run specifications in TOML, shipped with Holdfast or written by users.

`holdfast.registry.spec.run_spec` has the rules; this package words their errors for people.
docs/presets.md explains every field.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, get_args

from holdfast.registry.errors import InvalidInput, NotFound, RegistryError
from holdfast.registry.spec.run_spec import Phase, RunSpec
from holdfast.registry.values import InvalidRecord, Record, near

_MAX_BYTES = 2**20
#: The shipped presets for any training; each of the others has the rules of one system.
GENERAL = ("default", "pretrain", "finetune", "sweep")
#: The names of shipped presets in an error; the systems' own come last.
KNOWN = f"{', '.join(GENERAL)}, one of `holdfast preset`"
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

_PATH = "phases.NAME.retention.last, or the like"

_Path = tuple[int | str, ...]
#: Values of a preset by their paths.
Overrides = Mapping[str, object]


def preset_names() -> list[str]:
    """Return the names of the shipped presets: first the general ones, then those of systems."""
    shipped = (one.name for one in files(__name__).iterdir() if one.name.endswith(".toml"))
    systems = {name.removesuffix(".toml") for name in shipped} - set(GENERAL)
    return [*GENERAL, *sorted(systems)]


def load_preset(
    preset: str | os.PathLike[str] | RunSpec, overrides: Overrides | None = None
) -> RunSpec:
    """Return a run specification, with some of its fields set to other values.

    Args:
        preset: The name of a shipped preset, the path of a TOML file, or a specification.
        overrides: Values by path, such as `phases.main.tiers.training.retention.last`.
    """
    if isinstance(preset, RunSpec):
        if not overrides:
            return preset
        return _spec(json.loads(json.dumps(preset.to_json())), preset.name or "preset", overrides)
    if not isinstance(preset, str | os.PathLike):
        raise InvalidInput(
            "not a preset",
            expected="the name of a preset, the path of a TOML file, or a RunSpec",
            found=type(preset).__name__,
            hint=_HINT,
        )
    if isinstance(preset, str) and preset in preset_names():
        text = files(__name__).joinpath(f"{preset}.toml").read_text(encoding="utf-8")
        return _spec(_parse(text, preset), preset, overrides)
    path = Path(preset)
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise NotFound(
            "no such preset",
            where=str(preset),
            expected=f"{KNOWN}, or the path of a TOML file",
            found=error.strerror,
            hint=near(str(preset), preset_names()),
        ) from None
    if len(data) > _MAX_BYTES:
        raise InvalidInput("not a preset", where=path, expected=f"at most {_MAX_BYTES} bytes")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidInput("not a preset", where=path, expected="UTF-8", found=error) from error
    return _spec(_parse(text, str(path)), str(path), overrides)


def _parse(text: str, where: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise InvalidInput("not a preset", where=where, expected="TOML", found=error) from error


def _spec(table: dict[str, Any], where: str, overrides: Overrides | None) -> RunSpec:
    for path, value in (overrides or {}).items():
        _override(table, path, value, where)
    try:
        # Through JSON, which has no dates and times.
        return RunSpec.of(json.loads(json.dumps(table)))
    except InvalidRecord as error:
        raise _wrong(where, describe(error, table)) from error
    except TypeError as error:
        raise _wrong(where, "a date or a time: write it as a text, in quotes") from error
    except RegistryError as error:
        raise _wrong(where, str(error)) from error


def _override(table: dict[str, Any], path: str, value: object, where: str) -> None:
    """Set a field of a preset. What the rules do not know is found when they are checked."""
    at, rest = table, path.split(".") if isinstance(path, str) else []
    if not all(rest) or not rest:
        raise InvalidInput("not a path of a preset", where=where, expected=_PATH, found=path)
    while len(rest) > 1:
        name = rest.pop(0)
        found = at.setdefault(name, [] if name in _ENTRIES else {})
        if isinstance(found, list) and name in _ENTRIES:
            found, rest = _entry(found, name, rest, f"{where}, {path}")
        if not isinstance(found, dict):
            raise _wrong(where, f"{path}: {name!r} has no fields")
        at = found
    at[rest[0]] = value.to_json() if isinstance(value, Record) else value


def _entry(entries: Sequence[Any], name: str, rest: list[str], where: str) -> tuple[Any, list[str]]:
    """Return the entry of a list that a path names, and the path within it."""
    noun, fields = _ENTRIES[name]
    known = {
        ".".join(str(one.get(field)) for field in fields): one
        for one in entries
        if isinstance(one, dict)
    }
    for length in range(len(rest) - 1, 0, -1):  # a name may have dots
        if (found := known.get(".".join(rest[:length]))) is not None:
            return found, rest[length:]
    is_of_run = name == "phases" and rest[1:] and rest[1] in RunSpec.fields()
    if not known:
        raise InvalidInput(
            f"the preset declares no {name}",
            where=where,
            hint=f"Without phases write `{'.'.join(rest[1:])}`." if is_of_run else None,
        )
    raise InvalidInput(
        f"no such {noun}, or no field of one",
        where=where,
        expected=", ".join(f"{name}.{one}.FIELD" for one in known),
        found=".".join(rest),
        hint=near(rest[0], known),
    )


def _wrong(where: str, found: str) -> InvalidInput:
    return InvalidInput("breaks the rules of presets", where=where, found=found, hint=_HINT)


def describe(error: InvalidRecord, table: Mapping[str, Any]) -> str:
    """Return all errors of a preset as one text."""
    found = []
    for path, what in _errors(error, table):
        where = _where(path, table)
        found.append(what if not where or what.startswith(where) else f"{where}: {what}")
    return "; ".join(dict.fromkeys(found))


def _errors(error: InvalidRecord, table: Mapping[str, Any]) -> Iterator[tuple[_Path, str]]:
    """Yield the path and the description of each error."""
    for path, text, kind, value in error.problems:
        if kind == "unknown":
            yield path[:-1], _unknown(path, table)
        elif kind == "missing":
            yield path[:-1], f"{path[-1]!r} {text}"
        elif text.startswith("must match"):
            form = _SOURCE if path[-1] == "source" else _NAME
            yield path, f"{form}, not {value!r}"
        else:
            text = text.replace("an object", "a table")
            shown = isinstance(value, str | int | float) and text.startswith("must")
            yield path, f"{text}, not {value!r}" if shown else text


def _unknown(path: _Path, table: Mapping[str, Any]) -> str:
    name, model = str(path[-1]), _model(path[:-1])
    if model is RunSpec and name in Phase.fields():
        declared = "" if table.get("phases") else "; the preset declares no phases"
        return f"{name!r}, which is a field of a phase{declared}"
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
