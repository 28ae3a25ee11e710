"""A bar of bytes while something runs: in a notebook, or on a terminal.

In a notebook it is an output that is updated; no widgets are needed. Elsewhere it is on stderr if
that is a terminal, and otherwise nothing is shown.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Lock
from typing import Any

from holdfast.backends.wrappers import Watched
from holdfast.registry.store.store import Store
from holdfast.registry.values import markup, size

#: Called with the number of bytes so far, by any thread.
Progress = Callable[[int], object]
#: Seconds between two updates of an output.
_UPDATE_S = 0.1


class Transfers:
    """Tell observers how many bytes go to and from a store."""

    def __init__(self, store: Store) -> None:
        self._observers: list[Progress] = []
        self._done = 0
        store.backend = Watched(store.backend, self._tell)

    @contextmanager
    def observed(self, progress: Progress) -> Iterator[None]:
        """Tell the bytes that move while the block runs, whoever moves them."""
        before = self._done

        def tell(done: int) -> None:
            progress(done - before)

        self._observers.append(tell)
        try:
            yield
        finally:
            self._observers.remove(tell)

    def _tell(self, done: int) -> None:
        self._done = max(self._done, done)
        for observer in tuple(self._observers):
            observer(self._done)


@contextmanager
def bar(label: str, total: int | None) -> Iterator[Progress]:
    """Show a bar while the block runs; yield a function that sets its bytes."""
    display = _display_of_notebook()
    if display is None:
        with terminal_bar(label) as show:
            yield lambda done: show(done, total, "")
        return
    shown = NotebookBar(label, total, display)
    try:
        yield shown
    finally:
        shown.update()


class NotebookBar:
    """A bar as an output of a notebook."""

    def __init__(self, label: str, total: int | None, display: Callable[..., Any]) -> None:
        self._label, self._total = label, total
        self._done, self._updated_s = 0, time.monotonic()
        self._lock = Lock()
        self._handle = display(self, display_id=True)

    def __call__(self, done: int) -> None:
        """Set the bytes so far."""
        with self._lock:
            self._done = max(done, self._done)
            is_due = time.monotonic() - self._updated_s >= _UPDATE_S
            if is_due:
                self._updated_s = time.monotonic()
        if is_due:
            self.update()

    def update(self) -> None:
        """Show the bytes so far."""
        with suppress(Exception):  # an output that cannot be shown is no failure of the work
            self._handle.update(self)

    def __repr__(self) -> str:
        total = "" if self._total is None else f" of {size(self._total)}"
        return f"{self._label}: {size(self._done)}{total}"

    def _repr_html_(self) -> str:
        most = "" if self._total is None else f' max="{max(self._total, self._done, 1)}"'
        value = "" if self._total is None else f' value="{self._done}"'
        return f'<div class="holdfast"><progress{most}{value}></progress> {markup.text(self)}</div>'


@contextmanager
def terminal_bar(label: str) -> Iterator[Callable[[int, int | None, str], object]]:
    """Show a bar on stderr while the block runs, if that is a terminal.

    It is set by the bytes so far, the total, and a text that replaces the label.
    """
    if not sys.stderr.isatty():
        yield lambda done, total, text: None  # noqa: ARG005
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
    from rich.text import Text

    class Moved(ProgressColumn):
        """The bytes so far, of how many, and how many a second."""

        def render(self, task: Task) -> Text:
            if not task.completed:
                return Text("")
            total = "" if task.total is None else f" of {size(int(task.total))}"
            speed = f", {size(int(task.speed))}/s" if task.speed else ""
            return Text(f"{size(int(task.completed))}{total}{speed}")

    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(24),
        Moved(),
    )
    screen = Console(stderr=True, color_system=None if os.environ.get("NO_COLOR") else "auto")
    with Progress(*columns, console=screen, transient=True) as progress:
        task = progress.add_task(label, total=None)
        yield lambda done, total, text: progress.update(
            task, completed=done, total=total, description=text or label
        )


def _display_of_notebook() -> Callable[..., Any] | None:
    """Return IPython's `display` in the kernel of a notebook; `None` elsewhere."""
    if "IPython" not in sys.modules:
        return None
    from IPython import get_ipython
    from IPython.display import display

    return display if getattr(get_ipython(), "kernel", None) is not None else None
