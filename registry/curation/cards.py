"""Model cards: descriptions of released models, as YAML that people read and write.

A card is a dict with string keys that holds only strings, numbers, booleans, None, lists and dicts.
YAML is read as data only: tags, which name types, and anchors and aliases, which can make a huge
value from a small file, are refused.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.backends.escape import quoted
from holdfast.registry.errors import Hint, InvalidInput, UnsupportedValue
from holdfast.registry.history import is_text
from holdfast.registry.pytree import clip

if TYPE_CHECKING:
    import yaml

#: Longest file of a card, in bytes.
MAX_BYTES = 2**20
#: The most levels of nested dicts and lists.
MAX_DEPTH = 50
#: Line breaks of Unicode and the byte order mark: PyYAML writes them as they are and misreads them.
_MISREAD = "\x85\u2028\u2029\ufeff"
_STRING = "tag:yaml.org,2002:str"
_NUMBERS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")


def read_card(source: Mapping[str, Any] | str | os.PathLike[str]) -> dict[str, Any]:
    """Return a card with plain values only; dates become ISO strings."""
    if isinstance(source, Mapping):
        return _mapping(source, "card", 0)
    path = _path(source)
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # ValueError: not a possible path
        found = getattr(error, "strerror", None) or error
        raise InvalidInput("cannot read the card", where=quoted(str(path)), found=found) from error
    return parse_card(data, str(path))


def parse_card(data: bytes, where: str) -> dict[str, Any]:
    """Return a card from the bytes of a file; see `read_card`."""
    _check_size(len(data), where)
    try:
        return _mapping(_parse(data.decode(), where), where, 0)
    except UnicodeDecodeError as error:
        raise InvalidInput("a card is not UTF-8", where=where, found=error.reason) from error


def write_card(card: Mapping[str, Any]) -> str:
    """Return a card as YAML that `read_card` reads: block style, keys sorted."""
    import yaml

    # YAML would write shared objects as aliases; the result of `_mapping` shares none.
    plain = _mapping(card, "card", 0)
    try:
        # YAML is never four times shorter than JSON: it has line breaks for brackets and commas.
        _check_size(len(json.dumps(plain, ensure_ascii=False)) // 4, "card")
        text: str = yaml.safe_dump(plain, default_flow_style=False, allow_unicode=True)
        if any(character in text for character in _MISREAD):
            text = yaml.safe_dump(plain, default_flow_style=False, allow_unicode=False)
    except InvalidInput:
        raise
    except ValueError as error:  # an integer of thousands of digits
        raise UnsupportedValue("a card cannot be written as YAML", found=error) from error
    _check_size(len(text.encode()), "card")
    return text


def check_card(card: Mapping[str, Any], required: Sequence[str]) -> None:
    """Check that a card has the required fields; 0 and False count as filled in."""
    missing = [name for name in required if name not in card]
    empty = [name for name in required if name in card and _is_empty(card[name])]
    if missing or empty:
        parts = [
            f"{fault}: {', '.join(names)}"
            for fault, names in (("missing", missing), ("empty", empty))
            if names
        ]
        raise InvalidInput(
            "a model card is not complete",
            expected=", ".join(required),
            found="; ".join(parts),
            hint="Fill these fields in.",
        )


def _is_empty(value: object) -> bool:
    if isinstance(value, str):
        return not value.strip()
    return value is None or (isinstance(value, Mapping | list | tuple) and not value)


# Plain values


def _mapping(value: object, where: str, depth: int) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidInput(
            "a card is not a mapping",
            where=where,
            expected="fields, such as 'description: ...'",
            found=type(value).__name__,
        )
    _check_depth(where, depth)
    result = {}
    for key, item in value.items():
        if not isinstance(key, str):
            raise InvalidInput(
                "a key of a card is not a string",
                where=where,
                found=clip(key),
                hint=Hint("Use str(key); in YAML, quote it.", "Quote it."),
            )
        result[_string(key, where)] = _plain(item, f"{where}[{clip(key)}]", depth + 1)
    return result


def _plain(value: object, where: str, depth: int) -> Any:
    # A subclass such as numpy.float64 or an enum becomes its plain value.
    match value:
        case None | bool():
            return value
        case str():
            return _string(value, where)
        case int():
            return int(value)
        case float():
            return float(value)
        case date():  # a datetime is one, too
            return value.isoformat()
        case Mapping():
            return _mapping(value, where, depth)
        case list() | tuple():
            _check_depth(where, depth)
            return [_plain(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
    raise UnsupportedValue(
        "a value of a card is not plain",
        where=where,
        expected="text, a number, boolean, date, list or dict, or nothing",
        found=type(value).__name__,
        hint=Hint(
            "Convert it: float(x), str(x), x.tolist().", "Write it as text, a number or a list."
        ),
    )


def _string(value: str, where: str) -> str:
    text = str.__str__(value)
    if not is_text(text):
        raise UnsupportedValue("a string with a lone surrogate", where=where)
    return text


def _check_depth(where: str, depth: int) -> None:
    if depth >= MAX_DEPTH:
        raise InvalidInput(
            "a card nests too deeply",
            where=where.partition("[")[0],
            expected=f"at most {MAX_DEPTH} levels",
        )


# YAML


def _path(source: object) -> Path:
    if not isinstance(source, str | os.PathLike):
        expected = "a mapping or the path of a YAML file"
        raise InvalidInput("not a card", expected=expected, found=clip(source))
    return Path(source)


def _check_size(size_bytes: int, where: str) -> None:
    if size_bytes > MAX_BYTES:
        raise InvalidInput(
            "a card is too long",
            where=where,
            expected=f"at most {MAX_BYTES} bytes",
            hint="Keep large content in an artifact of the run.",
        )


def _parse(text: str, where: str) -> object:
    import yaml

    try:
        _check_events(text, where)
        loader = _loader()(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _check_node(node, where)
        return loader.construct_document(node)
    except InvalidInput:
        raise
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # ValueError: the 31st of June
        found = " ".join(str(error).split())
        raise InvalidInput("a card is not YAML", where=where, found=found) from error


def _loader() -> Any:
    """Return the loader of libyaml, which is five times as fast, if PyYAML has it."""
    import yaml

    return getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def _check_events(text: str, where: str) -> None:
    """Refuse tags, anchors and aliases before any value is built."""
    import yaml

    depth = 0
    for event in yaml.parse(text, Loader=_loader()):
        here = _line(event, where)
        if getattr(event, "anchor", None) is not None:  # an alias names one, too
            raise InvalidInput(
                "a card has an anchor or alias", where=here, hint="Write the value out."
            )
        tag = getattr(event, "tag", None)
        if tag is not None:
            raise InvalidInput("a card has a tag", where=here, found=tag, hint="Leave it out.")
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        _check_depth(here, depth - 1)


def _check_node(node: yaml.Node, where: str) -> None:
    """Refuse values that YAML reads in another way than their writer meant."""
    import yaml

    if isinstance(node, yaml.MappingNode):
        _check_keys(node, where)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _check_node(item, where)
    elif node.tag in _NUMBERS and ":" in node.value:
        raise InvalidInput(
            "a card has a number to base 60",
            where=_line(node, where),
            found=clip(node.value),
            hint="Quote it; without quotes YAML reads 1:30 as 90.",
        )


def _check_keys(node: yaml.MappingNode, where: str) -> None:
    seen = set()
    for key, item in node.value:
        here = _line(key, where)
        if key.tag != _STRING:
            raise InvalidInput(
                "a key of a card is not a string",
                where=here,
                found=clip(key.value),
                hint="Quote it.",
            )
        if key.value in seen:
            raise InvalidInput("a card has a key twice", where=here, found=clip(key.value))
        seen.add(key.value)
        _check_node(item, where)


def _line(place: yaml.Node | yaml.Event, where: str) -> str:
    return f"{where}, line {place.start_mark.line + 1}"  # type: ignore[union-attr]
