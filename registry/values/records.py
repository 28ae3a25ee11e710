"""What every record on the store shares: frozen, closed, canonical.

Owns the base class and the field types that JSON lacks: digests and floats with all their bits.
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


#: The same; a whole number is taken as well, as people write it in a preset.
NumberField = Annotated[
    float, BeforeValidator(_number), PlainSerializer(canonical.float_to_hex, when_used="json")
]
#: A number of a training step, PPO update or epoch; any counter that a run saves by.
Step = Annotated[int, Field(ge=0, le=2**53)]
#: What may stand as a segment of a ref.
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
        """Return the JSON value that stands on the store; absent optional fields are left out."""
        return self.model_dump(mode="json", exclude_none=True)

    def encode(self) -> bytes:
        """Return the canonical bytes."""
        return canonical.encode(self.to_json())

    def shared(self, of: type[Record]) -> dict[str, Any]:
        """Return the fields that it has from a class that it extends, to make another record."""
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
    """A record that users make by hand, whose `__init__` names every field.

    Pydantic passes parsed fields to that `__init__`, so they are checked before: foreign bytes must
    not raise Python's TypeError.
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
    """Annotates a record, or a union of them, whose validators are built when one is met.

    Those of a record are otherwise built with the record in which it stands: a log that holds three
    kinds of actions would wait for twenty. The rules are the same.

    Attributes:
        tag: Name of the field that tells the kinds of a union apart.
    """

    tag: str = ""

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        """Return a schema that does not yet hold those of the records."""
        kinds: tuple[type[Record], ...] = get_args(source) or (source,)
        by_tag = {kind.model_fields[self.tag].default: kind for kind in kinds if self.tag}

        def check(value: Any, info: ValidationInfo) -> Record:
            if isinstance(value, kinds):
                return value
            kind = _tagged(by_tag, self.tag, value) if self.tag else kinds[0]
            if info.mode == "json":
                # Back into JSON: a strict record takes a list for a tuple from there alone.
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
