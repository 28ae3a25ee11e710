"""Find stale state: names that a state or a stream carries although their source is gone.

A bandit arm without its data source is drawn again and again, and distorts what the bandit learns
(document of ANDREA, The Zombie Arm Lesson). Holdfast does not know which sources exist: the caller
lists them, by the place where the state has a key for each.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from holdfast.backends.escape import printable, quoted
from holdfast.registry.errors import InvalidInput
from holdfast.registry.history.log_values import MAX_STEP
from holdfast.registry.loading.checkpoint import Checkpoint
from holdfast.registry.streams.appends import read_segments
from holdfast.registry.training.trainer import Trainer
from holdfast.registry.writing.committer import Committer

_LOGGER = logging.getLogger("holdfast")
_STREAMS = "streams"

Sources = Mapping[str, Iterable[str]]


def find_stale(
    trainer: Trainer,
    committer: Committer,
    checkpoint: Checkpoint,
    state: Any,
    sources: Sources | None,
) -> tuple[str, ...]:
    """Return the paths of keys that no source has, and warn of them.

    Args:
        trainer: Knows the entries of streams that are only in a journal.
        committer: The committer of the run.
        checkpoint: The checkpoint that training continues from.
        state: Its state, as training gets it.
        sources: The names of the sources that exist, by place: a path of a mapping in the state
            (`bandit/arms`), or in the last entry of a stream (`streams/state/arms`).

    Raises:
        InvalidInput: A place names something that has no keys.
    """
    run = committer.log.run
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
        there = _at(trainer, committer, checkpoint, state, place)
        found += [f"{place}/{name}" for name in there if name not in known]
    if found:
        _LOGGER.warning(
            "%s: stale state, whose source is gone: %s",
            checkpoint.ref,
            printable(", ".join(found)),
        )
    return tuple(found)


def check_given(places: Iterable[str], sources: Sources | None) -> None:
    """Refuse to resume without the sources that the preset compares.

    Raises:
        InvalidInput: A place of the preset is missing in `sources`.
    """
    missing = [place for place in places if place not in (sources or {})]
    if missing:
        raise InvalidInput(
            "the run's preset compares names in the state with the sources that exist",
            where="sources",
            expected=f"a list of names for {', '.join(missing)}",
            found="none",
        )


def _at(
    trainer: Trainer, committer: Committer, checkpoint: Checkpoint, state: Any, place: str
) -> list[Any]:
    first, *path = place.split("/")
    if first == _STREAMS and path:
        name = path.pop(0)
        waiting = trainer.waiting_entry(checkpoint, name)
        value: Any = _last_entry(committer, checkpoint, name) if waiting is None else waiting
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


def _last_entry(committer: Committer, checkpoint: Checkpoint, name: str) -> Any:
    """Return the last entry of a stream at a checkpoint, if it was not archived since."""
    run = committer.log.run
    stream, mark = run.stream(name), checkpoint.record.streams.get(name)
    if stream is None or mark is None or mark.archives < len(stream.archives):
        return None
    segments = stream.at(mark)
    entries = read_segments(committer, name, segments[-1:], 0, MAX_STEP)
    return entries[-1] if entries else None
