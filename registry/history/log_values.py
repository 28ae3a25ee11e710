"""Check and encode the values in the log: configuration, meta, metrics, steps, names, times.

Also the names of phases and steps: as in refs, and as callers gave them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from operator import index
from typing import Any, Protocol

from holdfast.backends.escape import MAX_DECIMAL_BITS, hexadecimal, quoted, shown
from holdfast.registry import pytree
from holdfast.registry.errors import IncompatibleState, InvalidInput, UnsupportedValue
from holdfast.registry.history.actions import Parent
from holdfast.registry.values import Digest, canonical, check_json

#: The key of a checkpoint's meta that names the sources of a merge.
MERGE = "merge"


class _AtStep(Protocol):
    """A checkpoint, or a state made from one, with its phase and step."""

    @property
    def phase(self) -> str: ...
    @property
    def step(self) -> int: ...


def step_ref(at: _AtStep) -> str:
    """Return the name of a step within its run, such as `main/step00000200`."""
    return f"{phase_segment(at.phase)}/step{at.step:08d}"


class _Kept(_AtStep, Protocol):
    """A checkpoint of a run."""

    @property
    def manifest(self) -> Digest: ...
    @property
    def superseded(self) -> bool: ...


def kept_ref(record: _Kept) -> str:
    """Return the name within its run that finds a checkpoint: of a superseded one its id."""
    return record.manifest.short if record.superseded else step_ref(record)


def parent_ref(parent: Parent) -> str:
    """Return the name of the checkpoint that a fork continues from."""
    return f"{parent.run}/{step_ref(parent)}"


def phase_segment(phase: str) -> str:
    """Return a phase as in a ref: `phase2` for a number, otherwise its name."""
    return f"phase{phase}" if phase.isdigit() else phase


def phase_value(phase: str) -> int | str:
    """Return a phase as the caller gave it: a number, or a name."""
    return int(phase) if phase.isdigit() else phase


MAX_STEP = 2**53
#: Levels of JSON in a value of the log; many JSON readers allow 200.
MAX_DEPTH = 150
#: Segments that may follow a run in a ref.
RESERVED = frozenset({"artifacts", "best", "gates", "latest", "pool", "releases", "tags"})
_LIKE_A_NUMBER = r"phase\d+"
_LIKE_A_DIGEST = r"[0-9a-f]{8,64}"
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
#: The times that have a date, in milliseconds since the epoch.
_FIRST_MS, _LAST_MS = -62_135_596_800_000, 253_402_300_799_999
_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"


def encode_plain(value: object, what: str) -> canonical.Json:
    """Return a plain value as the log stores it; every type and bit is preserved."""
    (component,) = pytree.flatten({what: value}).components
    if component.leaves:
        raise UnsupportedValue(
            f"{what} holds an array or a very long string",
            where=component.leaves[0].path,
            hint="Keep it in the state; the log holds small plain values.",
        )
    return _shallow(component.skeleton, what)


def join_plain(encoded: Mapping[str, canonical.Json], what: str) -> canonical.Json:
    """Return the encoding of a dict, given its encoded values."""
    return _shallow({"d": [[name, value] for name, value in encoded.items()]}, what)


def _shallow(skeleton: canonical.Json, what: str) -> canonical.Json:
    if _depth(skeleton) > MAX_DEPTH:
        raise UnsupportedValue(
            f"{what} nests too deeply for the log",
            expected=f"at most {MAX_DEPTH} levels of JSON, three for each dict",
            hint="Keep it in the state.",
        )
    check_json(canonical.encode(skeleton), where=what, kind=UnsupportedValue)
    return skeleton


def _depth(skeleton: canonical.Json) -> int:
    if isinstance(skeleton, dict):
        return 1 + max(map(_depth, skeleton.values()), default=0)
    if isinstance(skeleton, list):
        return 1 + max(map(_depth, skeleton), default=0)
    return 0


def decode_plain(skeleton: canonical.Json) -> Any:
    """Return the value that `encode_plain` has encoded."""
    return pytree.unflatten_component(skeleton, ())


def decode_or_keep(encoded: canonical.Json) -> Any:
    """Return the value; in its encoded form if only another program can rebuild it."""
    try:
        return None if encoded is None else decode_plain(encoded)
    except IncompatibleState:
        return encoded


def merged_from(meta: Any) -> list[str]:
    """Return the sources of a merge with their weights; none if a meta tells of no merge."""
    try:
        merge = meta[MERGE]
        sources = [one["ref"] for one in merge["sources"]]
        if not all(isinstance(ref, str) for ref in sources):
            return []
        if "weights" not in merge:
            return sources
        pairs = zip(sources, merge["weights"], strict=True)
        return [f"{ref} (weight {weight})" for ref, weight in pairs]
    except (TypeError, KeyError, ValueError):
        return []


def plain_digest(skeleton: canonical.Json) -> Digest:
    """Return the digest of an encoded value, as `config_hash` holds it."""
    return Digest.of(canonical.encode(skeleton))


def check_metrics(metrics: Mapping[str, object] | None) -> dict[str, float]:
    """Return metrics as floats; numbers of any library are accepted, NaN included."""
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise InvalidInput(
            "metrics are not a mapping", expected="{name: number}", found=type(metrics).__name__
        )
    checked = {}
    for name, value in metrics.items():
        if not isinstance(name, str) or not name or not is_text(name):
            raise InvalidInput(
                "not a name of a metric",
                where="metrics",
                expected="a text of valid Unicode, not empty",
                found=quoted(name),
            )
        checked[name] = _number(name, value)
    return checked


def check_step(step: object, where: str = "step") -> int:
    """Return a step as an int."""
    try:
        # A boolean has an index too, in Python, NumPy and torch.
        if isinstance(step, bool) or str(getattr(step, "dtype", "")).endswith("bool"):
            raise TypeError
        number = index(step)  # type: ignore[arg-type]  # raises if it is no number
    except TypeError:
        number = -1
    if not 0 <= number <= MAX_STEP:
        raise InvalidInput(
            "not a step", where=where, expected="a whole number from 0 to 2^53", found=quoted(step)
        )
    return number


def check_name(name: object, what: str) -> str:
    """Return a name that may be part of a ref."""
    if not isinstance(name, str) or not re.fullmatch(_NAME, name):
        raise InvalidInput(
            f"not a legal name for {what}",
            where=quoted(name),
            expected="1 to 64 of [A-Za-z0-9._-], first a letter or digit",
        )
    return name


def check_phase(phase: object) -> str:
    """Return a phase as the log stores it; a number becomes its digits."""
    if isinstance(phase, int) and not isinstance(phase, bool) and phase >= 0:
        phase = str(check_step(phase))
    name = check_name(phase, "a phase")
    if name.isdigit() and name != str(int(name)):
        raise InvalidInput("a phase number has no leading zeros", where=quoted(phase))
    if name.isdigit():
        return name
    if name in RESERVED or re.fullmatch(_LIKE_A_NUMBER, name) or re.fullmatch(_LIKE_A_DIGEST, name):
        raise InvalidInput(
            "a phase of this name would be read as another ref",
            where=quoted(name),
            expected=f"not {', '.join(sorted(RESERVED))}, 'phase' and digits, or 8 hex digits",
        )
    return name


def is_dated(time_ms: int) -> bool:
    """Return whether a time of the log is within the calendar: years 1 to 9999."""
    return _FIRST_MS <= time_ms <= _LAST_MS


def moment(time_ms: int) -> datetime:
    """Return a time of the log; outside the calendar its first or last moment.

    A log may have any number here: it comes from its author's clock, and nothing depends on it.
    """
    return _EPOCH + timedelta(milliseconds=min(max(time_ms, _FIRST_MS), _LAST_MS))


def format_time(time_ms: int) -> str:
    """Return a time of the log for people: UTC, to the second; outside the calendar the number."""
    if not is_dated(time_ms):
        return f"{time_ms} ms"
    return f"{moment(time_ms):%Y-%m-%d %H:%M:%S}Z"


def is_text(name: str) -> bool:
    """Return whether a string is one of Unicode; a lone surrogate is not."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _number(name: str, value: object) -> float:
    if not isinstance(value, bool | str | bytes):
        try:
            # torch warns if the number is part of a graph.
            plain = value.detach() if hasattr(value, "detach") else value
            return float(plain)  # type: ignore[arg-type]  # raises if it is no number
        except (TypeError, ValueError, RuntimeError, OverflowError):
            pass
    raise InvalidInput(
        "a metric is not a number",
        where=name,
        expected="an int, a float or a tensor of one element",
        found=type(value).__name__,
    )


def json_ready(value: object) -> Any:
    """Return a plain value as ordinary JSON for people and tools.

    NaN and infinities become strings. Integers of more than 2048 bits become strings too, as
    `0x...`: many JSON readers refuse them, Python's among them.
    """
    match value:
        case None | bool() | str():
            return value
        case int():
            return value if value.bit_length() <= MAX_DECIMAL_BITS else hexadecimal(value)
        case float():
            return value if math.isfinite(value) else str(value)
        case Mapping():
            return {shown(key): json_ready(item) for key, item in value.items()}
        case list() | tuple() | set() | frozenset():
            return [json_ready(item) for item in value]
    return shown(value)
