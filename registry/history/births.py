"""The first commit of a run: when it was created, and from which run it was forked."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.registry.errors import (
    AccessDenied,
    IntegrityError,
    StorageError,
    StoreUnavailable,
    UnsupportedFormat,
)
from holdfast.registry.history.actions import CreateRun, Parent
from holdfast.registry.history.log import list_runs
from holdfast.registry.history.replay import RunManifest, Slot
from holdfast.registry.storage.keys import slot_key
from holdfast.registry.storage.store import Store


@dataclass(frozen=True, slots=True)
class Birth:
    """The beginning of a run. It never changes.

    Attributes:
        created_ms: Time of its first commit, by its author's clock, in milliseconds.
        parent: The run that it was forked from.
    """

    created_ms: int
    parent: Parent | None


def read_birth(store: Store, name: str) -> Birth | None:
    """Return the beginning of a run: one request.

    `None` if its first slot is absent or unreadable; `verify` reports that.
    """
    key = slot_key(name, 0)
    try:
        slot = Slot.decode(0, store.backend.get(key), where=key)
    except (AccessDenied, StoreUnavailable):
        raise
    except (StorageError, IntegrityError, UnsupportedFormat):
        return None
    for _, commit in slot.commits:
        for action in commit.actions:
            if isinstance(action, CreateRun):
                return Birth(commit.time_ms, action.parent)
    return None


def birth_of(run: RunManifest) -> Birth | None:
    """Return the beginning of a run that is open; `None` if it has no commit."""
    return None if run.created is None else Birth(run.created_ms, run.created.parent)


def forks_of(store: Store, run_id: str) -> list[str]:
    """Return the runs that were forked from a run, by name: one request for each run."""
    names = list_runs(store)
    births = store.pools.small.map(lambda name: read_birth(store, name), names)
    return [
        name
        for name, birth in zip(names, births, strict=True)
        if birth is not None and birth.parent is not None and birth.parent.run == run_id
    ]
