"""Loading for a training to go on from: the types that its tensors had, and never silently."""

from __future__ import annotations

import logging
from typing import Any

from holdfast.backends.escape import printable
from holdfast.registry.loading.stored import Stored

_LOGGER = logging.getLogger("holdfast")
_NAMED_AT_MOST = 4


def load_to_train(stored: Stored, map_location: object) -> Any:
    """Return a state for a training to go on from: every tensor in the type that it had.

    Where some were saved with less precision a warning names them: what goes on from there is not
    quite the training that was.

    Args:
        stored: A checkpoint, or another stored state.
        map_location: Device for the tensors.

    Raises:
        IntegrityError: Something is damaged or gone.
    """
    lossy = [info for info in stored.tensors().values() if info.original is not None]
    state = stored.load(map_location=map_location, precision="original")
    if lossy:
        named = [f"{info.path} ({info.dtype})" for info in lossy[:_NAMED_AT_MOST]]
        more = len(lossy) - len(named)
        _LOGGER.warning(
            "%s: saved with less precision; these have their types again, not the bits that were "
            "lost: %s%s",
            stored.ref,
            printable(", ".join(named)),
            f" and {more} more" if more else "",
        )
    return state
