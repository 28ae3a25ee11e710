"""Plain values of a log: configurations and meta."""

from __future__ import annotations

from typing import Any

from holdfast.registry.errors import IncompatibleState
from holdfast.registry.history.log_values import decode_plain


def plain(encoded: Any) -> Any:
    """Return a value of the log; in its encoded form if only another program can rebuild it."""
    try:
        return None if encoded is None else decode_plain(encoded)
    except IncompatibleState:
        return encoded
