"""Actions on streams, the append-only histories of a run."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from holdfast.registry.values.records import DigestField, Name, Record, Step

Lifetime = Literal["forever", "resettable"]


class AppendStream(Record):
    """Append a segment.

    Attributes:
        stream: Name of the stream.
        lifetime: `forever` or `resettable`; fixed by the first append.
        manifest: Id of the segment, a state.
        start: Position in the stream of the segment's first entry. Behind the end is an error;
            before it, the segment replaces what stood from there on with the same entries, merged
            with new ones.
        count: Entries in the segment.
        first_step: Least step in the segment.
        last_step: Greatest step in the segment.
    """

    action: Literal["stream.append"] = "stream.append"
    stream: Name
    lifetime: Lifetime
    manifest: DigestField
    start: Annotated[int, Field(ge=0)]
    count: Annotated[int, Field(ge=1)]
    first_step: Step
    last_step: Step


class ArchiveStream(Record):
    """Put what a resettable stream holds aside under a label, and begin it anew."""

    action: Literal["stream.archive"] = "stream.archive"
    stream: Name
    label: Name
