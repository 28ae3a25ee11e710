"""The base class of every record on the store: frozen, closed, canonical.

Also the field types that JSON lacks: digests, and floats with all their bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Self, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    PlainSerializer,
    SerializationInfo,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic.functional_validators import ModelWrapValidatorHandler
from pydantic_core import CoreSchema, InitErrorDetails, PydanticKnownError, core_schema, to_json

from holdfast.backends.escape import printable
from holdfast.registry.errors import Malformed
from holdfast.registry.values import canonical
from holdfast.registry.values.digest import Digest


def _digest(value: object) -> object:
    return Digest.from_hex(value) if isinstance(value, str) else value


def _float(value: object) -> object:
    if isinstance(value, str):
        return canonical.float_from_hex(value)
    if not isinstance(value, float):
        raise ValueError("a double is 16 hexadecimal digits")
    return value


#: A digest; 64 hexadecimal digits in JSON.
DigestField = Annotated[
    Digest, BeforeValidator(_digest), PlainSerializer(lambda digest: digest.hex(), when_used="json")
]
#: A double; the 16 hexadecimal digits of its bits in JSON.
FloatField = Annotated[
    float, BeforeValidator(_float), PlainSerializer(canonical.float_to_hex, when_used="json")
]


def _number(value: object) -> object:
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else _float(value)


#: A `FloatField` that also accepts a whole number, since people write those in a preset.
NumberField = Annotated[
    float, BeforeValidator(_number), PlainSerializer(canonical.float_to_hex, when_used="json")
]
#: The counter that a run saves by: a training step, a PPO update or an epoch.
Step = Annotated[int, Field(ge=0, le=2**53)]
#: A segment of a ref.
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
PhaseName = Name
Metrics = dict[str, FloatField]
#: A value encoded by `holdfast.registry.pytree` without arrays.
Plain = Any


class Record(BaseModel):
    """A frozen value with one canonical byte string. Unknown fields are refused."""

    # Validators are built at first use: importing the package must stay light.
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        arbitrary_types_allowed=True,
        defer_build=True,
    )

    def to_json(self) -> dict[str, Any]:
        """Return the JSON value as stored; absent optional fields are left out."""
        return self.model_dump(mode="json", exclude_none=True)

    def encode(self) -> bytes:
        """Return the canonical bytes."""
        return canonical.encode(self.to_json())

    def shared(self, of: type[Record]) -> dict[str, Any]:
        """Return the fields of the base class `of`, to make another record from them."""
        return {name: getattr(self, name) for name in of.model_fields}

    @classmethod
    def decode(cls, line: bytes, *, where: str) -> Self:
        """Parse canonical bytes.

        Raises:
            Malformed: They are not canonical JSON, or not a record of this class.
        """
        canonical.decode(line, where=where)
        return cls.parse(line, where=where)

    @classmethod
    def parse(cls, line: bytes, *, where: str) -> Self:
        """Parse bytes that are known to be canonical.

        Raises:
            Malformed: They are not a record of this class.
        """
        try:
            return cls.model_validate_json(line)
        except (ValidationError, ValueError) as error:
            raise Malformed(
                f"not a {cls.__name__.lower()} of this format", where=where, found=_first(error)
            ) from error


class NamedFields(Record):
    """A record that users make by hand: its `__init__` names every field.

    Pydantic passes parsed fields to that `__init__`. They are checked first, because foreign bytes
    must raise our errors and not Python's TypeError.
    """

    @model_validator(mode="wrap")
    @classmethod
    def _has_these_fields(cls, given: Any, make: ModelWrapValidatorHandler[Self]) -> Self:
        if isinstance(given, dict):
            fields = cls.model_fields
            wrong: list[InitErrorDetails] = [
                {"type": "extra_forbidden", "loc": (name,), "input": given[name]}
                for name in given
                if name not in fields
            ]
            wrong += [
                {"type": "missing", "loc": (name,), "input": given}
                for name, field in fields.items()
                if field.is_required() and name not in given
            ]
            if wrong:
                raise ValidationError.from_exception_data(cls.__name__, wrong)
        return make(given)


@dataclass(frozen=True)
class AtFirstUse:
    """Annotate a field so that the validators of its records are built at their first use.

    Pydantic builds them with the record that has the field: reading a log of three kinds of actions
    would build the validators of all twenty. The rules do not change.
    """

    tag: str = ""  # name of the field that distinguishes the records of a union

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Return a schema without the schemas of the records."""
        kinds: tuple[type[Record], ...] = get_args(source) or (source,)
        by_tag = {kind.model_fields[self.tag].default: kind for kind in kinds if self.tag}

        def check(value: Any, info: ValidationInfo) -> Record:
            if isinstance(value, kinds):
                return value
            kind = _tagged(by_tag, self.tag, value) if self.tag else kinds[0]
            if info.mode == "json":
                # Encoded again: a strict record accepts a list for a tuple only from JSON.
                return kind.model_validate_json(to_json(value))
            return kind.model_validate(value)

        return core_schema.with_info_plain_validator_function(
            check,
            serialization=core_schema.plain_serializer_function_ser_schema(_dump, info_arg=True),
        )


def _tagged(kinds: Mapping[object, type[Record]], field: str, value: object) -> type[Record]:
    if not isinstance(value, dict):
        raise ValueError("not an object")
    if field not in value:
        raise PydanticKnownError("union_tag_not_found", {"discriminator": field})
    tag = value[field]
    if not isinstance(tag, str) or tag not in kinds:
        raise PydanticKnownError(
            "union_tag_invalid",
            {
                "discriminator": field,
                "tag": printable(tag),
                "expected_tags": ", ".join(map(str, kinds)),
            },
        )
    return kinds[tag]


def _dump(record: Record, info: SerializationInfo) -> dict[str, Any]:
    return record.model_dump(mode=info.mode, exclude_none=info.exclude_none)


def _first(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    detail = error.errors(include_url=False, include_context=False)[0]
    place = ".".join(str(part) for part in detail["loc"]) or "the record"
    return f"{place}: {detail['msg']}"
