"""The streams of a run: how long they are, and the numbers in those that are read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from holdfast.registry.errors import IntegrityError
from holdfast.registry.history.replay import StreamRecord
from holdfast.registry.plots.curves import numbers_by_key
from holdfast.registry.runs.run import Run
from holdfast.registry.ui.charts import Chart, Curve, Point, curves
from holdfast.registry.ui.queries.trouble import Trouble, trouble_of

#: Segments that are read without being asked to; each costs two or three requests.
SEGMENTS_UNASKED = 16
#: Fields of which a chart is drawn.
_MOST_FIELDS = 6


@dataclass(frozen=True, slots=True)
class StreamShown:
    """A stream.

    Attributes:
        name: Its name.
        lifetime: `forever` or `resettable`.
        count: Entries that it holds.
        archives: Number of its archives.
        segments: Segments that reading it fetches.
        is_read: Whether it was read.
        charts: A chart for each field of numbers.
        trouble: Why it could not be read.
    """

    name: str
    lifetime: str
    count: int
    archives: int
    segments: int
    is_read: bool
    charts: tuple[Chart, ...] = ()
    trouble: Trouble | None = None


def read_streams(run: Run, wanted: Sequence[str]) -> Iterator[StreamShown]:
    """Yield the streams of a run; the small ones and those that are wanted are read."""
    left = SEGMENTS_UNASKED
    for record in run.manifest.streams:
        segments = len(record.segments)
        if record.name in wanted or segments <= left:
            left -= segments
            yield _read(run, record)
        else:
            yield _shown(record)


def _shown(
    record: StreamRecord,
    *,
    is_read: bool = False,
    charts: tuple[Chart, ...] = (),
    trouble: Trouble | None = None,
) -> StreamShown:
    return StreamShown(
        record.name,
        record.lifetime,
        record.count,
        len(record.archives),
        len(record.segments),
        is_read,
        charts,
        trouble,
    )


def _read(run: Run, record: StreamRecord) -> StreamShown:
    try:
        entries = run.stream(record.name).read()
    except IntegrityError as error:
        return _shown(record, trouble=trouble_of(error))
    return _shown(record, is_read=True, charts=tuple(_charts(record.name, entries)))


def _charts(name: str, entries: Sequence[Mapping[str, Any]]) -> Iterator[Chart]:
    for field, numbers in islice(numbers_by_key(entries).items(), _MOST_FIELDS):
        points = tuple(Point(step, None, value) for step, value in numbers)
        yield curves(f"{name}: {field}" if field != name else name, [Curve(field, points)])
