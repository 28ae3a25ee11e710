"""A store and processes under control: late deletes, crashes at any call, wild clocks.

A `Shelf` is a store in memory with a clock of its own and deletes that may land later. A `Process`
is a handle on it. An `Act` is something that a process does; it may be stopped at any of its calls
to a store, before or after the effect, while others go on, and then resumed, killed, or told that
the store did not answer.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Literal, TypeVar

from holdfast.backends.base import ObjectInfo
from holdfast.backends.errors import Archived, StoreUnavailable
from holdfast.backends.memory import MemoryBackend
from holdfast.backends.wrappers import InjectedCrash, Wrapper
from holdfast.registry.face.factory import open_on
from holdfast.registry.face.registry import Registry
from holdfast.registry.face.run import Run
from holdfast.registry.objects.keys import KINDS, ObjectKey
from holdfast.registry.store.store import create_config
from holdfast.registry.values.digest import Digest
from tests.support.inline import without_threads

Verdict = Literal["go", "die", "lose"]

YEAR_S = 365 * 86_400.0
#: Times stay between 1975 and 2170, which every calendar can print.
_EARLIEST_S, _LATEST_S = 5 * YEAR_S, 200 * YEAR_S
_T = TypeVar("_T")
_here = threading.local()
_numbers = itertools.count(1)


class Clock:
    """A clock that somebody sets. Stands in for the module `time` as well; nobody ever sleeps."""

    def __init__(self) -> None:
        self.now_s = 56 * YEAR_S

    def jump(self, by_s: float) -> None:
        self.now_s = min(max(self.now_s + by_s, _EARLIEST_S), _LATEST_S)

    def time(self) -> float:
        self.now_s += 0.001
        return self.now_s

    monotonic = time

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


class Shelf(MemoryBackend):
    """A store in memory.

    Attributes:
        clock: By which it tells how old an object is.
        holds_deletes: Whether deletes wait.
        held: Those that wait.
        issued: Every object for which a delete was ever sent: it may land at any time, and again.
        archived: Objects in an archive.
        restored: Of these, the ones that can be read for some days.
    """

    storage_classes = frozenset({"COLD", "ICE"})
    archives = frozenset({"ICE"})

    def __init__(self) -> None:
        super().__init__()
        self.archived: set[str] = set()
        self.restored: set[str] = set()
        self._number = next(_numbers)
        self.clock = Clock()
        self.holds_deletes = False
        self.held: list[str] = []
        self.issued: set[str] = set()

    @property
    def url(self) -> str:
        return f"memory://shelf-{self._number}"

    @property
    def frozen(self) -> set[str]:
        """The objects that cannot be read."""
        return self.archived - self.restored

    def thaw(self) -> None:
        """Make everything readable, as hours after a request."""
        self.restored |= self.archived

    def get(self, key, byte_range=None, *, into=None):
        if key in self.frozen and key in self:
            raise Archived("in an archive", where=key)
        return super().get(key, byte_range, into=into)

    def stat(self, key):
        return super().stat(key)._replace(is_archived=key in self.archived)

    def list(self, prefix="", *, start_after="", limit=None, delimiter=False):
        found = super().list(prefix, start_after=start_after, limit=limit, delimiter=delimiter)
        return (info._replace(is_archived=info.key in self.archived) for info in found)

    def move_to_class(self, key, storage_class):
        self.get(key)
        (self.archived.add if storage_class in self.archives else self.archived.discard)(key)
        self.restored.discard(key)
        self._date(key)

    def restore(self, key, days):
        self.stat(key)
        self.restored.add(key)

    def put(self, key, body):
        super().put(key, body)
        self.archived.discard(key)
        self.restored.discard(key)
        self._date(key)

    def put_if_absent(self, key, body):
        created = super().put_if_absent(key, body)
        if created:
            self.archived.discard(key)
            self.restored.discard(key)
            self._date(key)
        return created

    def _date(self, key: str) -> None:
        objects = self._store.objects
        objects[key] = replace(objects[key], modified_s=self.clock.time())

    def delete(self, key):
        if key.startswith(KINDS):
            self.issued.add(key)
        if self.holds_deletes:
            self.held.append(key)
        else:
            super().delete(key)

    def deliver(self, index: int, *, again: bool) -> None:
        """Let a delete land that was held back; keep it for another time where `again`."""
        position = index % len(self.held)
        super().delete(self.held[position] if again else self.held.pop(position))

    def deliver_all(self) -> None:
        while self.held:
            self.deliver(0, again=False)

    def __contains__(self, key: str) -> bool:
        return key in self._store.objects

    def objects(self) -> set[str]:
        """Return the keys of packs, manifests and placements."""
        return {key for key in self._store.objects if key.startswith(KINDS)}

    def manifests(self) -> set[Digest]:
        """Return the ids of the states whose manifests lie there."""
        keys = (ObjectKey.parse(key) for key in self._store.objects if key.startswith("manifests/"))
        return {key.digest for key in keys}


class Wire(Wrapper):
    """What a process has of a store; `reads_all` reads archives, too."""

    storage_classes, archives = Shelf.storage_classes, Shelf.archives

    def __init__(self, inner: Shelf, *, reads_all: bool = False) -> None:
        super().__init__(inner)
        self.is_cut, self._reads_all = False, reads_all

    def _call(self, act: Callable[[], _T]) -> _T:
        if self.is_cut:
            raise InjectedCrash("this process is dead")
        going = getattr(_here, "act", None)
        return act() if going is None else going.calls(act)

    def get(self, key, byte_range=None, *, into=None):
        if self._reads_all:
            return MemoryBackend.get(self.inner, key, byte_range, into=into)
        return self._call(lambda: self.inner.get(key, byte_range, into=into))

    def put(self, key, body):
        self._call(lambda: self.inner.put(key, body))

    def put_if_absent(self, key, body):
        return self._call(lambda: self.inner.put_if_absent(key, body))

    def stat(self, key):
        return self._call(lambda: self.inner.stat(key))

    def list(
        self, prefix="", *, start_after="", limit=None, delimiter=False
    ) -> Iterator[ObjectInfo]:
        def listed() -> list[ObjectInfo]:
            found = self.inner.list(
                prefix, start_after=start_after, limit=limit, delimiter=delimiter
            )
            return list(found)

        return iter(self._call(listed))

    def delete(self, key):
        self._call(lambda: self.inner.delete(key))

    def move_to_class(self, key, storage_class):
        self._call(lambda: self.inner.move_to_class(key, storage_class))

    def restore(self, key, days):
        self._call(lambda: self.inner.restore(key, days))


class Process:
    """A process with a registry open, all of whose work is done in the caller's thread.

    Attributes:
        registry: The registry.
        act: What it is in the middle of.
    """

    def __init__(self, shelf: Shelf, *, reads_all: bool = False) -> None:
        self.wire = Wire(shelf, reads_all=reads_all)
        self.registry: Registry = without_threads(open_on(self.wire))
        self.act: Act | None = None
        self._runs: dict[str, Run] = {}

    def run(self, name: str) -> Run:
        """Return this process's handle of a run: the same one every time, however stale."""
        if name not in self._runs:
            self._runs[name] = self.registry.run(name)
        return self._runs[name]

    def hold(self, run: Run) -> Run:
        """Keep a handle that was made by creating a run."""
        return self._runs.setdefault(run.id, run)

    def forget(self, name: str) -> None:
        self._runs.pop(name, None)


class Act:
    """Something that processes do, which can be stopped at its calls to the stores.

    Attributes:
        outcome: What it returned.
        error: What it raised.
        was_stopped: Whether others came in between.
        was_failed: Whether a store failed it.
        is_over: Whether it is done with, one way or the other.
    """

    def __init__(self, work: Callable[[], Any], processes: list[Process]) -> None:
        self._work = work
        self._processes = processes
        self._left = 0
        self._after = False
        self._verdict: Verdict = "go"
        self._thread: threading.Thread | None = None
        self._going, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self.is_over = False
        self.was_stopped = False
        self.was_failed = False
        self.outcome: Any = None
        self.error: BaseException | None = None

    def do(self) -> None:
        """Do all of it at once."""
        try:
            self.outcome = self._work()
        except BaseException as error:
            self.error = error
        self.is_over = True

    def go(self, calls: int, *, after: bool = False, verdict: Verdict = "go") -> None:
        """Go on for so many calls, then stop before or after the effect of the next one.

        Args:
            calls: How many.
            after: Whether the call at which it stops has had its effect.
            verdict: What becomes of the call at which it stands now: it goes on, its process dies
                there, or it hears that the store did not answer.
        """
        self._left, self._after, self._verdict = calls, after, verdict
        for process in self._processes:
            process.act = self
        if self._thread is None:
            self._thread = threading.Thread(target=self._act, daemon=True)
            self._thread.start()
        else:
            self._going.release()
        self._stopped.acquire()
        self.was_stopped = self.was_stopped or not self.is_over
        if self.is_over:
            self._thread.join()
            for process in self._processes:
                process.act = None

    def die(self) -> None:
        """Let its processes die where it stands."""
        self.go(0, verdict="die")
        assert self.is_over

    def _act(self) -> None:
        _here.act = self
        self.do()
        self._stopped.release()

    def calls(self, act: Callable[[], _T]) -> _T:
        """Make a call to a store, perhaps with a stop before or after it."""
        if self._left > 0:
            self._left -= 1
            return act()
        if not self._after:
            self._stop()
            return act()
        answer = act()
        self._stop()
        return answer

    def _stop(self) -> None:
        self._stopped.release()
        self._going.acquire()
        if self._verdict == "die":
            for process in self._processes:
                process.wire.is_cut = True
            raise InjectedCrash("killed")
        if self._verdict == "lose":
            self.was_failed = True
            raise StoreUnavailable("no answer")


def new_shelf() -> Shelf:
    """Return a store that holds an empty registry."""
    shelf = Shelf()
    create_config(shelf, "skipped")
    return shelf
