"""`metadata.json` of a policy folder: its keys, their types, and the releases that wrote them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any, Final

from holdfast.registry.errors import IncompatibleState, InvalidInput
from holdfast.registry.formats.source import json_object

NAME: Final = "metadata.json"
_U32, _U64 = 2**32 - 1, 2**64 - 1
#: Key -> largest number, in the order of the file; those without a number have their own checks.
_ORDER: Final[Mapping[str, int | None]] = {
    "version": None,
    "cobre_version": None,
    "created_at": None,
    "completed_iterations": _U32,
    "final_lower_bound": None,
    "best_upper_bound": None,
    "state_dimension": _U32,
    "num_stages": _U32,
    "config_hash": None,
    "system_hash": None,
    "max_iterations": _U32,
    "forward_passes": _U32,
    "warm_start_cuts": _U32,
    "warm_start_counts": None,
    "rng_seed": _U64,
    "total_visited_states": _U64,
}
#: Keys that only some releases wrote; the others are required.
_OPTIONAL: Final = {
    "version",
    "config_hash",
    "system_hash",
    "warm_start_counts",
    "total_visited_states",
}
_RELEASE: Final = re.compile(r"v?(\d{1,6})\.(\d{1,6})(?:\.(\d{1,6}))?", re.ASCII)
#: The last release whose cuts have a domination count.
_LAST_WITH_DOMINATION: Final = (0, 4, 4)


def parse(data: bytes, where: str) -> dict[str, Any]:
    """Read the file."""
    found = json_object(data, where)
    faults = list(problems(found))
    if faults:
        raise InvalidInput(
            "not the metadata of a policy", where=where, found="; ".join(faults)[:500]
        )
    return found


def problems(metadata: Mapping[str, Any]) -> list[str]:
    """Return every key that is missing or wrong."""
    found = [f"{key} is missing" for key in _ORDER if key not in _OPTIONAL and key not in metadata]
    for key, most in _ORDER.items():
        if key in metadata and not _is_right(key, metadata[key], most):
            found.append(f"{key} has a wrong value")
    counts = metadata.get("warm_start_counts")
    if isinstance(counts, list) and len(counts) not in (0, metadata.get("num_stages")):
        found.append("warm_start_counts has another length than num_stages")
    return found


def _is_right(key: str, value: Any, most: int | None) -> bool:
    if most is not None:
        return type(value) is int and 0 <= value <= most
    if key == "warm_start_counts":
        return isinstance(value, list) and all(type(n) is int and 0 <= n <= _U32 for n in value)
    if key == "best_upper_bound" and value is None:
        return True
    if key.endswith("_bound"):
        return type(value) in (int, float) and math.isfinite(value)
    return isinstance(value, str)


def has_domination(metadata: Mapping[str, Any]) -> bool:
    """Return whether field 9 of a cut is its domination count; later it may mean anything."""
    found = _RELEASE.match(metadata.get("cobre_version", ""))
    if found is None:
        return False
    return tuple(int(part or 0) for part in found.groups()) <= _LAST_WITH_DOMINATION


def dump(metadata: Any, where: str) -> bytes:
    """Return the file, in the form of the program: keys in order, two spaces, no last newline."""
    if not isinstance(metadata, dict):
        raise IncompatibleState("the metadata of a policy is a dict", where=where)
    faults = problems(metadata)
    if faults:
        raise IncompatibleState(
            "not the metadata of a policy", where=where, found="; ".join(faults)[:500]
        )
    ordered = {key: metadata[key] for key in _ORDER if key in metadata}
    ordered |= {key: value for key, value in metadata.items() if key not in ordered}
    try:
        text = json.dumps(ordered, indent=2, ensure_ascii=False, allow_nan=False)
        if repr(json.loads(text)) != repr(ordered):
            raise ValueError("JSON has lists for tuples, and no keys but strings")
        return text.encode()
    except (TypeError, ValueError) as error:
        raise IncompatibleState("a value is not JSON", where=where, found=error) from error
