"""Streams: append-only histories that belong to a run, such as losses.

- `stream`: `Stream`, as users hold it; `segments`: runs of entries, each stored as a state.
- `appends`: which short segments a new one replaces, and the action of the commit.
- `pictures`: texts and pictures among the values of a step, and which bytes are a picture.

The format of a segment does not change. A save appends to streams in its checkpoint's own slot.
Specified in docs/spec.md, section 26.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.registry.values.first_use import at_first_use

if TYPE_CHECKING:
    from holdfast.registry.curation.streams.appends import (
        PlannedAppend,
        plan_append,
        read_segments,
        stream_lifetime,
    )
    from holdfast.registry.curation.streams.pictures import kind_of, split_samples
    from holdfast.registry.curation.streams.segments import check_entries
    from holdfast.registry.curation.streams.stream import (
        LOG,
        SAMPLES,
        AppendAttempt,
        Stream,
        Streams,
        each_step_once,
    )
else:
    __getattr__ = at_first_use(__name__)
