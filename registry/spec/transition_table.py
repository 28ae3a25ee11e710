"""Phase transitions as data: what is checked, and what becomes of each part of the state.

`holdfast.registry.transitions` carries them out.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from holdfast.registry.values.dtypes import ITEM_SIZES
from holdfast.registry.values.records import Name, NumberField, PhaseName, Record

#: What becomes of a part: taken along as it is; left to the caller to make new; copied under
#: another name and never trained again; seeded from the new phase's seeds; dropped.
Change = Literal["carry", "reset", "freeze", "reseed", "discard"]


class Row(Record):
    """One row of a transition's table.

    A part without a slash is a top-level key of the source as a whole. One with a slash is a
    pattern of the paths below a key (`model_record/head.value.*`; `*` matches anything, slashes
    included). `a | b` names alternatives, the first that exists counts. `carry` and `freeze` take
    from the source; `reset` and `discard` of a pattern take out of what they gave, copies included:
    `teacher/stem*` is about the teacher that another row makes. The order of rows does not matter.

    Attributes:
        part: What it is about.
        change: What becomes of it.
        to: For `carry` and `freeze`: its key in the new state.
        companion: For `freeze`: the copy is stored as this companion of every later checkpoint.
        dtype: For `freeze`: floating-point tensors of the copy are cast to this.
        seeds: For `reseed`: children of the new phase's seed sequence by the names of what they
            seed; without any, the phase's sequence itself.
        when: Only when the caller enables this condition.
        unless: Only when the caller does not enable it.
        why: Where the rule comes from.
    """

    part: Annotated[str, Field(min_length=1)]
    change: Change
    to: str | None = None
    companion: Name | None = None
    dtype: str | None = None
    seeds: dict[str, Annotated[int, Field(ge=0, lt=2**32)]] = Field(default={})
    when: str | None = None
    unless: str | None = None
    why: str = ""

    @property
    def alternatives(self) -> tuple[str, ...]:
        """The names or patterns of the part, the first that exists counts."""
        return tuple(one.strip() for one in self.part.split("|"))

    @property
    def is_pattern(self) -> bool:
        """Whether it is about paths below a key, not about a key as a whole."""
        return "/" in self.part

    @model_validator(mode="after")
    def _part_is_of_one_kind(self) -> Self:
        if any(("/" in one) != self.is_pattern for one in self.alternatives):
            raise ValueError("alternatives are all keys, or all patterns of paths below keys")
        if any(set("*?[") & set(one.split("/")[0]) for one in self.alternatives):
            raise ValueError("a key is written out; `*` stands behind a slash")
        return self

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.change == "freeze" and (self.to is None) == (self.companion is None):
            raise ValueError("a frozen copy needs either `to` or `companion`")
        if self.change != "freeze" and (self.companion or self.dtype):
            raise ValueError("`companion` and `dtype` belong to `freeze`")
        if self.dtype is not None and self.dtype not in ITEM_SIZES:
            raise ValueError(f"unknown dtype {self.dtype!r}; known are {', '.join(ITEM_SIZES)}")
        if self.change not in ("carry", "freeze") and self.to:
            raise ValueError("`to` belongs to `carry` and `freeze`")
        if self.change != "reseed" and self.seeds:
            raise ValueError("`seeds` belongs to `reseed`")
        if self.change == "reseed" and self.is_pattern:
            raise ValueError("`reseed` is of a key as a whole")
        if self.when is not None and self.when == self.unless:
            raise ValueError(f"never: `when` and `unless` are both {self.when}")
        return self


class Readiness(Record):
    """A metric that must have got somewhere before a phase may end.

    Attributes:
        metric: Its name.
        at_least: Least value, inclusive.
        at_most: Greatest value, inclusive.
    """

    metric: str
    at_least: NumberField | None = None
    at_most: NumberField | None = None

    @model_validator(mode="after")
    def _bounds(self) -> Self:
        if (self.at_least, self.at_most) == (None, None):
            raise ValueError("needs at_least or at_most")
        return self


class Transition(Record):
    """The way from one phase to the next.

    Attributes:
        from_phase: The phase that ends.
        to_phase: The phase that begins.
        source: The checkpoint that is loaded, whole and without falling back: `gates/NAME`, or
            `latest` or `best` of the phase that ends.
        strict: Keys whose paths, shapes and dtypes must be exactly those of the caller's target.
        zero: Patterns of paths; every tensor and number that one matches must be zero, and there
            must be one.
        ready: Metrics that are checked, of the source or given by the caller.
        rows: What becomes of each part; a top-level key of the source that no row names as a whole
            is an error.
        anchors: Gates that enter the opponent pool as frozen entries.
        archives: Resettable streams that are archived.
    """

    from_phase: PhaseName
    to_phase: PhaseName
    source: Annotated[str, Field(pattern=r"^(gates/[A-Za-z0-9][A-Za-z0-9._-]{0,63}|latest|best)$")]
    strict: tuple[str, ...] = ()
    zero: tuple[str, ...] = ()
    ready: tuple[Readiness, ...] = ()
    rows: Annotated[tuple[Row, ...], Field(min_length=1)]
    anchors: tuple[Name, ...] = ()
    archives: tuple[Name, ...] = ()

    @property
    def conditions(self) -> frozenset[str]:
        """The conditions that the caller may enable."""
        return frozenset(
            name for row in self.rows for name in (row.when, row.unless) if name is not None
        )
