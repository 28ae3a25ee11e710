"""What every record on the store shares: frozen, closed, canonical.

Owns the base class and the field types that JSON lacks: digests and floats with all their bits.
"""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
)

from registry import canonical
from registry.digest import Digest
from registry.errors import Malformed


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
#: A value encoded by `registry.pytree` without arrays.
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


def _first(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    detail = error.errors(include_url=False, include_context=False)[0]
    place = ".".join(str(part) for part in detail["loc"]) or "the record"
    return f"{place}: {detail['msg']}"
