"""Start a training run in one of three modes: `fresh`, `warm_start` or `resume`.

The modes are one table of changes, with the rows of transitions: `fresh` carries nothing, `resume`
everything, and `warm_start` what the preset's rows say. What a program expects of a checkpoint is
compared before anything is loaded.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from holdfast.backends.escape import printable, quoted
from holdfast.registry.curation.streams import read_segments
from holdfast.registry.deriving.transitions.execution import phase_seeds, recorded
from holdfast.registry.deriving.transitions.rows import Applied, Initialise, Table
from holdfast.registry.errors import Conflict, IncompatibleState, InvalidInput
from holdfast.registry.history import MAX_STEP, decode_plain, plain_digest, plain_values
from holdfast.registry.history.actions import Action, EnterPhase
from holdfast.registry.history.replay import RunManifest
from holdfast.registry.loading import Checkpoint, Stored, load_to_train
from holdfast.registry.saving import Attempt, RunHandle
from holdfast.registry.spec import Row, RunSpec, first_of
from holdfast.registry.values import require_first_rank
from holdfast.registry.writing import NewCommit

if TYPE_CHECKING:
    from numpy.random import SeedSequence

Mode = Literal["fresh", "warm_start", "resume"]
MODES: tuple[Mode, ...] = ("fresh", "warm_start", "resume")


@dataclass(frozen=True, slots=True)
class Started:
    """The state and seeds at the start of a training run.

    Attributes:
        mode: `fresh`, `warm_start` or `resume`.
        state: The carried parts and those that `initialise` made; empty when fresh.
        source: The state that it starts from; `None` when fresh.
        seeds: The seeds of reseeded parts, by name; empty at a resume.
        report: Every row that was applied; empty when fresh and at a resume, which carries all.
        skipped: Newer checkpoints that a resume passed over, newest first.
        stale: Names in the state whose source is gone; see `Run.restore`.
    """

    mode: Mode
    state: dict[str, Any]
    source: Stored | None
    seeds: dict[str, SeedSequence]
    report: tuple[Applied, ...] = ()
    skipped: tuple[Attempt, ...] = ()
    stale: tuple[str, ...] = ()


def start_fresh(handle: RunHandle) -> Started:
    """Start from nothing: the seeds alone; see `RunPhases.start`."""
    run = handle.training.refresh()
    check_unbegun(run, "fresh")
    rows = [row for row in run.spec.warm_start or () if row.change == "reseed"]
    seeds = phase_seeds(run, run.present_phase, Table(rows, (), {}).reseeded)
    return Started("fresh", {}, None, seeds)


def start_warm(
    handle: RunHandle,
    source: object,
    carry: str | Iterable[str],
    initialise: Initialise | None,
    map_location: object,
) -> Started:
    """Start from parts of another run's checkpoint; see `RunPhases.start`."""
    require_first_rank()
    if not isinstance(source, Stored):
        raise InvalidInput(
            "a warm start needs a checkpoint to start from",
            where="source",
            expected="a checkpoint or a release, of any run: reg.checkpoint('RUN/best')",
            found=quoted(source),
        )
    run = handle.training.refresh()
    check_unbegun(run, "warm_start")
    rows = _rows(run.spec, source, (carry,) if isinstance(carry, str) else tuple(carry))
    state = load_to_train(source, map_location)
    table = Table(rows, (), state, rest="reset")
    table.check("the warm start", source.ref)
    made = table.carry_out(initialise or {}).state
    handle.saver.commit(_WarmStart(source, table.applied))
    run = handle.log.run
    seeds = phase_seeds(run, run.present_phase, table.reseeded)
    return Started("warm_start", made, source, seeds, table.applied)


class _WarmStart(NewCommit):
    """The commit of a warm start: the source and the rows, for readers of the log."""

    def __init__(self, source: Stored, applied: Sequence[Applied]) -> None:
        self._source = source
        self._applied = applied

    def actions(self, run: RunManifest) -> Sequence[Action] | None:
        """Return the actions; `None` if the run was started from this source already."""
        check_unbegun(run, "warm_start")
        phase, rows = run.present_phase, recorded(self._applied)
        before = next(reversed(run.restarts().get(phase, ())), None)
        if before is not None and (before.manifest, before.rows) == (self._source.digest, rows):
            return None
        ref, manifest = self._source.ref, self._source.digest
        return [
            EnterPhase(from_phase=phase, to_phase=phase, source=ref, manifest=manifest, rows=rows)
        ]


def check_mode(mode: object) -> None:
    """Refuse a mode that does not exist."""
    if mode not in MODES:
        raise InvalidInput("not a mode", expected=", ".join(MODES), found=quoted(mode))


def check_unbegun(run: RunManifest, mode: Mode) -> None:
    """Refuse to start a run from its beginning that has checkpoints."""
    newest = run.latest()
    if newest is not None:
        raise Conflict(
            f"the run has checkpoints, so it cannot start in mode {mode}",
            where=run.run_id,
            found=f"its newest checkpoint is at step {newest.step}",
            hint="Continue it in mode resume, or create another run.",
        )


def check_expected(
    spec: RunSpec,
    stored: Stored,
    expected: Mapping[str, object] | None,
    differing: Sequence[str] = (),
) -> None:
    """Compare plain values with the program's expectations; the error lists `differing`, too."""
    wanted = dict(expected or {})
    missing = [path for path in spec.compatible_keys or () if path not in wanted]
    if missing:
        raise InvalidInput(
            "the run's preset compares these values with the program's, and none are given",
            where="expected",
            expected=", ".join(spec.compatible_keys or ()),
            found=f"missing: {', '.join(missing)}",
        )
    values = plain_values(stored.manifest.components) if wanted else {}
    wrong = []
    for path, value in wanted.items():
        if path not in values:
            wrong.append(f"{path} is absent, expected {quoted(value)}")
        elif (found := decode_plain(values[path])) != value:
            wrong.append(f"{path} is {quoted(found)}, expected {quoted(value)}")
    if wrong := [*wrong, *differing]:
        raise IncompatibleState(
            "the checkpoint does not fit the program's input",
            where=stored.ref,
            found="; ".join(wrong),
            hint="Use the input that it was made with, or start fresh. Nothing was changed.",
        )


def of_another_run(run: RunManifest, stored: Checkpoint) -> list[str]:
    """Return which hashes that an imported file had, and that must match, are not the run's."""
    noted = stored.meta.get("import") if isinstance(stored.meta, dict) else None
    created = run.created
    if not isinstance(noted, dict) or created is None:
        return []
    own = {"config": plain_digest(run.config).hex(), "input_hash": created.input_hash}
    hashes = {"config": noted.get("config_hash"), "input_hash": noted.get("input_hash")}
    return [
        f"{name} of the imported file: {quoted(hashes[name])}, of the run: {quoted(own[name])}"
        for name in run.spec.must_match or ()
        if hashes[name] not in (None, own[name])
    ]


def _rows(spec: RunSpec, source: Stored, carry: Sequence[str]) -> tuple[Row, ...]:
    """Return the rows of a warm start: the caller's, the preset's, or what inference needs."""
    if carry:
        return tuple(Row(part=name, change="carry") for name in carry)
    if spec.warm_start is not None:
        return spec.warm_start
    names = [name for key in spec.inference if (name := first_of(key, source.components))]
    if not names:
        raise InvalidInput(
            "no rows for a warm start are given",
            where=source.ref,
            expected=f"carry=[...] with some of {', '.join(source.components)}",
            hint="A preset can say it by `warm_start`, or by `inference`.",
        )
    return tuple(Row(part=name, change="carry") for name in names)


_LOGGER = logging.getLogger("holdfast")
_STREAMS = "streams"

Sources = Mapping[str, Iterable[str]]


def find_stale(
    handle: RunHandle, checkpoint: Checkpoint, state: Any, sources: Sources | None
) -> tuple[str, ...]:
    """Return the paths of keys that no source has, and warn of them."""
    run = handle.log.run
    if sources is None:
        if run.spec.sources:
            _LOGGER.warning(
                "%s: not compared with the sources that exist, since none were given: %s",
                run.run_id,
                ", ".join(run.spec.sources),
            )
        return ()
    found = []
    for place, names in sources.items():
        known = frozenset(names)
        there = _at(handle, checkpoint, state, place)
        found += [f"{place}/{name}" for name in there if name not in known]
    if found:
        _LOGGER.warning(
            "%s: the state has names whose source is gone: %s",
            checkpoint.ref,
            printable(", ".join(found)),
        )
    return tuple(found)


def check_given(places: Iterable[str], sources: Sources | None) -> None:
    """Refuse to resume without the sources that the preset compares."""
    missing = [place for place in places if place not in (sources or {})]
    if missing:
        raise InvalidInput(
            "the run's preset compares names in the state with the sources that exist",
            where="sources",
            expected=f"a list of names for {', '.join(missing)}",
            found="none",
        )


def _at(handle: RunHandle, checkpoint: Checkpoint, state: Any, place: str) -> list[Any]:
    first, *path = place.split("/")
    if first == _STREAMS and path:
        name = path.pop(0)
        journal = handle.journal
        waiting = None if journal is None else journal.line.last_in_stream(checkpoint, name)
        value: Any = _last_entry(handle, checkpoint, name) if waiting is None else waiting
    else:
        value = state.get(first) if isinstance(state, Mapping) else None
    for step in path:
        value = value.get(step) if isinstance(value, Mapping) else None
    if value is None:
        return []  # reset, archived, or not there yet
    if not isinstance(value, Mapping):
        raise InvalidInput(
            "a place of sources has no keys",
            where=f"{checkpoint.ref}: {place}",
            expected="a mapping with a key for each source",
            found=quoted(value),
        )
    return list(value)


def _last_entry(handle: RunHandle, checkpoint: Checkpoint, name: str) -> Any:
    """Return the last entry of a stream at a checkpoint, if it was not archived since."""
    run = handle.log.run
    stream, mark = run.stream(name), checkpoint.handle.newest_record().streams.get(name)
    if stream is None or mark is None or mark.archives < len(stream.archives):
        return None
    segments = stream.at(mark)
    entries = read_segments(handle.committer.writer, name, segments[-1:], 0, MAX_STEP)
    return entries[-1] if entries else None
