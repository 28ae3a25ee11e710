"""A disk that loses power: it knows which names of a folder would survive.

A new name is certain to survive only after a sync of its folder that began later; the same holds
for each folder above it. A removed name does not survive, which is the worst case: nobody syncs a
removal.
"""

# Paths stay strings here, as in the backend that is watched.
# ruff: noqa: PTH112, PTH115, PTH118, PTH120, PTH123
from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast.backends.local import disk
from holdfast.backends.wrappers import InjectedCrash
from tests.support.stores import Scratch


class Disk:
    """The files below a folder, at present and after a power loss.

    Args:
        base: The folder; it stays.
        patch: Puts this between the process and its system calls, for as long as a test lasts.

    Attributes:
        events: Names made and folders synced so far.
        syncs: The folder of each event that is a sync, by its number.
        dies_at: Number of the event at which the process dies, before it comes to pass.
    """

    def __init__(self, base: Path, patch: pytest.MonkeyPatch) -> None:
        self.base = str(base.resolve())
        self.events = 0
        self.syncs: dict[int, str] = {}
        self.dies_at = 0
        self._lasting: dict[str, bytes | None] = {}
        self._pending: dict[str, bytes | None] = {}
        self._link, self._mkdir, self._replace = os.link, os.mkdir, os.replace
        self._unlink, self._sync = os.unlink, disk.sync_folder
        for name in ("link", "mkdir", "replace", "unlink"):
            patch.setattr(os, name, getattr(self, f"_noted_{name}"))
        patch.setattr(disk, "sync_folder", self._noted_sync)
        patch.setattr(disk, "sync", lambda _fd: None)  # of data, which is synced before it is named

    def settle(self) -> None:
        """Take what is there now for durable, and count from here on."""
        self._pending.clear()
        self._lasting = {
            os.path.join(folder, name): None if name in folders else self._read(folder, name)
            for folder, folders, files in os.walk(self.base)
            for name in (*folders, *files)
        }
        self.restart()

    def restart(self) -> None:
        """Count from here on, in a process that lives."""
        self.events, self.syncs, self.dies_at = 0, {}, 0

    @property
    def pending(self) -> list[str]:
        """The names that a loss of power may take."""
        return [path for path in self._pending if f"{os.sep}.tmp{os.sep}" not in path]

    def survivors(self, root: Path, lost: str | None = None) -> Scratch:
        """Return what a loss of power leaves of a store.

        Args:
            root: The store's folder.
            lost: The one name that is lost; without it each one that may be.
        """
        kept = {path: data for path, data in self._lasting.items() if path != lost}
        if lost is not None:
            kept |= {path: data for path, data in self._pending.items() if path != lost}
        store = Scratch()
        top = str(root.resolve())
        for path, data in kept.items():
            key = os.path.relpath(path, top)
            if data is None or key.startswith((os.pardir, ".tmp")):
                continue
            if all(str(above) in kept for above in Path(path).parents if self._is_inside(above)):
                store.put(key, data)
        return store

    def _is_inside(self, path: str | Path) -> bool:
        return str(path).startswith(self.base + os.sep)

    def _read(self, *parts: str) -> bytes:
        with open(os.path.join(*parts), "rb") as file:
            return file.read()

    def _event(self, path: str) -> bool:
        """Count something that happens to a path; return whether it is one of ours."""
        if not self._is_inside(path) and path != self.base:
            return False
        if self.dies_at and self.events >= self.dies_at:
            raise InjectedCrash(f"dead since event {self.events}")
        self.events += 1
        if self.events == self.dies_at:
            raise InjectedCrash(f"died at event {self.events}: {path}")
        return True

    def _noted_link(self, source: str, path: str, *, dst_dir_fd: int | None = None) -> None:
        name, path = path, _absolute(path, dst_dir_fd)
        ours = self._event(path)
        self._link(source, name, dst_dir_fd=dst_dir_fd)
        if ours:
            self._pending[path] = self._read(path)

    def _noted_mkdir(self, path: str, mode: int = 0o777) -> None:
        if os.path.isdir(path):
            return self._mkdir(path, mode)  # says that it is there; nothing happens
        ours = self._event(path)
        self._mkdir(path, mode)
        if ours:
            self._pending[path] = None
        return None

    def _noted_replace(self, source: str, path: str, *, dst_dir_fd: int | None = None) -> None:
        name, path = path, _absolute(path, dst_dir_fd)
        ours = self._event(path)
        self._replace(source, name, dst_dir_fd=dst_dir_fd)
        if ours:
            self._pending[path] = self._read(path)

    def _noted_unlink(self, path: str, *, dir_fd: int | None = None) -> None:
        name, path = path, _absolute(path, dir_fd)
        self._unlink(name, dir_fd=dir_fd)
        self._pending.pop(path, None)
        self._lasting.pop(path, None)

    def _noted_sync(self, folder: str) -> None:
        covered = [path for path in self._pending if os.path.dirname(path) == folder]
        if self._event(folder):
            self.syncs[self.events] = folder
            if not os.path.isdir(folder):
                self._sync(folder)  # fails as it should
        for path in covered:
            if path in self._pending:  # or another thread synced the folder as well
                self._lasting[path] = self._pending.pop(path)


def _absolute(name: str, folder: int | None) -> str:
    """Return the path of a name in an open folder, or the path itself."""
    return name if folder is None else os.path.join(os.readlink(f"/proc/self/fd/{folder}"), name)
