"""Actions on the opponent pool. Version numbers only grow, and none is used twice."""

from typing import Annotated, Literal

from holdfast.registry.values import DigestField, Field, FloatField, Name, PhaseName, Record, Step

_Version = Annotated[int, Field(ge=1)]
_Count = Annotated[int, Field(ge=0)]


class EntryFields(Record):
    """A model in the pool."""

    manifest: DigestField  # id of the inference-only state
    checkpoint: int | None = None  # commit number of the checkpoint that it was made from
    gate: Name | None = None  # gate that it was made from
    phase: PhaseName  # phase of its source
    step: Step  # step of its source
    mu: FloatField  # rating: estimated skill
    sigma: FloatField  # rating: uncertainty
    frozen: bool = False  # whether it is never evicted and never rated again


class Promote(EntryFields):
    """Add a model to the pool."""

    action: Literal["pool.promote"] = "pool.promote"
    version: _Version  # its number
    #: When another program promoted it, in milliseconds since 1970; that of the commit without it.
    promoted_ms: int | None = None


class Rated(Record):
    """The rating of one entry after a match."""

    version: _Version  # the entry
    mu: FloatField  # its rating afterwards
    sigma: FloatField  # its uncertainty afterwards
    games: _Count  # games that it played in this match
    wins: _Count  # games that it won


class RateMatch(Record):
    """Record a match."""

    action: Literal["pool.rate"] = "pool.rate"
    #: Its id; a match that is recorded already changes nothing.
    match: Annotated[str, Field(min_length=1, max_length=128)]
    #: The new rating of each entry that took part.
    ratings: Annotated[tuple[Rated, ...], Field(min_length=1)]


class EvictEntries(Record):
    """Evict entries. Their ratings and their history stay in the log."""

    action: Literal["pool.evict"] = "pool.evict"
    versions: Annotated[tuple[_Version, ...], Field(min_length=1)]  # the entries
    reason: str  # why
