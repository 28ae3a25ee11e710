"""A life told in chapters, each lived once for each kind of store, in order.

A test asks for a chapter; those before it are lived first where they were not yet. So every test
can be run alone, and all of them together live each chapter once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from tests.systems.places import Place


class Story(Protocol):
    """What happens, chapter by chapter, at one place."""

    place: Place


@dataclass
class Mortal:
    """A story of which processes die.

    Attributes:
        place: Where the registry is.
        deaths: Processes that died in a save.
    """

    place: Place
    deaths: int = 0


S = TypeVar("S", bound=Story)
Chapter = Callable[[S], None]


class Life(Generic[S]):
    """A story as far as it was lived.

    Args:
        story: What the chapters share.
        chapters: In their order.
    """

    def __init__(self, story: S, chapters: Sequence[Chapter[S]]) -> None:
        self.story = story
        self._chapters = list(chapters)
        self._lived = 0
        self._failed: BaseException | None = None

    @property
    def is_over(self) -> bool:
        """Whether the last chapter was lived."""
        return self._lived == len(self._chapters)

    def to_the_end(self) -> S:
        """Live on to the end of the last chapter; return the story."""
        return self.through(self._chapters[-1])

    def through(self, chapter: Chapter[S]) -> S:
        """Live on to the end of a chapter; return the story as it then is, or later."""
        until = self._chapters.index(chapter) + 1
        while self._lived < until:
            if self._failed is not None:
                raise AssertionError("an earlier chapter failed") from self._failed
            try:
                self._chapters[self._lived](self.story)
            except BaseException as error:
                self._failed = error
                raise
            self._lived += 1
        return self.story


class Lives(Generic[S]):
    """The lives of one story: one on each kind of store.

    Args:
        story: Makes the story at an empty place.
        chapters: In their order.
    """

    def __init__(self, story: Callable[[Place], S], chapters: Sequence[Chapter[S]]) -> None:
        self._story, self._chapters = story, chapters
        self._lives: dict[str, Life[S]] = {}

    def on(self, kind: str, fresh: Callable[[], str]) -> Life[S]:
        """Return the life on a kind of store, as far as it was lived."""
        if kind not in self._lives:
            self._lives[kind] = Life(self._story(Place.new(fresh)), self._chapters)
        return self._lives[kind]
