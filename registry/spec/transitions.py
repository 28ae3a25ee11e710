"""Phase transitions as data: what is checked, and what becomes of each part of the state."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from registry.records import Name, NumberField, PhaseName, Record

#: What becomes of a part: taken along as it is; left to the caller to make new; copied under
#: another name and never trained again; seeded from the new phase's seeds; dropped.
Change = Literal["carry", "reset", "freeze", "reseed", "discard"]


class Row(Record):
    """One row of a transition's table.

    Attributes:
        part: Top-level key of the state, or a path in it (`model_record/head.value.*`; `*` matches
            anything). `a | b` names alternatives, the first that exists counts.
        change: What becomes of it.
        to: For `carry` and `freeze`: the name of the copy in the new state.
        companion: For `freeze`: the copy is stored as this companion of every later checkpoint.
        dtype: For `freeze`: floating-point tensors of the copy are cast to this.
        when: Only when the caller enables this condition.
        unless: Only when the caller does not enable it.
        why: Where the rule comes from.
    """

    part: str
    change: Change
    to: str | None = None
    companion: Name | None = None
    dtype: str | None = None
    when: str | None = None
    unless: str | None = None
    why: str = ""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.change == "freeze" and (self.to is None) == (self.companion is None):
            raise ValueError("a frozen copy needs either `to` or `companion`")
        if self.change != "freeze" and (self.companion or self.dtype):
            raise ValueError("`companion` and `dtype` belong to `freeze`")
        if self.change not in ("carry", "freeze") and self.to:
            raise ValueError("`to` belongs to `carry` and `freeze`")
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
        source: Ref within the run of the checkpoint that is loaded: `gates/bc_best`.
        strict: Parts whose paths, shapes and dtypes must be exactly the caller's target's.
        zero: Patterns of paths; every tensor and number they match must be zero, and one must.
        ready: Metrics that are checked, of the source or given by the caller.
        rows: What becomes of each part; a top-level key that no row names is an error.
        anchors: Gates that enter the opponent pool as frozen entries.
        archives: Resettable streams that are archived.
    """

    from_phase: PhaseName
    to_phase: PhaseName
    source: str
    strict: tuple[str, ...] = ()
    zero: tuple[str, ...] = ()
    ready: tuple[Readiness, ...] = ()
    rows: Annotated[tuple[Row, ...], Field(min_length=1)]
    anchors: tuple[Name, ...] = ()
    archives: tuple[Name, ...] = ()
