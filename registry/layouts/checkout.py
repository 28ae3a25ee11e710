"""Write a run as the folder of a system, and bring such a folder up to date.

Each file is written under `.holdfast-checkout/`, noted, and then renamed. So a file is whole or
absent, a link never points to nothing, and a crash leaves no file without a note.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from holdfast.backends.local.disk import sync_folder
from holdfast.registry import formats
from holdfast.registry.errors import InvalidInput, RegistryError
from holdfast.registry.formats import fail, put_file
from holdfast.registry.layouts.contents import RunContents, noted_files
from holdfast.registry.layouts.made import TAKEN_IN, Made, MadeFile, digest, stamp
from holdfast.registry.layouts.table import Entry, Link, StateFile, TextFile, layout_named
from holdfast.registry.values import check_path_names
from holdfast.registry.writing import Committer

#: ioctl of Linux: make a file share the blocks of another one, copied when either is written to.
_FICLONE: Final = 0x40049409


@dataclass(slots=True)
class CheckoutReport:
    """Report of a checkout."""

    #: Names of files and links that were written or replaced.
    written: list[str] = field(default_factory=list)
    #: Names of files and links that were right already.
    kept: list[str] = field(default_factory=list)
    #: Names of removed files and links, which the run no longer has.
    removed: list[str] = field(default_factory=list)
    #: Names that a checkout would write or remove, but that others made or changed, each with the
    #: reason; they stay as they are.
    left: dict[str, str] = field(default_factory=dict)


def check_out(committer: Committer, root: Path, name: str) -> CheckoutReport:
    """Bring a folder up to date with a run."""
    if root.exists() and not root.is_dir():
        raise InvalidInput("not a folder", where=root, hint="Choose the path of a folder.")
    contents = RunContents(committer)
    entries = list(layout_named(name).entries(contents))
    taken_in: dict[str, str] = {}
    for record in contents.run.live(None):
        taken_in |= noted_files(record, name)
    check_path_names([*(one.path for one in entries), *_sidecars(entries)], root)
    try:
        absent = [one for one in (root, *root.parents) if not one.exists()]
        root.mkdir(parents=True, exist_ok=True)
        for one in absent:
            sync_folder(one.parent)
        made = Made(root, committer.log.run_id, name)
        with made.locked() as staging:
            return _Checkout(root, made, staging, taken_in).run(entries)
    except RegistryError:
        raise
    except OSError as error:
        fail(error, root, 0)


def _sidecars(entries: Iterable[Entry]) -> list[str]:
    return [f"{one.path}.sha256" for one in entries if isinstance(one, StateFile) and one.sidecar]


class _Checkout:
    """One checkout under way."""

    def __init__(self, root: Path, made: Made, staging: Path, taken_in: Mapping[str, str]) -> None:
        self._root, self._made, self._staging = root, made, staging
        self._taken_in = taken_in  # digests, by name, of files that an import took in
        self._report = CheckoutReport()
        self._wanted: set[str] = set()
        self._copies: dict[str, str] = {}

    def run(self, entries: list[Entry]) -> CheckoutReport:
        for entry in entries:
            if isinstance(entry, StateFile):
                self._state(entry)
            elif isinstance(entry, TextFile):
                self._text(entry.path, entry.data)
        for entry in entries:  # links last: they must not point to a file that is not there
            if isinstance(entry, Link):
                self._link(entry)
        for path in sorted(set(self._made.files) - self._wanted):
            self._remove(path)
        return self._report

    # Files

    def _state(self, entry: StateFile) -> None:
        known = self._known(entry)
        if known and all(self._made.is_current(path, entry.key) for path in known):
            for path in known:
                self._keep(path)
        elif self._is_taken_in(entry):
            self._keep(entry.path)
        else:
            self._write(entry)
        if entry.sidecar and entry.path in self._made.files:
            line = f"{self._made.files[entry.path].sha256}  {Path(entry.path).name}\n"
            self._text(f"{entry.path}.sha256", line.encode())
        if entry.path in self._made.files:
            self._copies.setdefault(entry.key, entry.path)

    def _is_taken_in(self, entry: StateFile) -> bool:
        """Return whether another program wrote the file, and the run has its state from there."""
        path, key = entry.path, f"{TAKEN_IN}{entry.key}"
        if self._made.is_current(path, key):
            return True
        here, sha256 = self._root / path, self._taken_in.get(path)
        if sha256 is None or here.is_symlink() or not here.exists() or digest(here) != sha256:
            return False
        if here.is_file():  # a folder is compared at each checkout
            self._made.note(path, MadeFile(key, sha256, "", stamp(here)))
        return True

    def _known(self, entry: StateFile) -> list[str]:
        """Return the noted files of an entry: one file, or the files in its folder."""
        inside = f"{entry.path}/"
        return [one for one in self._made.files if one == entry.path or one.startswith(inside)]

    def _write(self, entry: StateFile) -> None:
        if not self._may_write(entry.path):
            self._wanted.update(self._known(entry))
            return
        staged = self._staging / f"state{Path(entry.path).suffix}"  # which says what is compressed
        if not self._copy(entry, staged):
            state = entry.source if entry.state is None else entry.state()
            formats.write(staged, state, format=entry.format, only=entry.only)
        if staged.is_dir():
            self._place_folder(staged, entry)
        else:
            self._place(staged, entry.path, MadeFile(entry.key, digest(staged)))

    def _copy(self, entry: StateFile, staged: Path) -> bool:
        """Copy an equal file of the tree; return whether it has the noted bytes."""
        other = self._copies.get(entry.key)
        if other is None or not _copied(self._root / other, staged):
            return False
        if digest(staged) == self._made.files[other].sha256:
            return True
        staged.unlink()  # somebody edits the other file
        return False

    def _place_folder(self, staged: Path, entry: StateFile) -> None:
        """Give a folder its name: whole, or file by file if an older one is there."""
        names = sorted(str(one.relative_to(staged)) for one in staged.rglob("*") if one.is_file())
        check_path_names(names, entry.path)
        target = self._folder_of(entry.path) / Path(entry.path).name
        for name in names:
            path = f"{entry.path}/{name}"
            made = MadeFile(entry.key, digest(staged / name), "", stamp(staged / name))
            self._made.note(path, made)
            self._done(path)
        if target.is_dir():
            shutil.rmtree(target)  # every file in it is ours: `_may_write` has looked
        staged.rename(target)
        sync_folder(target.parent)

    def _text(self, path: str, data: bytes) -> None:
        staged = self._staging / "text"
        staged.unlink(missing_ok=True)
        put_file(staged, data)
        found = digest(staged)
        here = self._root / path
        is_equal = here.is_file() and not here.is_symlink() and digest(here) == found
        if is_equal or self._made.is_current(path, f"text:{found}"):
            self._keep(path)
        elif self._may_write(path):
            self._place(staged, path, MadeFile(f"text:{found}", found))

    def _link(self, entry: Link) -> None:
        key = f"link:{entry.target}"
        if self._made.is_current(entry.path, key):
            self._keep(entry.path)
        elif not os.path.lexists((self._root / entry.path).parent / entry.target):
            self._leave(entry.path, f"{entry.target} is not there")
        elif self._points_to_ours(entry) or self._may_write(entry.path):
            staged = self._staging / "link"
            staged.unlink(missing_ok=True)
            staged.symlink_to(entry.target)
            self._place(staged, entry.path, MadeFile(key, target=entry.target))

    def _points_to_ours(self, entry: Link) -> bool:
        """Return whether a link, which has no bytes to lose, names a file of the run or nothing."""
        here = self._root / entry.path
        if not here.is_symlink():
            return False
        self._folder_of(entry.path)
        target = str(Path(entry.path).parent / here.readlink())
        return target in self._wanted or not here.exists()

    def _place(self, staged: Path, path: str, made: MadeFile) -> None:
        """Note a finished file, then give it its name, unless that is the name of a folder."""
        target = self._folder_of(path) / Path(path).name
        if target.is_dir() and not target.is_symlink():
            staged.unlink()  # the next file is staged under the same name
            self._leave(path, "it is a folder")
            return
        if not made.target:
            made = MadeFile(made.key, made.sha256, "", stamp(staged))
        self._made.note(path, made)
        staged.replace(target)
        sync_folder(target.parent)
        self._done(path)

    def _done(self, path: str) -> None:
        self._wanted.add(path)
        self._report.written.append(path)

    def _keep(self, path: str) -> None:
        self._wanted.add(path)
        self._report.kept.append(path)

    def _may_write(self, path: str) -> bool:
        """Return whether the name is free, or belongs to a file that a checkout made."""
        here = self._root / path
        self._folder_of(path)
        if here.is_dir() and not here.is_symlink():
            inside = [str(one.relative_to(self._root)) for one in here.rglob("*")]
            strange = [one for one in inside if not self._is_free(one)]
        else:
            strange = [] if self._is_free(path) else [path]
        for one in strange:
            is_known = one in self._made.files
            why = "it was changed" if is_known else "no checkout has made it"
            self._leave(one, f"{why}; to have that of the run, move it away")
        return not strange

    def _leave(self, path: str, why: str) -> None:
        self._wanted.add(path)
        self._report.left[path] = why

    def _is_free(self, path: str) -> bool:
        here = self._root / path
        is_folder = here.is_dir() and not here.is_symlink()
        return is_folder or not os.path.lexists(here) or self._made.is_ours(path)

    def _folder_of(self, path: str) -> Path:
        """Make the folder of a file, and return it; no part of it may be a link."""
        here = self._root
        for part in Path(path).parts[:-1]:
            here = here / part
            with suppress(FileExistsError):
                here.mkdir()
                sync_folder(here.parent)
            if here.is_symlink() or not here.is_dir():
                raise InvalidInput(
                    "a folder of the layout is something else",
                    where=here,
                    expected="a folder",
                    found="a symlink" if here.is_symlink() else "a file",
                    hint="Move it away, or check the run out elsewhere.",
                )
        return here

    def _remove(self, path: str) -> None:
        here = self._root / path
        is_there = os.path.lexists(here)
        if is_there and self._made.files[path].key.startswith(TAKEN_IN):
            self._report.left[path] = "the run no longer has it, and another program made it"
            is_there = False
        if is_there and not self._made.is_ours(path):
            self._report.left[path] = "the run no longer has it, and it was changed"
            return
        if is_there:
            here.unlink()
            sync_folder(here.parent)
            self._report.removed.append(path)
        self._made.note(path, None)
        for folder in here.parents:
            if folder == self._root or not folder.is_relative_to(self._root):
                break
            with suppress(OSError):  # others may have files in it
                folder.rmdir()


def _copied(source: Path, target: Path) -> bool:
    """Copy a file of the folder; share its blocks if the file system can."""
    if source.is_symlink() or not source.is_file():
        return False
    with source.open("rb") as read, target.open("xb") as write:
        try:
            fcntl.ioctl(write.fileno(), _FICLONE, read.fileno())
        except OSError:
            shutil.copyfileobj(read, write, 2**20)
        write.flush()
        os.fsync(write.fileno())
    return True
