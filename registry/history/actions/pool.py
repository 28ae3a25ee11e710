"""Actions on the opponent pool. Version numbers only grow, and none is used twice."""

from __future__ import annotations

from typing import Annotated, Literal

from holdfast.registry.values import DigestField, Field, FloatField, Name, PhaseName, Record, Step

_Version = Annotated[int, Field(ge=1)]
_Count = Annotated[int, Field(ge=0)]


class EntryFields(Record):
    """A model in the pool.

    Attributes:
        manifest: Id of the inference-only state.
        checkpoint: Commit number of the checkpoint that it was made from.
        gate: Gate that it was made from.
        phase: Phase of its source.
        step: Step of its source.
        mu: Rating: estimated skill.
        sigma: Rating: uncertainty.
        frozen: Whether it is never evicted and never rated again.
    """

    manifest: DigestField
    checkpoint: int | None = None
    gate: Name | None = None
    phase: PhaseName
    step: Step
    mu: FloatField
    sigma: FloatField
    frozen: bool = False


class Promote(EntryFields):
    """Add a model to the pool.

    Attributes:
        version: Its number.
    """

    action: Literal["pool.promote"] = "pool.promote"
    version: _Version


class Rated(Record):
    """The rating of one entry after a match."""

    version: _Version  # the entry
    mu: FloatField  # its rating afterwards
    sigma: FloatField  # its uncertainty afterwards
    games: _Count  # games that it played in this match
    wins: _Count  # games that it won


class RateMatch(Record):
    """Record a match.

    Attributes:
        match: Its id; a match that is recorded already changes nothing.
        ratings: The new rating of each entry that took part.
    """

    action: Literal["pool.rate"] = "pool.rate"
    match: Annotated[str, Field(min_length=1, max_length=128)]
    ratings: Annotated[tuple[Rated, ...], Field(min_length=1)]


class EvictEntries(Record):
    """Evict entries. Their ratings and their history stay in the log.

    Attributes:
        versions: The entries.
        reason: Why.
    """

    action: Literal["pool.evict"] = "pool.evict"
    versions: Annotated[tuple[_Version, ...], Field(min_length=1)]
    reason: str
