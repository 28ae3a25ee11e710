"""Progress of a command: a bar on stderr if that is a terminal, otherwise nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock

from holdfast.backends import Backend, Body, ByteRange
from holdfast.backends.base import as_buffers
from holdfast.backends.wrappers.base import Wrapper


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
    from holdfast.registry.cli import terminal

    with terminal.progress_bar(label) as show:
        yield Bar(show)


class Watched(Wrapper):
    """A backend that reports how many bytes have gone through it.

    Args:
        inner: The backend.
        progress: Called after each transfer.
    """

    def __init__(self, inner: Backend, progress: Callable[[int], object]) -> None:
        super().__init__(inner)
        self._progress = progress
        self._lock = Lock()
        self._done = 0

    def get(
        self,
        key: str,
        byte_range: ByteRange | None = None,
        *,
        into: Sequence[memoryview] | None = None,
    ) -> bytes:
        """Read an object, or a range of it."""
        data = self.inner.get(key, byte_range, into=into)
        self._moved(len(data) if byte_range is None else len(byte_range))
        return data

    def put(self, key: str, body: Body) -> None:
        """Create or replace an object."""
        self.inner.put(key, body)
        self._moved(sum(map(len, as_buffers(body))))

    def put_if_absent(self, key: str, body: Body) -> bool:
        """Create an object unless it exists; return whether this call created it."""
        created = self.inner.put_if_absent(key, body)
        self._moved(sum(map(len, as_buffers(body))))
        return created

    def _moved(self, nbytes: int) -> None:
        with self._lock:
            self._done += nbytes
            done = self._done
        self._progress(done)
