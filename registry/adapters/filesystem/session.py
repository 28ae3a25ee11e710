"""The open registry behind a file system, and the files and folders that paths lead to."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from threading import RLock
from typing import Any, Protocol

from holdfast.backends.opening import Transport
from holdfast.registry.errors import AmbiguousRef, Conflict, InvalidInput, NotFound
from holdfast.registry.face import Registry, Run, find_in_run
from holdfast.registry.face import open as open_registry
from holdfast.registry.loading import Checkpoint, Stored
from holdfast.registry.objects import RECENT_BYTES, RecentChunks

#: A state as it is found again: its run, its commit or its exact ref in the run, and its id.
Resolved = tuple[str, int | str, str]


@dataclass(frozen=True, slots=True)
class Options:
    """How the registry is opened; see `holdfast.open`."""

    registry: str | None  # its URL; None for `HOLDFAST_REGISTRY`
    #: Options of its store.
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)
    expect_id: str | None = None
    cache: str | None = None  # the folder of the chunk cache
    remember: bool = True  # whether to check and remember the heads of its logs
    transport: Transport | None = None  # the library that moves the bytes of S3


class Session:
    """A registry that is opened at the first use, in the process that uses it.

    Each run is read once, and each ref is resolved once, until `forget`.
    """

    def __init__(self, options: Options, resolved: Mapping[str, Resolved]) -> None:
        self._options = options
        self._registry: Registry | None = None
        self._runs: dict[str, Run] = {}
        self.pid = os.getpid()  # the process that it belongs to
        self.lock = RLock()  # held while refs are resolved
        self.recent = RecentChunks(RECENT_BYTES)  # the chunks that were read last
        self.resolved = dict(resolved)

    @property
    def registry(self) -> Registry:
        """The registry."""
        with self.lock:
            if self._registry is None:
                options = self._options
                self._registry = open_registry(
                    options.registry,
                    read_only=True,
                    expect_id=options.expect_id,
                    cache=options.cache,
                    remember=options.remember,
                    storage_options=options.storage_options,
                    transport=options.transport,
                )
            return self._registry

    def forget(self) -> None:
        """Forget all states and resolved refs; the next use looks again."""
        with self.lock:
            self._runs.clear()
            self.resolved.clear()

    def run(self, name: str) -> Run | None:
        """Return a run as it was at its first use; None if no run has this name."""
        with self.lock:
            if name not in self._runs:
                registry = self.registry  # its own errors are no answer
                try:
                    self._runs[name] = registry.run(name)
                except (NotFound, InvalidInput):
                    return None
            return self._runs[name]

    def find(self, ref: str) -> Stored | None:
        """Return the state that a ref names, always the same; None if it names nothing."""
        with self.lock:
            if ref in self.resolved:
                return self._again(ref, *self.resolved[ref])
            name, _, path = ref.partition("/")
            found = self._find_in(name, path) if path else self._find_id(ref)
            if found is not None:
                exact = found.ref.partition("/")[2]
                at = found.handle.n if isinstance(found, Checkpoint) else exact
                self.resolved[ref] = found.run_id, at, found.digest.hex()
            return found

    def _find_id(self, digits: str) -> Stored | None:
        try:
            return self.registry.stored(digits)
        except AmbiguousRef:
            raise
        except NotFound:
            return None

    def _find_in(self, name: str, path: str) -> Stored | None:
        run = self.run(name)
        if run is None:
            return None
        for is_fresh in (False, True):
            try:
                handle = (run.refresh() if is_fresh else run).handle
                return find_in_run(handle.store, handle.log, path)
            except AmbiguousRef:
                raise
            except NotFound:
                continue  # somebody may have saved it meanwhile
            except InvalidInput:
                break
        return None

    def _again(self, ref: str, run_id: str, at: int | str, digest: str) -> Stored:
        run = self.run(run_id)
        found = None
        if run is not None:
            found = run.history.checkpoint(at) if isinstance(at, int) else self._find_in(run_id, at)
        if found is None or found.digest.hex() != digest:
            raise Conflict(
                "a ref that was resolved before names another state, or none",
                where=ref,
                expected=digest,
                found=None if found is None else found.digest.hex(),
                hint="Call `invalidate_cache()` on the file system to resolve its refs again.",
            )
        return found


def is_name(text: str) -> bool:
    """Return whether a text names an entry of a folder, and is no step of a path."""
    return text not in ("", ".", "..") and not {"/", "\0"}.intersection(text)


class File(Protocol):
    """A file whose bytes are made when they are read."""

    @property
    def size(self) -> int:
        """Its length in bytes."""

    def read(self, start: int, stop: int) -> bytes:
        """Return a range that is within the file, every byte verified."""


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder whose entries are found when they are asked for."""

    names: Callable[[], Iterable[str]]  # returns the names that a listing shows
    #: Returns the file or folder of a name; None if there is none. It may know more names.
    get: Callable[[str], File | Folder | None]
    #: Whether all that it lists are folders, so that a listing need not ask.
    has_folders_only: bool = False
    state_id: str | None = None  # the id of the state whose files it holds; None for other folders

    @classmethod
    def of(cls, entries: Mapping[str, File | Folder]) -> Folder:
        """Return a folder of known entries."""
        return cls(lambda: entries, entries.get)


@dataclass(frozen=True, slots=True)
class Literal:
    """A file whose bytes are known."""

    data: bytes

    @property
    def size(self) -> int:
        """Its length in bytes."""
        return len(self.data)

    def read(self, start: int, stop: int) -> bytes:
        """Return a range of it."""
        return self.data[start:stop]
