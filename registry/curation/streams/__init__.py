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
    from holdfast.registry.curation.streams.appends import PlannedAppend as PlannedAppend
    from holdfast.registry.curation.streams.appends import plan_append as plan_append
    from holdfast.registry.curation.streams.appends import read_segments as read_segments
    from holdfast.registry.curation.streams.appends import stream_lifetime as stream_lifetime
    from holdfast.registry.curation.streams.pictures import kind_of as kind_of
    from holdfast.registry.curation.streams.pictures import split_samples as split_samples
    from holdfast.registry.curation.streams.segments import check_entries as check_entries
    from holdfast.registry.curation.streams.stream import LOG as LOG
    from holdfast.registry.curation.streams.stream import SAMPLES as SAMPLES
    from holdfast.registry.curation.streams.stream import AppendAttempt as AppendAttempt
    from holdfast.registry.curation.streams.stream import Stream as Stream
    from holdfast.registry.curation.streams.stream import Streams as Streams
    from holdfast.registry.curation.streams.stream import each_step_once as each_step_once
else:
    __getattr__ = at_first_use(__name__)
