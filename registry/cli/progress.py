"""Progress of a command: a bar on stderr if that is a terminal, otherwise nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Bar:
    """A bar, called with the number of bytes so far.

    Args:
        show: Shows the bytes so far and their total, which may be unknown; None shows nothing.
    """

    def __init__(self, show: Callable[[int, int | None], object] | None = None) -> None:
        self._show = show
        self._done = self._total = 0

    def __call__(self, done: int) -> None:
        """Show the bytes so far."""
        self._done = done
        if self._show is not None:
            # Manifests and gaps between chunks are read too, so there may be more than expected.
            self._show(done, max(done, self._total) if self._total else None)

    def expect(self, more: Callable[[], int]) -> None:
        """Show a total: the bytes so far and those that `more` returns."""
        if self._show is not None:
            expected = more()  # moves the bar
            self._total = self._done + expected


@contextmanager
def bar(label: str) -> Iterator[Bar]:
    """Show a bar while the block runs."""
    if not label or not sys.stderr.isatty():
        yield Bar()
        return
    from holdfast.registry.storage.progress import terminal_bar  # as rich, only for a terminal

    with terminal_bar(label) as show:
        yield Bar(show)
