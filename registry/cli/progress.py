"""Progress of a command: a bar on stderr if that is a terminal, otherwise nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock

from holdfast.backends import Backend, Body, ByteRange
from holdfast.backends.base import as_buffers
from holdfast.backends.wrappers.base import Wrapper

#: Called with the number of bytes so far.
Progress = Callable[[int], object]


@contextmanager
def bar(label: str, total: int | None = None) -> Iterator[Progress]:
    """Show a bar while the block runs; yield a function that sets the bytes so far."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from holdfast.registry.cli import terminal

    with terminal.progress_bar(label, total) as progress:
        (task,) = progress.task_ids
        yield lambda done: progress.update(task, completed=done)


class Watched(Wrapper):
    """A backend that reports how many bytes have gone through it.

    Args:
        inner: The backend.
        progress: Called after each transfer.
    """

    def __init__(self, inner: Backend, progress: Progress) -> None:
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
