"""An operation over a store that fails at a given call, and the conditions after it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from holdfast.backends import Backend
from holdfast.backends.wrappers import Fault, Faulty, InjectedCrash
from holdfast.registry.face.factory import open_on
from tests.crash.scenarios import Scenario, sources
from tests.support.inline import without_threads
from tests.support.loads import check_verified
from tests.support.pictures import picture, picture_of_runs, pictures_on_the_way
from tests.support.sameness import assert_same
from tests.support.states import make_state
from tests.support.stores import commit_lines, opened


class _Noting(Faulty):
    """Notes which of its calls only read."""

    def __init__(self, inner: Backend, faults: Iterable[Fault]) -> None:
        super().__init__(inner, [*faults], count_reads=True)
        self.reads: set[int] = set()

    def _read(self, call: Callable[[], Any]) -> Any:
        self.reads.add(self.calls + 1)
        return super()._read(call)


class Attempt:
    """A scenario's operation over a store that fails at a given call, in one process.

    Calls come from several threads, or are made in order.
    """

    def __init__(
        self,
        scenario: Scenario,
        store: Backend,
        faults: list[Fault],
        *,
        resumed: bool = False,
        in_order: bool = False,
    ) -> None:
        self._scenario = scenario
        failing = sources()[1] if scenario.interrupt_source else store
        self._faulty = _Noting(failing, faults)
        self._registry = open_on(store if scenario.interrupt_source else self._faulty)
        if in_order:
            without_threads(self._registry)
        begin = scenario.resume if resumed and scenario.resume else scenario.begin
        self._begun = begin(self._registry)
        if scenario.interrupt_source:
            self._begun = self._faulty
        self.begun_at = self._faulty.calls

    def act(self) -> None:
        self._scenario.act(self._registry, self._begun)

    @property
    def calls(self) -> int:
        return self._faulty.calls

    @property
    def reads(self) -> frozenset[int]:
        return frozenset(self._faulty.reads)

    def close(self) -> None:
        with suppress(InjectedCrash):
            self._registry.close()


@dataclass(frozen=True)
class Course:
    """How an operation goes when nothing happens to it.

    Attributes:
        points: Its calls to the store.
        reads: Those of them that only read.
        complete: The picture that it ends in.
        on_the_way: What users see after each slot of the run, from before it was begun.
        commits: Commits that the run has in the end.
    """

    points: range
    reads: frozenset[int]
    complete: object
    on_the_way: list[object]
    commits: int

    @property
    def faults(self) -> list[tuple[int, bool]]:
        """Each call, and whether it has its effect before it fails: a read has none."""
        return [
            (at, after)
            for at in self.points
            for after in (False, True)
            if not after or at not in self.reads
        ]


def uninterrupted(scenario: Scenario, copies: Copies, *, in_order: bool = False) -> Course:
    """Let an operation go on to its end."""
    store = copies()
    attempt = Attempt(scenario, store, [], in_order=in_order)
    attempt.act()
    attempt.close()
    points = range(attempt.begun_at + 1, attempt.calls + 1)
    on_the_way = pictures_on_the_way(store, scenario.run)
    return Course(points, attempt.reads, picture(store), on_the_way, len(commit_lines(store)))


def check_sound(scenario: Scenario, store: Backend, course: Course) -> None:
    """Check what a crash left: sound, nothing acknowledged lost, nothing half done visible."""
    with opened(store) as registry:
        check_verified(registry)
        for step in scenario.acknowledged:
            found = [
                checkpoint
                for checkpoint in registry.run("night").history.manifest().checkpoints
                if checkpoint.step == step
            ]
            loaded = registry.run("night").history.checkpoint(found[0].n).load()
            assert_same(loaded, make_state(step))
    assert picture_of_runs(store) in course.on_the_way


Copies = Callable[[], Backend]
