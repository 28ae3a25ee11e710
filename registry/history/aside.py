"""A log that was read, set aside as bytes: the handles of very many runs do not fit in memory."""

from __future__ import annotations

from holdfast.registry.history.log import RunLog
from holdfast.registry.history.replay import RunManifest
from holdfast.registry.store import Store
from holdfast.registry.values import DigestField, Record


class _Aside(Record):
    """A log that one program has read and goes on with later."""

    run: RunManifest  # compact
    durable: int
    snapshot: int
    may_write: bool
    newest: DigestField | None = None
    committed: int | None = None
    committed_digest: DigestField | None = None


def set_aside(log: RunLog) -> bytes:
    """Return all that this program needs to go on from here with another handle."""
    return _Aside(
        run=log.run.compact(),
        newest=log.tail.newest,
        committed=log.tail.committed,
        committed_digest=log.tail.committed_digest,
        durable=log.durable,
        snapshot=log.snapshots.newest,
        may_write=log.may_write,
    ).encode()


def taken_up(store: Store, run_id: str, aside: bytes) -> RunLog:
    """Return a handle that goes on where one was set aside; asks the store for nothing."""
    found = _Aside.parse(aside, where=run_id)
    log = RunLog(store, run_id, snapshot_slot=found.snapshot)
    log.run, log.durable, log.may_write = found.run, found.durable, found.may_write
    log.tail.newest, log.tail.committed = found.newest, found.committed
    log.tail.committed_digest = found.committed_digest
    log.seen.head, log.seen.is_checked = None, True
    return log
