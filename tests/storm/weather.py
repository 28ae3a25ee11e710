"""The store as a process of the storm sees it: slow at times, and some of its answers are lost.

It notes what is asked of it.
"""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Iterator

from holdfast.backends import Backend, Body
from holdfast.backends.base import ObjectInfo
from holdfast.backends.errors import StoreUnavailable
from holdfast.backends.wrappers import Wrapper

#: How a line ends that says what is deleted: one that a SIGKILL tore is known by it.
DELETED_ENDS = b" ;\n"
DELETED = "deleted.keys"
_SLOW_DELETIONS = 0.005
#: How likely the answer to a put of a slot is lost: it is there, and its writer does not know.
_LOST_ANSWERS = 0.03
_STEM = re.compile(r"packs/../[0-9a-f]{64}\.")


class Weather(Wrapper):
    """A store that takes its time now and then, before a commit lands or an object goes.

    It loses some answers to commits.

    Args:
        inner: The store.
        chance: Of this process.
        slow_commits: How likely a slot of a log is put late.
        longest_s: Delays last up to so long.
        deleted: File that takes the keys of what is about to be deleted.
    """

    def __init__(
        self,
        inner: Backend,
        chance: random.Random,
        *,
        slow_commits: float,
        longest_s: float,
        deleted: str,
    ) -> None:
        super().__init__(inner)
        self._chance = chance
        self._slow_commits = slow_commits
        self._longest_s = longest_s
        self._deleted = os.open(deleted, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC)
        self._found: dict[str, bool] = {}
        self._again = 0

    def list(
        self,
        prefix: str = "",
        *,
        start_after: str = "",
        limit: int | None = None,
        delimiter: bool = False,
    ) -> Iterator[ObjectInfo]:
        if _STEM.fullmatch(prefix):
            self._again += prefix in self._found
            self._found[prefix] = True
        return super().list(prefix, start_after=start_after, limit=limit, delimiter=delimiter)

    def put_if_absent(self, key: str, body: Body) -> bool:
        if key.startswith("packs/"):
            self._found[key[: key.rindex(".") + 1]] = False
        is_slot = "/log/" in key
        if is_slot:
            self._dawdle(self._slow_commits)
        created = super().put_if_absent(key, body)
        if is_slot and self._chance.random() < _LOST_ANSWERS:
            raise StoreUnavailable("the answer was lost", where=key)
        return created

    def delete(self, key: str) -> None:
        os.write(self._deleted, key.encode() + DELETED_ENDS)
        self._dawdle(_SLOW_DELETIONS)
        super().delete(key)

    def _dawdle(self, probability: float) -> None:
        if self._chance.random() < probability:
            time.sleep(self._chance.uniform(0, self._longest_s))

    def packs_used(self) -> tuple[int, int]:
        """Return what became of packs since this was last asked.

        Returns:
            How many were found on the store and not put; how many were looked for again, because a
            sweep had passed.
        """
        used = sum(self._found.values()), self._again
        self._found, self._again = {}, 0
        return used
