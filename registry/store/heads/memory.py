"""The heads that an open registry remembers: a log is checked against them, then they are updated.

Heads are written to the user's state folder when the registry is closed, at the end of the
program, and while it is open at most every half minute. Processes that share the folder add their
own heads; for each run the head with more commits is kept.
"""

from __future__ import annotations

import atexit
import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial

from holdfast.backends import Location
from holdfast.registry.errors import Conflict, InvalidInput, RegistryError, RolledBack
from holdfast.registry.store.cache_folder import OPEN
from holdfast.registry.store.heads import folder
from holdfast.registry.store.heads.folder import Head, HeadLines, HeadsFile, advice
from holdfast.registry.values import Digest, ProcessLock

#: The environment variable that turns remembering off: `0`.
MEMORY = "HOLDFAST_HEADS"
#: The most runs with heads; beyond that the heads noted longest ago are dropped.
MAX_RUNS = 10_000
_WRITE_EVERY_S = 30.0

_LOGGER = logging.getLogger("holdfast")


class Heads:
    """The heads of one registry."""

    def __init__(self, location: Location, path: str) -> None:
        self.url = location.url  # of the registry
        #: Functions that write files beside this one; `write` calls them.
        self.beside: list[Callable[[], None]] = []
        self._path = path
        self._name = folder.place_name(location)
        self._registry = ""
        self._kept = self._read(partial(folder.read, path))
        self._epoch = self._kept.epoch if self._kept else 0
        self._noted: dict[str, Head] = {}
        self._unwritten: set[str] = set()
        self._written_s = time.monotonic()
        self._lock = ProcessLock()

    def check_registry(self, registry_id: str, *, replace: bool = False) -> None:
        """Check that this is the registry that was seen here before."""
        self._registry = registry_id
        if self._kept is None or self._kept.registry == registry_id:
            return
        if not replace:
            raise Conflict(
                "this is not the registry that this machine has seen here before",
                where=self.url,
                expected=self._kept.registry,
                found=registry_id,
                hint="Check the URL, and who can write there. If the registry was replaced on "
                f"purpose, run `holdfast trust {self.url}`.",
            )
        self._kept, self._epoch = None, 0
        with suppress(InvalidInput):  # then nothing is remembered at all
            _forget(self._path, self._name)

    def seen(self, run_id: str) -> Head | None:
        """Return how far the log of a run went when it was seen last."""
        noted = self._noted.get(run_id)
        return self._kept.heads.get(run_id) if noted is None and self._kept is not None else noted

    def all(self) -> Mapping[str, Head]:
        """Return the heads of all runs that were seen."""
        with self._lock.here():
            return {**(self._kept.heads if self._kept is not None else {}), **self._noted}

    def check_runs(self, listed: Iterable[str], seen: Mapping[str, Head]) -> None:
        """Raise if a run that was seen before is missing."""
        for run_id in sorted(seen.keys() - set(listed)):
            seen[run_id].require(self.url, 0, 0, None)

    @property
    def epoch(self) -> int:
        """The highest epoch that was seen."""
        return self._epoch

    def check_epoch(self, epoch: int, seen: int = 0) -> None:
        """Raise if the log of epochs is shorter than before; otherwise remember its length."""
        if epoch < seen:
            raise RolledBack(
                "the log of epochs is shorter than this machine has seen it",
                where=self.url,
                expected=f"at least epoch {seen}",
                found=f"epoch {epoch}",
                hint=f"Let nobody write until it is restored. {advice(self.url)}",
            )
        with self._lock.here():
            if epoch > self._epoch:
                self._epoch = epoch
                self._remember()

    def note(self, run_id: str, slots: int, commits: int, link: Digest, slot: int | None) -> None:
        """Remember the head of a run that was checked."""
        with self._lock.here():
            before = self.seen(run_id)
            if slot is None and before is not None and before.commits == commits:
                slot = before.slot
            found = Head(run=run_id, commits=commits, head=link, slots=slots, slot=slot)
            if found.is_further(before):
                self._noted[run_id] = found
                self._unwritten.add(run_id)
                self._remember()

    def write(self) -> None:
        """Add the noted heads to the file; after a failure they are dropped without an error."""
        with self._lock.here():
            if self not in _pending:
                return
            _pending.discard(self)
            for write in self.beside:
                write()
            self._written_s = time.monotonic()
            noted, self._unwritten = [self._noted[name] for name in self._unwritten], set()
            try:
                with folder.locked(self._path) as opened:
                    kept = self._read(partial(folder.read_in, opened))
                    if kept is None or kept.registry == self._registry:
                        folder.replace(opened, self._name, self._merged(kept, noted).encode())
            except OSError as error:
                _say(self.url, error)

    def keep(self, suffix: str, data: bytes) -> None:
        """Keep a file beside the heads, in place of an earlier one; a failure is no error."""
        try:
            with folder.locked(self._path) as opened:
                folder.replace(opened, folder.beside(self._name, suffix), data)
        except OSError as error:
            _say(self.url, error)

    def kept(self, suffix: str) -> bytes | None:
        """Return the bytes of a file beside the heads; `None` if there is none that can be read."""
        try:
            return folder.read(self._path, folder.beside(self._name, suffix))
        except OSError as error:
            _say(self.url, error)
            return None

    def path(self, suffix: str) -> str | None:
        """Return the path of a file that grows beside the heads; `None` without a folder."""
        try:
            with folder.locked(self._path):
                return f"{self._path}/{folder.beside(self._name, suffix)}"
        except OSError as error:
            _say(self.url, error)
            return None

    @contextmanager
    def alone(self, suffix: str) -> Iterator[bool]:
        """Hold a lock beside the heads; yield whether no other process of this machine has it."""
        fd, is_alone = -1, True
        try:
            if path := self.path(suffix):
                fd = os.open(path, os.O_RDWR | os.O_CREAT | OPEN, 0o600)
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            is_alone = False
        except OSError as error:
            _say(self.url, error)
        try:
            yield is_alone
        finally:
            if fd >= 0:
                os.close(fd)

    def _merged(self, kept: HeadsFile | None, noted: Iterable[Head]) -> HeadsFile:
        heads = HeadLines(kept.heads.lines if kept is not None else None)
        for head in noted:
            if head.is_further(heads.get(head.run)):
                heads.add(head)
        epoch = max(self._epoch, kept.epoch if kept is not None else 0)
        return HeadsFile(self._registry, self.url, epoch, heads.newest(MAX_RUNS))

    def _read(self, read: Callable[[str], bytes | None]) -> HeadsFile | None:
        try:
            data = read(self._name)
            return None if data is None else HeadsFile.decode(data, where=self._name)
        except (OSError, RegistryError) as error:
            _say(self.url, error)
            return None

    def _remember(self) -> None:
        _pending.add(self)
        if time.monotonic() - self._written_s >= _WRITE_EVERY_S:
            self.write()


#: Heads that are not written yet; the end of the program writes those of open registries.
_pending: set[Heads] = set()


@atexit.register
def _write_all() -> None:
    for heads in list(_pending):
        heads.write()


def open_heads(location: Location, *, wanted: bool = True) -> Heads | None:
    """Return the heads of the registry at a location; `None` if heads are not remembered."""
    said = os.environ.get(MEMORY) or "1"
    if said not in ("0", "1"):
        raise InvalidInput("neither 0 nor 1", where=MEMORY, expected="0 or 1", found=repr(said))
    path = folder.state_folder()
    if not wanted or said == "0" or location.scheme == "memory" or path is None:
        return None
    return Heads(location, path)


def forget(location: Location) -> bool:
    """Forget the heads of the registry at a location; return whether there were any."""
    name, path = folder.place_name(location), folder.state_folder()
    return path is not None and _forget(path, name)


def _forget(path: str, name: str) -> bool:
    try:
        with folder.locked(path) as opened:
            is_known = folder.remove(opened, name)
            folder.remove_all(opened, name)
            return is_known
    except OSError as error:
        raise InvalidInput(
            "the heads that were seen cannot be removed",
            where=f"{path}/{name}",
            found=error.strerror or error,
        ) from error


def _say(url: str, error: Exception) -> None:
    _LOGGER.debug("the heads that were seen of %s are not remembered: %s", url, error)
