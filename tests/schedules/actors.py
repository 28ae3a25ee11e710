"""Actors: real programs on a registry that can be stopped between any two calls to the store.

An actor runs in one thread, its clock does not move, and its random names follow from its own name.
So its next call depends only on the answers that it got. That makes it possible to stop and
continue it: each of its states is the list of those answers. A new state is reached by running the
real program on these answers, up to its next call. Its calls are compared with the earlier ones, so
a program that depends on anything else is noticed at once.
"""

from __future__ import annotations

import hashlib
import itertools
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

import holdfast.registry.history.creating
from holdfast.registry.face.registry import Registry
from holdfast.registry.store.store import RegistryConfig, Store
from tests.schedules.store import Answer, Asking, Request
from tests.support.inline import without_threads

#: The hour at which every clock stands, seconds since the epoch.
NOW_S = 1_700_000_000.0
_running = threading.local()


class Stopped(BaseException):
    """The program has come to a call that has no answer yet."""


class NotRepeatable(BaseException):
    """The program made another call than the last time, after the same answers."""


class Session:
    """The argument of an actor's program.

    Attributes:
        backend: The store.
    """

    def __init__(self, config: RegistryConfig, backend: Asking) -> None:
        self._config = config
        self.backend = backend

    def open(self) -> Registry:
        """Open the registry, with nothing remembered and no threads."""
        return without_threads(Registry(Store(self.backend, self._config)))

    def ready(self) -> None:
        """Say that what is to be interleaved begins here."""
        self.backend.ask(Request("ready"))


Program = Callable[[Session], object]


@dataclass(frozen=True, slots=True)
class Ended:
    """How a program ended: with a value or with an error."""

    value: object = None
    error: Exception | None = None


class State:
    """The answers that an actor has got so far, and its next call.

    Attributes:
        number: A number that no other state of any actor has.
        request: Its next call; `None` when it has ended.
        ended: How it ended; `None` before.
    """

    __slots__ = ("_before", "answer", "ended", "number", "request", "then")
    _count = 0

    def __init__(self, before: State | None, answer: Answer) -> None:
        State._count += 1
        self.number = State._count
        self._before = before
        self.answer = answer
        self.request: Request | None = None
        self.ended: Ended | None = None
        self.then: dict[Answer, State] = {}

    def past(self) -> list[tuple[Request, Answer]]:
        """Return its calls so far, each with its answer."""
        found = []
        state = self
        while state._before is not None:
            assert state._before.request is not None
            found.append((state._before.request, state.answer))
            state = state._before
        return found[::-1]


class Actor:
    """A program and all states in which a schedule has put it.

    Attributes:
        name: Its name in schedules.
        runs: How often the real program was run.
    """

    def __init__(
        self,
        name: str,
        program: Program,
        config: RegistryConfig,
        page: int | None = None,
        *,
        is_disk: bool = False,
    ) -> None:
        self.name = name
        self.program = program
        self.runs = 0
        self._config = config
        self._page = page
        self._is_disk = is_disk
        self.first = State(None, None)
        self._find_out(self.first)

    def after(self, state: State, answer: Answer) -> State:
        """Return the state that an answer leads to."""
        found = state.then.get(answer)
        if found is None:
            found = state.then[answer] = State(state, answer)
            self._find_out(found)
        return found

    def run_on(self, backend: Asking) -> Ended:
        """Run the program on a store in this thread."""
        self.runs += 1
        with named_after(self.name):
            try:
                return Ended(value=self.program(Session(self._config, backend)))
            except Exception as error:
                return Ended(error=error)

    def _find_out(self, state: State) -> None:
        store = _Remembered(state.past(), self._page, is_disk=self._is_disk)
        ended: Ended | None = None
        with suppress(Stopped):
            ended = self.run_on(store)
        if store.left:
            raise NotRepeatable(f"{self.name} did not ask for {store.left} answers again")
        # Of calls that are made at once an earlier one may fail while a later one is still to come.
        state.request = store.asked
        state.ended = ended if store.asked is None else None
        if state.request is None and ended is None:
            raise NotRepeatable(f"{self.name} stopped without a call")


class _Remembered(Asking):
    """A store that gives the answers of a state again, and stops the program at the next call."""

    def __init__(
        self, past: list[tuple[Request, Answer]], page: int | None, *, is_disk: bool
    ) -> None:
        super().__init__(page=page, is_disk=is_disk)
        self._past = past
        self._given = 0
        self.asked: Request | None = None

    @property
    def left(self) -> int:
        """Number of answers that nothing asked for."""
        return len(self._past) - self._given

    def ask(self, request: Request) -> Answer:
        if not self.left:
            self.asked = self.asked or request  # what it asks on its way out does not count
            raise Stopped
        expected, answer = self._past[self._given]
        if request != expected:
            raise NotRepeatable(f"{request} in place of {expected}")
        self._given += 1
        return answer


@contextmanager
def determined() -> Iterator[None]:
    """Let clocks stand still, pauses take no time, and random names follow from the actor's."""
    clock = SimpleNamespace(time=lambda: NOW_S, sleep=lambda _s: None, monotonic=lambda: NOW_S)
    names = SimpleNamespace(token_hex=_random_name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            holdfast.registry.history.creating, "describe_environment", lambda: {"host": "here"}
        )
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] == "holdfast":
                if getattr(module, "time", None) is time:
                    patch.setattr(module, "time", clock)
                if getattr(module, "secrets", None) is secrets:
                    patch.setattr(module, "secrets", names)
        yield


@contextmanager
def named_after(name: str) -> Iterator[None]:
    """Let the random names that this thread asks for follow from a name."""
    _running.names = (
        hashlib.sha256(f"{name} {number}".encode()).hexdigest() for number in itertools.count()
    )
    try:
        yield
    finally:
        _running.names = None


def _random_name(size_bytes: int) -> str:
    names: Iterator[str] | None = getattr(_running, "names", None)
    return secrets.token_hex(size_bytes) if names is None else next(names)[: 2 * size_bytes]
