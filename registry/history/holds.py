"""Holds: until a date, evictions, thinnings, drops and rewinds refuse a checkpoint or a run.

A hold ends by an action of the log alone. Anybody may add it once the store's clock has passed the
date; earlier it takes the rights of a collector (`holdfast.registry.curation.holding`). So replay
needs no clock. Specified in docs/spec.md, section 22.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress

from holdfast.backends.escape import shown
from holdfast.registry.errors import Conflict, Hint, StorageError
from holdfast.registry.history.actions import RemoveHold
from holdfast.registry.history.log import RunLog
from holdfast.registry.history.log_values import format_time, kept_ref
from holdfast.registry.history.replay import Hold, RunManifest
from holdfast.registry.objects import slot_key
from holdfast.registry.store import Store, ask_time


def hold_in_words(hold: Hold) -> str:
    """Return a hold in words."""
    return f"held until {format_time(hold.until_ms)}: {shown(hold.reason)}"


def hold_ref(run: RunManifest, hold: Hold) -> str:
    """Return the name within its run of a held checkpoint, or `the run`."""
    record = None if hold.checkpoint is None else run.by_n[hold.checkpoint]
    return "the run" if record is None else kept_ref(record)


def own_time_ms() -> float:
    """Return this machine's time in milliseconds."""
    return time.time() * 1000


def store_time_ms(store: Store, log: RunLog) -> float:
    """Return the store's time, or one that is not later, in milliseconds."""
    with suppress(StorageError):  # to ask takes the rights of a collector
        now_s = ask_time(store)
        if now_s is not None:
            return now_s * 1000
    return store.backend.stat(slot_key(log.run_id, log.run.next_slot - 1)).modified_s * 1000


def ended_holds(run: RunManifest, now_ms: Callable[[], float]) -> list[RemoveHold]:
    """Return the actions that remove the holds of a run whose time is over."""
    if not run.holds:
        return []
    now = now_ms()
    return [RemoveHold(checkpoint=one.checkpoint) for one in run.holds if one.until_ms <= now]


def end_all_holds(run: RunManifest, now_ms: Callable[[], float]) -> list[RemoveHold]:
    """Return the actions that remove all holds of a run; refuse if the time of one is not over."""
    ended = ended_holds(run, now_ms)
    over = {one.checkpoint for one in ended}
    _check_none((one for one in run.holds or () if one.checkpoint not in over), run.run_id)
    return ended


def _check_none(holds: Iterable[Hold], where: str) -> None:
    """Refuse an act that these holds forbid."""
    for hold in holds:
        raise Conflict(
            "a hold forbids this",
            where=where,
            found=f"{hold_in_words(hold)} (set by {shown(hold.author)})",
            hint=Hint(
                "`run.retention.unhold` ends a hold early; it takes the rights of a collector.",
                "`holdfast hold --off` ends a hold early; it takes the rights of a collector.",
            ),
        )


def check_rewind(run: RunManifest, keeps: int, now_ms: Callable[[], float]) -> None:
    """Refuse a rewind that supersedes a held checkpoint, and any rewind of a held run."""
    held = [
        hold
        for hold in run.holds or ()
        if hold.checkpoint is None
        or (hold.checkpoint > keeps and not run.is_superseded(hold.checkpoint))
    ]
    if held:
        now = now_ms()
        try:
            _check_none((one for one in held if one.until_ms > now), run.run_id)
        except Conflict as error:
            error.hints = Hint.of("Continue in a fork: it leaves this run as it is.", error.hints)
            raise
