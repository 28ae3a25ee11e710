"""The bound of a journal: a save waits until its states have room beside those that wait."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from holdfast.registry.errors import StoreFull
from holdfast.registry.journal.background import LOOK_S, REMINDER_S, BackgroundCarrier
from holdfast.registry.journal.folder import RunFolder
from holdfast.registry.journal.settings import BYTES_VARIABLE
from holdfast.registry.training.save_request import PreparedSave

_LOGGER = logging.getLogger("holdfast")


def await_room(
    folder: RunFolder, carrier: BackgroundCarrier, save: PreparedSave, check: Callable[[], None]
) -> float:
    """Wait until a save fits into the journal, and say so; return the seconds.

    Args:
        folder: The journal of the run.
        carrier: Makes room.
        save: The save.
        check: Called before each wait; it may raise.

    Raises:
        StoreFull: The save alone is larger than the journal may be.
    """
    needed, most = _size_bytes(save), folder.journal.max_bytes
    if needed > most:
        raise StoreFull(
            "the state is larger than the journal may be",
            where=folder.path,
            expected=f"at most {most} bytes",
            found=f"{needed} bytes",
            hint=f"Set {BYTES_VARIABLE}, or save without a journal.",
        )
    began = said = time.monotonic()
    while (held := folder.waiting_bytes()) + needed > most:
        check()
        if began == said or time.monotonic() > said + REMINDER_S:
            said = time.monotonic()
            _LOGGER.warning(
                "%s: the save waits: %d bytes are only in the journal %s, of at most %d (%s); %s",
                folder.run_id,
                held,
                folder.path,
                most,
                BYTES_VARIABLE,
                carrier.why(),
            )
        carrier.sleep(LOOK_S)
    return 0.0 if said == began else time.monotonic() - began


def _size_bytes(save: PreparedSave) -> int:
    states = [save.given, *save.companions.values()]
    parts = [part for state in states for part in state.components]
    return sum(leaf.nbytes for part in parts for leaf in part.leaves)
