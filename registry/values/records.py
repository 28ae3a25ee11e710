"""The base class of every record on the store: frozen, closed, canonical; and its field types.

Pydantic checks the values: the schema of a class is made from its annotations when the first record
of that class is read, so a reader of three kinds of actions makes those of three. Only its compiled
core is imported: classes of models cost a fresh process three times as much, and the type hints of
schemas as much as the rest of a first read. For the same reason most modules of records do not
import `annotations`: Python would compile the text of each annotation at the first read.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from importlib import import_module
from importlib.machinery import PathFinder
from importlib.util import find_spec, module_from_spec
from inspect import get_annotations
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    Self,
    Union,
    cast,
    dataclass_transform,
    get_args,
    get_origin,
    get_type_hints,
)

from holdfast.backends.escape import printable
from holdfast.registry.errors import Malformed
from holdfast.registry.values import canonical
from holdfast.registry.values.digest import Digest

_CORE = "pydantic_core._pydantic_core"


def _compiled_core() -> Any:
    """Return pydantic's compiled core, without its package if nobody has imported that."""
    package = None if "pydantic_core" in sys.modules else find_spec("pydantic_core")
    spec = package and PathFinder.find_spec(_CORE, package.submodule_search_locations)
    if not spec or not spec.loader:
        return import_module(_CORE)
    core = module_from_spec(spec)
    spec.loader.exec_module(core)
    return core  # a process makes it once: the package gets the same one


if TYPE_CHECKING:
    from pydantic_core import (
        CoreSchema,
        ErrorDetails,
        PydanticKnownError,
        SchemaValidator,
        ValidationError,
    )
else:
    _core = _compiled_core()
    PydanticKnownError, SchemaValidator = _core.PydanticKnownError, _core.SchemaValidator
    ValidationError = _core.ValidationError

#: What `pydantic_core.core_schema` makes: the rules of a value.
_Schema = dict[str, Any]
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

    def __init__(self, error: ValidationError) -> None:
        found = error.errors(include_url=False)
        # Pydantic counts the entries that keep their rules: the others are told anyway.
        above = {one["loc"][:end] for one in found for end in range(len(one["loc"]))}
        told = [one for one in found if one["type"] != "too_short" or one["loc"] not in above]
        self.problems = tuple(map(_problem, told))
        super().__init__("; ".join(map(_described, self.problems)))


#: The kind of each error that is not only a wrong value, and the texts of errors in plain words.
_KINDS: Mapping[str, Literal["missing", "unknown", "tag"]] = {
    "missing": "missing",
    "unexpected_keyword_argument": "unknown",
    "union_tag_invalid": "tag",
    "union_tag_not_found": "tag",
}
_TEXTS = {
    "missing": "is missing",
    "unexpected_keyword_argument": "is unknown",
    "union_tag_invalid": "{discriminator} must be one of {expected_tags}, not {tag!r}",
    "union_tag_not_found": "{discriminator} is missing",
    "value_error": "{error}",
    "string_type": "must be a text",
    "int_type": "must be a whole number",
    "int_from_float": "must be a whole number",
    "bool_type": "must be true or false",
    "tuple_type": "must be a list",
    "dict_type": "must be an object",
    "dataclass_type": "must be an object",
    "literal_error": "must be {expected}",
    "string_pattern_mismatch": "must match the pattern {pattern}",
    "string_too_short": "must have at least {min_length} character",
    "string_too_long": "must have at most {max_length} characters",
    "too_short": "must have at least {min_length} item",
    "greater_than_equal": "must be greater than or equal to {ge}",
    "less_than_equal": "must be less than or equal to {le}",
}


def _problem(found: ErrorDetails) -> Problem:
    kind, more = found["type"], found.get("ctx", {})
    text = _TEXTS[kind].format(**more) if kind in _TEXTS else found["msg"]
    value = more.get("tag", found["input"])
    return Problem(found["loc"], text, _KINDS.get(kind, "value"), value)


def _described(problem: Problem) -> str:
    return f"{'.'.join(map(str, problem.path)) or 'the record'}: {problem.text}"


def empty() -> Any:
    """Return the default of a field that is an empty dict if it is absent."""
    return _EMPTY


# Types of fields


class Field:
    """Bounds of a value, in the annotation of a field: of a number, or of a text or list.

    They are pydantic's: `ge`, `le`, `min_length`, `max_length` and `pattern`.
    """

    def __init__(self, **bounds: int | str) -> None:
        self.bounds = bounds


class Spelled:
    """A type that JSON lacks, in the annotation of a field: how it is read and written."""

    def __init__(self, read: Callable[[Any], Any], write: Callable[[Any], Any]) -> None:
        self.read, self.write = read, write


class Tagged:
    """Marks a union of records in an annotation: one field, the tag, tells which it is."""

    def __init__(self, field: str) -> None:
        self.field = field

    def choice(self, kinds: Iterable[type[Record]]) -> Callable[[object], Any]:
        """Return a function that reads the record of the kind which the tag names."""
        by_tag = {getattr(kind, self.field): kind for kind in kinds}

        def read(value: object) -> Any:
            if not isinstance(value, dict):
                tag = getattr(value, self.field, None)
            elif self.field not in value:
                raise PydanticKnownError("union_tag_not_found", {"discriminator": self.field})
            else:
                tag = value[self.field]
            if tag is None:
                raise PydanticKnownError("dict_type")
            if not isinstance(tag, str) or tag not in by_tag:
                raise PydanticKnownError(
                    "union_tag_invalid",
                    {
                        "discriminator": self.field,
                        "tag": printable(tag),
                        "expected_tags": ", ".join(by_tag),
                    },
                )
            return _read(by_tag[tag], value)

        return read


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
    _written: ClassVar[Mapping[str, _Write]]

    def __init_subclass__(cls) -> None:
        own = (name for name in get_annotations(cls) if name[0] != "_")
        defaults = {name: cls.__dict__.get(name, _MISSING) for name in own}
        cls._defaults = {**cls._defaults, **defaults}

    def __init__(self, **given: Any) -> None:
        read_as(type(self), given, made=self)

    @classmethod
    def of(cls, given: object) -> Self:
        """Return the record with these values, as JSON has them.

        Raises:
            InvalidRecord: A field is unknown, missing or breaks its rule.
        """
        return cast("Self", read_as(cls, given))

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

    def _agree_(self) -> None:
        """Raise ValueError if the fields, each of which is right, contradict each other."""

    @classmethod
    def fields(cls) -> Iterable[str]:
        """Return the names of its fields."""
        return cls._defaults.keys()

    @classmethod
    def hints(cls) -> dict[str, Any]:
        """Return the annotations of its fields, as types."""
        hints = {k: v for one in cls.__mro__[::-1] for k, v in get_annotations(one).items()}
        if any(isinstance(hints[name], str) for name in cls._defaults):
            # Python forgets an interrupt that ends `get_annotations` when that evaluates a text.
            hints = get_type_hints(cls, include_extras=True)
        return {name: hints[name] for name in cls._defaults}

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
        for name, write in _writers(type(self)).items():
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


# How the value of an annotated type is read

_VALIDATORS: dict[Any, SchemaValidator] = {}


def read_as(hint: Any, value: object, *, made: Record | None = None) -> Any:
    """Return a value as an annotated type of a field, read from parsed JSON; `made` is filled."""
    try:
        return _validator(hint).validate_python(value, self_instance=made)
    except ValidationError as error:
        raise InvalidRecord(error) from error


def _read(kind: type[Record], value: object) -> Any:
    """Do the same for a record within another one: pydantic adds the path to the error."""
    return _validator(kind).validate_python(value)


def _validator(hint: Any) -> SchemaValidator:
    found = _VALIDATORS.get(hint)
    if found is None:
        is_record = isinstance(hint, type) and issubclass(hint, Record)
        schema = _record_schema(hint) if is_record else _schema(hint)
        found = SchemaValidator(cast("CoreSchema", schema))
        _VALIDATORS[hint] = found
    return found


def _record_schema(kind: type[Record]) -> _Schema:
    hints = kind.hints()
    fields = [
        {
            "type": "dataclass-field",
            "name": name,
            "schema": _with_default(_schema(hints[name]), default),
            "kw_only": True,
        }
        for name, default in kind._defaults.items()
    ]
    arguments = {
        "type": "dataclass-args",
        "dataclass_name": kind.__name__,
        "fields": fields,
        "extra_behavior": "forbid",
    }
    made = {"type": "dataclass", "cls": kind, "fields": [*kind._defaults], "schema": arguments}
    if kind._agree_ is Record._agree_:
        return made
    return {"type": "function-after", "function": _calling(_agreeing), "schema": made}


def _agreeing(record: Record) -> Record:
    record._agree_()
    return record


def _with_default(schema: _Schema, default: Any) -> _Schema:
    if default is _MISSING:
        return schema
    made = {"default_factory": dict} if default is _EMPTY else {"default": default}
    return {"type": "default", "schema": schema, **made}


_SIMPLE: Mapping[Any, _Schema] = {
    str: {"type": "str", "strict": True},
    int: {"type": "int", "strict": True},
    bool: {"type": "bool", "strict": True},
    Any: {"type": "any"},
}


def _schema(hint: Any) -> _Schema:
    if hint in _SIMPLE:
        return _SIMPLE[hint]
    if isinstance(hint, type) and issubclass(hint, Record):
        return _read_by(partial(_read, hint))
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _annotated(inner[0], inner[1])
    if origin is Literal:
        return {"type": "literal", "expected": [*inner]}
    if origin is tuple:
        return {"type": "tuple", "items_schema": [_schema(inner[0])], "variadic_item_index": 0}
    if origin is dict:
        keys, values = map(_schema, inner)
        return {"type": "dict", "keys_schema": keys, "values_schema": values, "strict": True}
    if origin in (Union, UnionType):
        some = [_schema(one) for one in inner if one is not NoneType]
        one_of = {"type": "union", "choices": some} if some[1:] else some[0]
        return {"type": "nullable", "schema": one_of}
    raise TypeError(f"no field of a record can be {hint}")


def _annotated(hint: Any, note: Any) -> _Schema:
    if isinstance(note, Spelled):
        return _read_by(note.read)
    if isinstance(note, Tagged):
        return _read_by(note.choice(get_args(hint)))
    return {**_schema(hint), **note.bounds}


def _read_by(function: Callable[[Any], Any]) -> _Schema:
    return {"type": "function-plain", "function": _calling(function)}


def _calling(function: Callable[[Any], Any]) -> _Schema:
    return {"type": "no-info", "function": function}


# How it is written


def _writers(kind: type[Record]) -> Mapping[str, _Write]:
    """Return how each field of a class is written, which is found out at its first use."""
    found: Mapping[str, _Write] | None = kind.__dict__.get("_written")
    if found is None:
        hints = kind.hints()
        found = kind._written = {name: _writing(hints[name]) for name in kind._defaults}
    return found


def _writing(hint: Any) -> _Write:
    if isinstance(hint, type) and issubclass(hint, Record):
        return Record.to_json
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        if isinstance(inner[1], Spelled):
            return inner[1].write
        return Record.to_json if isinstance(inner[1], Tagged) else _writing(inner[0])
    if origin is tuple:
        write = _writing(inner[0])
        return list if write is None else lambda row: list(map(write, row))
    if origin is dict:
        one = _writing(inner[1])
        return dict if one is None else lambda table: {k: one(v) for k, v in table.items()}
    return _writing(inner[0]) if origin in (Union, UnionType) else None
