"""Presets: run specifications in TOML, shipped with Holdfast or written by users.

`holdfast.registry.spec.run_spec` checks the values; `preset_errors` names the mistakes in a file.
docs/presets.md explains every field.
"""

from __future__ import annotations

import json
import os
import tomllib
from importlib.resources import files
from pathlib import Path

from holdfast.registry.errors import InvalidInput, NotFound, RegistryError
from holdfast.registry.spec.presets.preset_errors import describe
from holdfast.registry.spec.run_spec import RunSpec
from holdfast.registry.values import InvalidRecord, near

_MAX_BYTES = 2**20
_HINT = "docs/presets.md explains every field."


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
