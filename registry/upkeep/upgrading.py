"""Raise the least writer version of a registry, so that its programs may use newer rules.

An epoch raises it, and the mark of that epoch in each run tells writers that are running. Nothing
is rewritten: what is there stays readable. Specified in docs/spec.md, section 10.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from holdfast.registry.history import Epochs, RunLog, encode_upgrade
from holdfast.registry.history.actions import Line, Mark
from holdfast.registry.history.replay import RunManifest
from holdfast.registry.objects import epoch_key
from holdfast.registry.store import WRITER_VERSION, Store
from holdfast.registry.upkeep.live import UNREADABLE, is_forgotten, list_run_ids, with_way_out
from holdfast.registry.upkeep.window import RUNS_AT_ONCE, in_batches


@dataclass(frozen=True, slots=True)
class UpgradeReport:
    """Report of an upgrade.

    Attributes:
        min_writer: The least writer version from now on.
        raised: Whether this upgrade has raised it.
        epoch: The epoch that every run is marked with.
        runs: Number of runs.
        marked: Runs that this upgrade has marked; the others had a mark, or were dropped.
    """

    min_writer: int
    raised: bool
    epoch: int
    runs: int
    marked: int


def upgrade(store: Store) -> UpgradeReport:
    """Raise the least writer version to this program's, and mark every run; see `Registry`."""
    store.prepare_writing()
    epochs = Epochs(store)
    raised = _raise(store, epochs)
    newest = epochs.observe()
    epochs.make_durable(newest)
    header = epochs.header(newest)
    assert header is not None
    forgotten = header.forgotten or {}
    # After the epoch, as in a sweep: whoever creates a run later observes it.
    runs = list_run_ids(store, forgotten)
    mark = partial(_mark, store, newest, forgotten)
    marked = sum(in_batches(store.pools.bulk, mark, runs, at_once=RUNS_AT_ONCE))
    return UpgradeReport(header.min_writer, raised, newest, len(runs), marked)


def _raise(store: Store, epochs: Epochs) -> bool:
    """Put the epoch, unless there is one; another writer may put an epoch of its own meanwhile."""
    while True:
        newest = epochs.observe()
        epochs.make_durable(newest)
        header = epochs.header(newest)
        if header is not None and header.min_writer >= WRITER_VERSION:
            return False
        entry = encode_upgrade(newest + 1, WRITER_VERSION, header)
        if store.backend.put_if_absent(epoch_key(newest + 1), entry):
            return True


def _mark(store: Store, epoch: int, forgotten: dict[str, int], run_id: str) -> bool:
    """Mark a run; return whether it needed that."""
    log = RunLog(store, run_id)
    needed = False

    def compose(run: RunManifest) -> list[Line] | None:
        nonlocal needed
        needed = run.next_slot > 0 and run.epoch < epoch and run.dropped is None
        return [Mark(epoch=epoch)] if needed else None

    try:
        log.open()
        log.append(compose)
    except UNREADABLE as error:
        if is_forgotten(store, forgotten, run_id):
            return False
        raise with_way_out(error, run_id, "upgrades the others") from error
    return needed
