"""Actions on the opponent pool. Versions only grow; none is given twice."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from holdfast.registry.values.records import DigestField, FloatField, Name, PhaseName, Record, Step

_Version = Annotated[int, Field(ge=1)]
_Count = Annotated[int, Field(ge=0)]


class EntryFields(Record):
    """A model in the pool.

    Attributes:
        manifest: Id of the inference-only state.
        checkpoint: Commit number of the checkpoint that it was cut from.
        gate: Gate that it was cut from.
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
    """Let a model into the pool.

    Attributes:
        version: Its number.
    """

    action: Literal["pool.promote"] = "pool.promote"
    version: _Version


class Rated(Record):
    """What a match made of one entry.

    Attributes:
        version: The entry.
        mu: Its rating afterwards.
        sigma: Its uncertainty afterwards.
        games: Games that it played in this match.
        wins: Games that it won.
    """

    version: _Version
    mu: FloatField
    sigma: FloatField
    games: _Count
    wins: _Count


class RateMatch(Record):
    """Record a match.

    Attributes:
        match: Its identity: recorded again, it changes nothing.
        ratings: What it made of each entry that took part.
    """

    action: Literal["pool.rate"] = "pool.rate"
    match: Annotated[str, Field(min_length=1, max_length=128)]
    ratings: Annotated[tuple[Rated, ...], Field(min_length=1)]


class EvictEntries(Record):
    """Let entries go. Their ratings and their history stay in the log.

    Attributes:
        versions: Which.
        reason: Why.
    """

    action: Literal["pool.evict"] = "pool.evict"
    versions: Annotated[tuple[_Version, ...], Field(min_length=1)]
    reason: str
