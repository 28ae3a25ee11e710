"""A change of one run: the objects that it puts on the store, and its lines in the log.

A change knows nothing of races, sweeps or slots: `holdfast.registry.writing.committer` carries it
through. The committer asks for the objects once, and again if a sweep has condemned one of them. It
asks for the lines each time that it has read the run; a change must answer for that run and
remember no earlier one.

A subclass of `Change` commits states or lines that exist already: a sync, a repack. A subclass of
`NewCommit` makes a new commit: a save, a promotion, a release. For a commit that writes no state,
such as a tag, a function is enough.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import reduce
from typing import ClassVar

from holdfast.registry.history import Authorship, PlacedState, check_not_dropped, commit_line
from holdfast.registry.history.actions import Action, Line
from holdfast.registry.history.replay import RunManifest, foresee
from holdfast.registry.writing.object_writer import ChosenKeys
from holdfast.registry.writing.placing import Written

#: Returns the actions of a commit for a run, or `None` if there is nothing to commit.
Actions = Callable[[RunManifest], Sequence[Action] | None]


class Stale(Exception):
    """The objects that were written for a change do not fit the run any more: write them again."""


class Change(ABC):
    """A change of one run."""

    noun: ClassVar[str] = "commit"  # its noun in messages
    #: The sentence on the run in the message that the change was given up.
    given_up: ClassVar[str] = "Nothing was committed"
    #: Whether it puts objects on the store. If not, it waits for no save in the background; those
    #: that only a journal holds still come first.
    writes: bool = True

    @abstractmethod
    def check(self, run: RunManifest) -> None:
        """Raise if the run does not allow the change.

        It is called before anything is written, and each time before the lines are asked for.
        """

    def write(self) -> ChosenKeys:
        """Put the objects on the store that the lines name; return all of them."""
        return ChosenKeys()

    @abstractmethod
    def lines(self, run: RunManifest) -> Sequence[Line | bytes] | None:
        """Return the lines of the next slot for a run; `None` if there are none."""

    def read_again(self) -> bool:
        """Read the source of the change again, if that is not the run itself.

        It is called when an object was missing.
        """
        return False

    def placed_states(self) -> Sequence[PlacedState]:
        """Return the states that it wrote; later states can be stored against them."""
        return ()


class NewCommits(Change):
    """A change that adds commits: it writes the states that they name, and makes their actions."""

    #: The authorship of its commit, if that was fixed earlier; by default a new one.
    authorship: Authorship | None = None
    _written: Sequence[Written] = ()

    def check(self, run: RunManifest) -> None:
        """Refuse to add to a run that was dropped."""
        check_not_dropped(run)

    def write_states(self) -> Sequence[Written]:
        """Put the states that the actions name on the store; otherwise as `write`."""
        return ()

    @abstractmethod
    def commits(self, run: RunManifest) -> Sequence[Sequence[Action]] | None:
        """Return the actions of each commit; otherwise as `lines`.

        Without actions the slot has only the new places; `None` means no slot.
        """

    def write(self) -> ChosenKeys:
        """Put the states on the store."""
        self._written = self.write_states()
        return reduce(ChosenKeys.__or__, [one.chosen for one in self._written], ChosenKeys())

    def lines(self, run: RunManifest) -> Sequence[Line] | None:
        """Return the places that the run does not have yet, then the commits."""
        commits = self.commits(run)
        if commits is None:
            return None
        places = dict.fromkeys(one.state.place for one in self._written)
        lines: list[Line] = [p for p in places if run.by_manifest.get(p.manifest) != p]
        partial = [one.state for one in self._written if one.state.placement.components]
        for number, actions in enumerate(commits):
            if not actions:
                continue
            commit = commit_line(run, actions, self.authorship)
            lines.append(commit)
            if partial or number + 1 < len(commits):
                run = foresee(run, [commit])
        _check_covered(run, partial)
        return lines or None

    def placed_states(self) -> Sequence[PlacedState]:
        """Return the states that were written."""
        return [one.state for one in self._written]


class NewCommit(NewCommits):
    """A change that adds one commit."""

    @abstractmethod
    def actions(self, run: RunManifest) -> Sequence[Action] | None:
        """Return the actions of the commit; otherwise as `commits`."""

    def commits(self, run: RunManifest) -> Sequence[Sequence[Action]] | None:
        """Return the one commit."""
        actions = self.actions(run)
        return None if actions is None else [actions]


class Composed(NewCommit):
    """A commit whose parts are functions."""

    def __init__(
        self,
        actions: Actions,
        states: Callable[[], Sequence[Written]] | None = None,
        *,
        on_dropped: bool = False,
    ) -> None:
        self._actions = actions
        self._states = states
        self._on_dropped = on_dropped
        self.writes = states is not None

    def check(self, run: RunManifest) -> None:
        """Refuse to add to a run that was dropped, unless `on_dropped` was given."""
        if not self._on_dropped:
            super().check(run)

    def write_states(self) -> Sequence[Written]:
        """Put the states on the store."""
        return () if self._states is None else self._states()

    def actions(self, run: RunManifest) -> Sequence[Action] | None:
        """Return the actions of the commit."""
        return self._actions(run)


def _check_covered(run: RunManifest, partial: Sequence[PlacedState]) -> None:
    """Refuse new places that cover less of their states than the run then holds.

    Another writer has saved such a state whole since.
    """
    for state in partial:
        manifest, covered = state.place.manifest, set(state.placement.components or ())
        if run.holds_whole(manifest) or not covered.issuperset(run.thinned.get(manifest, ())):
            raise Stale


def after_commit(
    run: RunManifest, actions: Sequence[Action], authorship: Authorship | None = None
) -> RunManifest:
    """Return the run after a commit of these actions."""
    return foresee(run, [commit_line(run, actions, authorship)]) if actions else run
