"""A notice that this machine is going to be taken away: a file that appears, or a callable."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

from holdfast.backends.escape import quoted
from holdfast.registry.errors import InvalidInput

_LOGGER = logging.getLogger("holdfast")
_EVERY_S = 1.0

#: A path, or a function that returns something true once the end is announced.
NoticeSource = Callable[[], object] | str | os.PathLike[str]


class Notice:
    """Asks a source, at most once a second.

    Args:
        source: The source; without one there is never a notice.

    Raises:
        InvalidInput: The source is neither a path nor callable.
    """

    def __init__(self, source: NoticeSource | None) -> None:
        if (
            source is not None
            and not callable(source)
            and not isinstance(source, str | os.PathLike)
        ):
            raise InvalidInput(
                "not a source of notices",
                where="notice",
                expected="a path, or a callable without arguments",
                found=quoted(source),
            )
        self._source = source
        self._asked_s = -_EVERY_S
        self._has_failed = False

    def has_come(self) -> bool:
        """Return whether the notice has come; an error of the callable counts as no."""
        now_s = time.monotonic()
        if self._source is None or now_s - self._asked_s < _EVERY_S:
            return False
        self._asked_s = now_s
        if not callable(self._source):
            return Path(self._source).exists()
        try:
            return bool(self._source())
        except Exception as error:
            if not self._has_failed:
                _LOGGER.warning("the notice of preemption cannot be asked: %r", error)
            self._has_failed = True
            return False
