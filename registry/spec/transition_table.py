"""Phase transitions as data: the checks before them, and the change of each part of the state.

`holdfast.registry.deriving.transitions` executes them.
"""

from typing import Annotated, Literal

from holdfast.registry.values import ITEM_SIZES, Field, Name, NumberField, PhaseName, Record, empty

#: The change of a part. `carry`: keep it as it is. `reset`: the caller makes a new one. `freeze`:
#: copy it under another name, never train the copy. `reseed`: make it from the new phase's seeds.
#: `discard`: drop it.
Change = Literal["carry", "reset", "freeze", "reseed", "discard"]


class Row(Record):
    """One row of a transition's table.

    A part without a slash is a whole top-level key of the source. A part with a slash is a pattern
    of the paths below a key (`model_record/head.value.*`; `*` matches anything, slashes included).
    `a | b` names alternatives; the first one that exists counts. `carry` and `freeze` copy from the
    source. `reset` and `discard` of a pattern remove parts of the new state, also from copies:
    `teacher/stem*` refers to the teacher that another row makes. The order of rows does not matter.
    """

    part: Annotated[str, Field(min_length=1)]  # the key or the pattern
    change: Change  # the change of that part
    to: str | None = None  # for `carry` and `freeze`: its key in the new state
    #: For `freeze`: store the copy as this companion of every later checkpoint.
    companion: Name | None = None
    dtype: str | None = None  # for `freeze`: cast floating-point tensors of the copy to this type
    #: For `reseed`: the name of each seeded component and the number of its child of the new
    #: phase's seed sequence; if empty, that sequence itself is used.
    seeds: dict[str, Annotated[int, Field(ge=0, le=2**32 - 1)]] = empty()
    when: str | None = None  # the row applies only if the caller enables this condition
    unless: str | None = None  # the row applies only if the caller does not enable this condition
    why: str = ""  # the source of the rule

    @property
    def alternatives(self) -> tuple[str, ...]:
        """The names or patterns of the part; the first one that exists counts."""
        return tuple(one.strip() for one in self.part.split("|"))

    @property
    def is_pattern(self) -> bool:
        """Whether the part is a pattern of paths below a key, not a whole key."""
        return "/" in self.part

    def _agree_(self) -> None:
        if any(("/" in one) != self.is_pattern for one in self.alternatives):
            raise ValueError("alternatives must be all keys, or all patterns of paths below keys")
        if any(set("*?[") & set(one.split("/")[0]) for one in self.alternatives):
            raise ValueError("a key must be written out; `*` is allowed only after a slash")
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
            raise ValueError("`reseed` needs a whole key")
        if self.when is not None and self.when == self.unless:
            raise ValueError(f"it would never apply: `when` and `unless` are both {self.when}")


class Readiness(Record):
    """A metric that must reach a bound before a phase may end."""

    metric: str
    at_least: NumberField | None = None  # the lowest allowed value
    at_most: NumberField | None = None  # the highest allowed value
    when: str | None = None  # it is checked only if the caller enables this condition

    def _agree_(self) -> None:
        if (self.at_least, self.at_most) == (None, None):
            raise ValueError("needs at_least or at_most")


class Pivot(Record):
    """The changes at a pivot: training stays in its phase, under a new policy."""

    #: The change of parts of the newest checkpoint; a key without a row is carried.
    rows: tuple[Row, ...] = ()
    #: Resettable streams to archive; all of them without this field.
    archives: tuple[Name, ...] | None = None

    def _agree_(self) -> None:
        for row in self.rows:
            if row.companion:
                raise ValueError(f"row {row.part}: a pivot has no companions of its own")
            if row.when or row.unless:
                raise ValueError(f"row {row.part}: a pivot has no conditions")
            if row.change == "reseed" and not row.seeds:
                raise ValueError(f"row {row.part}: `reseed` at a pivot needs `seeds`")


class Transition(Record):
    """A transition from one phase to the next."""

    from_phase: PhaseName  # the phase that ends
    to_phase: PhaseName  # the phase that begins
    #: The checkpoint to load as a whole, without a fallback: `gates/NAME`, or `latest` or `best` of
    #: the phase that ends.
    source: Annotated[str, Field(pattern=r"^(gates/[A-Za-z0-9][A-Za-z0-9._-]{0,63}|latest|best)$")]
    #: Keys whose paths, shapes and dtypes must be exactly those of the caller's target.
    strict: tuple[str, ...] = ()
    #: Patterns of paths; each must match some tensor or number, and all matches must be zero.
    zero: tuple[str, ...] = ()
    ready: tuple[Readiness, ...] = ()  # metrics to check, from the source or from the caller
    #: The change of each part. Some row must name each top-level key of the source as a whole.
    rows: Annotated[tuple[Row, ...], Field(min_length=1)]
    anchors: tuple[Name, ...] = ()  # gates that enter the opponent pool as frozen entries
    archives: tuple[Name, ...] = ()  # resettable streams to archive

    @property
    def conditions(self) -> frozenset[str]:
        """The conditions that the caller may enable."""
        return frozenset(
            name
            for name in (
                *(name for row in self.rows for name in (row.when, row.unless)),
                *(one.when for one in self.ready),
            )
            if name is not None
        )
