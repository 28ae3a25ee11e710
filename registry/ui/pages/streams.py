"""The streams of runs as charts, texts and pictures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

from holdfast.registry.curation.streams import LOG, SAMPLES, each_step_once, read_segments
from holdfast.registry.errors import BeyondLimit, IntegrityError
from holdfast.registry.face import Run
from holdfast.registry.history import MAX_STEP
from holdfast.registry.history.replay import Segment, StreamRecord
from holdfast.registry.plots import numbers_by_key
from holdfast.registry.ui.charts import Chart, Curve, Point, curves, thinned
from holdfast.registry.ui.pages.view import Trouble, tried, trouble_of
from holdfast.registry.ui.samples import Pictures, Sample, samples_of
from holdfast.registry.ui.source import Source

#: Segments that are read unless the user asks for more; each costs two or three requests.
SEGMENTS_UNASKED = 16
#: Maximum bytes of each of them: pictures can be large.
SEGMENT_UNASKED_BYTES = 32 * 2**20
#: Segments of logged texts and pictures that are read unless the user asks for all of them.
_NEWEST = 3
#: Maximum number of fields with a chart.
_MOST_FIELDS = 6
#: Maximum number of points of a run in one chart of several runs.
_MOST_POINTS = 500


@dataclass(frozen=True, slots=True)
class StreamShown:
    """A stream."""

    record: StreamRecord
    is_read: bool = False  # whether it was read
    charts: tuple[Chart, ...] = ()  # a chart for each field of numbers
    samples: tuple[Sample, ...] = ()  # its newest texts and pictures, the newest first
    trouble: Trouble | None = None  # why it could not be read


def read_streams(run: Run, wanted: Sequence[str], pictures: Pictures) -> Iterator[StreamShown]:
    """Yield the streams of a run; only small and wanted streams are read."""
    left = SEGMENTS_UNASKED
    for record in run.manifest.streams:
        is_wanted = record.name in wanted
        segments = record.segments
        if record.name == SAMPLES and not is_wanted:
            segments = segments[-_NEWEST:]
        if is_wanted or len(segments) <= left:
            left -= len(segments)
            most = None if is_wanted else SEGMENT_UNASKED_BYTES
            yield _read(run, record, segments, pictures, most)
        else:
            yield StreamShown(record)


def _read(
    run: Run,
    record: StreamRecord,
    segments: Sequence[Segment],
    pictures: Pictures,
    most_bytes: int | None,
) -> StreamShown:
    try:
        entries = _entries(run, record.name, segments, most_bytes)
    except BeyondLimit as error:
        return StreamShown(record, trouble=None if most_bytes else trouble_of(error))
    except IntegrityError as error:
        return StreamShown(record, trouble=trouble_of(error))
    charts = tuple(_stream_charts(record.name, entries))
    samples = tuple(samples_of(entries, pictures))
    is_read = len(segments) == len(record.segments)
    return StreamShown(record, is_read, charts, samples)


def _entries(
    run: Run, name: str, segments: Sequence[Segment], most_bytes: int | None
) -> Sequence[Mapping[str, Any]]:
    writer = run.handle.committer.writer
    entries = read_segments(writer, name, segments, 0, MAX_STEP, most_bytes=most_bytes)
    return each_step_once(entries) if name in (LOG, SAMPLES) else entries


def logged_curves(
    source: Source, runs: Sequence[Run], wanted: Sequence[str], troubles: list[Trouble]
) -> dict[str, list[Curve]]:
    """Return a curve of each run for each field of numbers of some streams, by title.

    Of each run and stream the newest `SEGMENTS_UNASKED` segments are read, several runs at once.
    """
    most_bytes = SEGMENT_UNASKED_BYTES
    readings = [
        (run.id, one.name, source.begin(partial(_entries, run, one.name, some, most_bytes)))
        for run in runs
        for one in run.manifest.streams
        if one.name in wanted and (some := one.segments[-SEGMENTS_UNASKED:])
    ]
    found: dict[str, list[Curve]] = {}
    for run_id, name, reading in readings:
        entries = tried(reading.result, troubles) or ()
        for key, numbers in numbers_by_key(entries).items():
            points = thinned([Point(step, None, value) for step, value in numbers], _MOST_POINTS)
            found.setdefault(f"{name}: {key}", []).append(
                Curve(run_id, tuple(points), group=run_id)
            )
    return found


def _stream_charts(name: str, entries: Sequence[Mapping[str, Any]]) -> Iterator[Chart]:
    for field, numbers in islice(numbers_by_key(entries).items(), _MOST_FIELDS):
        points = tuple(Point(step, None, value) for step, value in numbers)
        yield curves(f"{name}: {field}" if field != name else name, [Curve(field, points)])
