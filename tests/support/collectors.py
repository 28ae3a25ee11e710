"""The steps of a collector, one by one and by hand."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.backends import Backend
from holdfast.registry.history.actions import Mark
from holdfast.registry.history.epochs import encode_sweep
from holdfast.registry.history.log import RunLog
from holdfast.registry.objects.keys import ObjectKey, epoch_key
from holdfast.registry.store import Store


def sweep(backend: Backend, epoch: int, keys: Iterable[ObjectKey | str]) -> None:
    """Publish the epoch of a sweep (G1)."""
    parsed = [key if isinstance(key, ObjectKey) else ObjectKey.parse(key) for key in keys]
    assert backend.put_if_absent(epoch_key(epoch), encode_sweep(epoch, parsed))


def mark(store: Store, run_id: str, epoch: int) -> None:
    """Put the mark of a sweep into a run (G3)."""
    log = RunLog(store, run_id)
    log.open()
    log.append(lambda state: [Mark(epoch=epoch)])


def collect(backend: Backend, keys: Iterable[ObjectKey | str]) -> None:
    """Delete (G5)."""
    for key in keys:
        backend.delete(str(key))
