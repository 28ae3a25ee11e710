"""The base class of every record on the store: frozen, closed, canonical; and its field types.

A record is read by the annotations of its fields and by nothing else: `Record.of` compares parsed
JSON with them, field by field. The rules of a class are made from its annotations when the first
record of that class is read, so a reader of three kinds of actions makes those of three.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from inspect import get_annotations
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    Self,
    Union,
    dataclass_transform,
    get_args,
    get_origin,
)

from holdfast.backends.escape import printable
from holdfast.registry.errors import Malformed
from holdfast.registry.values import canonical
from holdfast.registry.values.digest import Digest

#: Reads a value; raises InvalidRecord, or another ValueError.
_Read = Callable[[Any], Any]
#: Writes a value as JSON; `None` where JSON has the same value.
_Write = Callable[[Any], Any] | None
#: Stands for the default of a field that must be given.
_MISSING: Any = object()
#: Stands for an empty dict, of which each record gets its own.
_EMPTY: Any = object()


class Problem(NamedTuple):
    """One field that breaks its rule."""

    path: tuple[int | str, ...]  # from the record to the field: names, and positions in lists
    text: str  # the rule
    kind: Literal["value", "missing", "unknown", "tag"]  # `tag`: a union has no record of this tag
    value: object = None  # what was found


class InvalidRecord(ValueError):
    """Values that are not a record of a class, with all fields that break a rule."""

    def __init__(self, *problems: Problem) -> None:
        super().__init__("; ".join(map(_described, problems)))
        self.problems = problems


def _described(problem: Problem) -> str:
    return f"{'.'.join(map(str, problem.path)) or 'the record'}: {problem.text}"


def _wrong(text: str, value: object) -> InvalidRecord:
    return InvalidRecord(Problem((), text, "value", value))


def empty() -> Any:
    """Return the default of a field that is an empty dict if it is absent."""
    return _EMPTY


# Types of fields


class Field:
    """Bounds of a value, in the annotation of a field: of a number, or of a text or list."""

    def __init__(
        self,
        *,
        ge: int | None = None,
        le: int | None = None,
        min_length: int = 0,
        max_length: int | None = None,
        pattern: str | None = None,
    ) -> None:
        self.ge, self.le = ge, le
        self.min_length, self.max_length = min_length, max_length
        self.pattern = pattern

    def bounded(self, read: _Read) -> _Read:
        """Return a function that reads a value and compares it with the bounds."""
        if self.pattern is not None:
            return self._matching(read, re.compile(self.pattern).fullmatch)
        return self._between(read) if self.ge is not None else self._sized(read)

    def _matching(self, read: _Read, matches: Callable[[str], object]) -> _Read:
        def check(given: Any) -> Any:
            value = read(given)
            if not matches(value):
                raise _wrong(f"must match the pattern {self.pattern}", value)
            return value

        return check

    def _between(self, read: _Read) -> _Read:
        least, most = self.ge, self.le

        def check(given: Any) -> Any:
            value = read(given)
            if value < least:
                raise _wrong(f"must be greater than or equal to {least}", value)
            if most is not None and value > most:
                raise _wrong(f"must be less than or equal to {most}", value)
            return value

        return check

    def _sized(self, read: _Read) -> _Read:
        def check(given: Any) -> Any:
            value = read(given)
            if len(value) < self.min_length:
                raise _wrong(f"must have at least {self.min_length} item or character", value)
            if self.max_length is not None and len(value) > self.max_length:
                raise _wrong(f"must have at most {self.max_length} characters", value)
            return value

        return check


class Spelled:
    """A type that JSON lacks, in the annotation of a field: how it is read and written."""

    def __init__(self, read: Callable[[Any], Any], write: Callable[[Any], Any]) -> None:
        self.read, self.write = read, write


class Tagged:
    """Marks a union of records in an annotation: one field, the tag, tells which it is."""

    def __init__(self, field: str) -> None:
        self.field = field

    def read(self, kinds: Mapping[str, type[Record]], value: object) -> Record:
        """Return the record of the kind that the tag names."""
        if isinstance(value, Record) and kinds.get(getattr(value, self.field, "")) is type(value):
            return value
        if not isinstance(value, dict):
            raise _wrong("not an object", value)
        tag = value.get(self.field)
        if not isinstance(tag, str) or tag not in kinds:
            text = f"{self.field} must be one of {', '.join(kinds)}, not {printable(tag)!r}"
            raise InvalidRecord(Problem((), text, "tag", tag))
        return kinds[tag].of(value)


def kinds_by(field: str, kinds: Iterable[type[Record]]) -> dict[str, type[Record]]:
    """Return kinds of records by the tag that each has in a field."""
    return {getattr(kind, field): kind for kind in kinds}


def _digest(value: object) -> Digest:
    return value if isinstance(value, Digest) else Digest.from_hex(value)


def _float(value: object) -> float:
    if isinstance(value, str):
        return canonical.float_from_hex(value)
    if not isinstance(value, float):
        raise ValueError("a double is 16 hexadecimal digits")
    return value


def _number(value: object) -> float:
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else _float(value)


#: A digest; 64 hexadecimal digits in JSON.
DigestField = Annotated[Digest, Spelled(_digest, bytes.hex)]
#: A double; the 16 hexadecimal digits of its bits in JSON.
FloatField = Annotated[float, Spelled(_float, canonical.float_to_hex)]
#: A `FloatField` that also accepts a whole number, since people write those in a preset.
NumberField = Annotated[float, Spelled(_number, canonical.float_to_hex)]
#: The counter that a run saves by: a training step, a PPO update or an epoch.
Step = Annotated[int, Field(ge=0, le=2**53)]
#: A segment of a ref.
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
PhaseName = Name
Metrics = dict[str, FloatField]
#: A value encoded by `holdfast.registry.pytree` without arrays.
Plain = Any


# Records


@dataclass_transform(kw_only_default=True, frozen_default=True)
class Record:
    """A frozen value with one canonical byte string. Unknown fields are refused."""

    #: Its fields, those of base classes first, each with its default.
    _defaults: ClassVar[Mapping[str, Any]] = {}
    _made: ClassVar[Iterable[_Rule]]

    def __init_subclass__(cls) -> None:
        own = (name for name in get_annotations(cls) if name[0] != "_")
        defaults = {name: cls.__dict__.get(name, _MISSING) for name in own}
        cls._defaults = {**cls._defaults, **defaults}

    def __init__(self, **given: Any) -> None:
        self._fill(given)

    @classmethod
    def of(cls, given: object) -> Self:
        """Return the record with these values, as JSON has them.

        Raises:
            InvalidRecord: A field is unknown, missing or breaks its rule.
        """
        if isinstance(given, cls):
            return given
        if not isinstance(given, dict):
            raise _wrong("must be an object", given)
        made = cls.__new__(cls)
        made._fill(given)
        return made

    @classmethod
    def unchecked(cls, **fields: Any) -> Self:
        """Return a record of values that keep the rules."""
        made = cls.__new__(cls)
        values = made.__dict__
        for name, default in cls._defaults.items():
            values[name] = fields.get(name, {} if default is _EMPTY else default)
        return made

    def changed(self, **fields: Any) -> Self:
        """Return a copy with other values, which keep the rules."""
        return self.unchecked(**self.as_dict() | fields)

    def _fill(self, given: Mapping[str, Any]) -> None:
        values, found = self.__dict__, 0
        problems: list[Problem] = []
        for name, default, read, _ in _rules(type(self)):
            if name in given:
                found += 1
                try:
                    values[name] = read(given[name])
                except ValueError as error:
                    problems += _below(name, given[name], error)
            elif default is _MISSING:
                problems.append(Problem((name,), "is missing", "missing"))
            else:
                values[name] = {} if default is _EMPTY else default
        if found < len(given):
            unknown = (name for name in given if name not in self._defaults)
            problems += (Problem((name,), "is unknown", "unknown") for name in unknown)
        if problems:
            raise InvalidRecord(*problems)
        try:
            self._agree()
        except ValueError as error:
            raise _wrong(str(error), given) from error

    def _agree(self) -> None:
        """Raise ValueError if the fields, each of which is right, contradict each other."""

    @classmethod
    def fields(cls) -> Iterable[str]:
        """Return the names of its fields."""
        return cls._defaults.keys()

    @classmethod
    def hints(cls) -> dict[str, Any]:
        """Return the annotations of its fields, as types."""
        bases = reversed(cls.__mro__[:-2])  # without Record and object
        return {
            name: hint
            for base in bases
            for name, hint in get_annotations(base, eval_str=True).items()
        }

    def as_dict(self) -> dict[str, Any]:
        """Return the values of its fields by name."""
        values = self.__dict__  # it has cached properties too
        return {name: values[name] for name in self._defaults}

    def shared(self, of: type[Record]) -> dict[str, Any]:
        """Return the fields of the base class `of`, to make another record from them."""
        return {name: self.__dict__[name] for name in of._defaults}

    def to_json(self, *, without: Iterable[str] = ()) -> dict[str, Any]:
        """Return the JSON value as stored; absent optional fields are left out."""
        values, found = self.__dict__, {}
        for name, _, _, write in _rules(type(self)):
            value = values[name]
            if value is not None and name not in without:
                found[name] = value if write is None else write(value)
        return found

    def encode(self) -> bytes:
        """Return the canonical bytes."""
        return canonical.encode(self.to_json())

    @classmethod
    def decode(cls, line: bytes, *, where: str) -> Self:
        """Parse canonical bytes.

        Raises:
            Malformed: They are not canonical JSON, or not a record of this class.
        """
        return cls._parsed(canonical.decode(line, where=where), where)

    @classmethod
    def parse(cls, line: bytes, *, where: str) -> Self:
        """Parse bytes that are known to be canonical.

        Raises:
            Malformed: They are not a record of this class.
        """
        return cls._parsed(canonical.parse(line, where=where), where)

    @classmethod
    def _parsed(cls, value: object, where: str) -> Self:
        try:
            return cls.of(value)
        except InvalidRecord as error:
            what = f"not a {cls.__name__.lower()} of this format"
            raise Malformed(what, where=where, found=_described(error.problems[0])) from error

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__} is frozen: {name} cannot be set")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"{type(self).__name__} is frozen: {name} cannot be deleted")

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return self.as_dict() == other.as_dict()

    def __hash__(self) -> int:
        return hash((type(self), *self.as_dict().values()))

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in self.as_dict().items())
        return f"{type(self).__name__}({fields})"


# Rules: how the value of a field is read, and how it is written


class _Rule(NamedTuple):
    name: str
    default: Any
    read: _Read
    write: _Write


def _rules(kind: type[Record]) -> Iterable[_Rule]:
    """Return the rules of a class, which are made at its first use."""
    found: Iterable[_Rule] | None = kind.__dict__.get("_made")
    if found is None:
        hints, fields = kind.hints(), kind._defaults.items()
        found = kind._made = [_Rule(name, one, *_reading(hints[name])) for name, one in fields]
    return found


def _reading(hint: Any) -> tuple[_Read, _Write]:
    """Return how a value of an annotated type is read and written."""
    if hint in _SIMPLE:
        return _SIMPLE[hint], None
    if isinstance(hint, type) and issubclass(hint, Record):
        return hint.of, Record.to_json
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _annotated(inner[0], inner[1])
    if origin is Literal:
        return partial(_one_of, inner), None
    if origin is tuple:
        return _listed(*_reading(inner[0]))
    if origin is dict:
        return _by_name(_reading(inner[0])[0], *_reading(inner[1]))
    if origin in (Union, UnionType):
        return _any_of([_reading(one) for one in inner if one is not NoneType])
    raise TypeError(f"no field of a record can be {hint}")


def _text(value: object) -> object:
    if not isinstance(value, str):
        raise _wrong("must be a text", value)
    return value


def _integer(value: object) -> object:
    if not isinstance(value, int) or isinstance(value, bool):
        raise _wrong("must be a whole number", value)
    return value


def _truth(value: object) -> object:
    if not isinstance(value, bool):
        raise _wrong("must be true or false", value)
    return value


_SIMPLE: dict[Any, _Read] = {str: _text, int: _integer, bool: _truth, Any: lambda value: value}


def _one_of(known: tuple[str, ...], value: object) -> object:
    if not isinstance(value, str) or value not in known:
        raise _wrong(f"must be {' or '.join(map(repr, known))}", value)
    return value


def _annotated(hint: Any, note: Any) -> tuple[_Read, _Write]:
    if isinstance(note, Spelled):
        return note.read, note.write
    if isinstance(note, Tagged):
        return partial(note.read, kinds_by(note.field, get_args(hint))), Record.to_json
    read, write = _reading(hint)
    return note.bounded(read), write


def _listed(read: _Read, write: _Write) -> tuple[_Read, _Write]:
    def read_all(given: object) -> tuple[Any, ...]:
        if not isinstance(given, list | tuple):
            raise _wrong("must be a list", given)
        try:
            return tuple(map(read, given))
        except ValueError as error:
            raise InvalidRecord(*_problems(read, enumerate(given))) from error

    return read_all, list if write is None else lambda row: list(map(write, row))


def _by_name(name: _Read, read: _Read, write: _Write) -> tuple[_Read, _Write]:
    def read_all(given: object) -> dict[Any, Any]:
        if not isinstance(given, dict):
            raise _wrong("must be an object", given)
        try:
            return {name(key): read(value) for key, value in given.items()}
        except ValueError as error:
            wrong = [*_problems(name, zip(given, given, strict=True))]
            raise InvalidRecord(*wrong, *_problems(read, given.items())) from error

    def write_all(table: Mapping[str, Any]) -> dict[str, Any]:
        return {key: value if write is None else write(value) for key, value in table.items()}

    return read_all, write_all


def _any_of(several: Sequence[tuple[_Read, _Write]]) -> tuple[_Read, _Write]:
    """Return how a value is read that is absent or of one of several types."""

    def read_any(given: object) -> object:
        if given is None:
            return None
        *others, (read, _) = several
        for one, _ in others:
            with suppress(ValueError):
                return one(given)
        return read(given)

    return read_any, several[0][1]


def _problems(read: _Read, items: Iterable[tuple[int | str, object]]) -> Iterator[Problem]:
    for part, value in items:
        try:
            read(value)
        except ValueError as error:
            yield from _below(part, value, error)


def _below(part: int | str, value: object, error: ValueError) -> Iterable[Problem]:
    """Return the problems of the value at a name or a position."""
    inner = (
        error.problems if isinstance(error, InvalidRecord) else _wrong(str(error), value).problems
    )
    return (one._replace(path=(part, *one.path)) for one in inner)
