"""Follow a run into a folder, or a folder into which a program writes into a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, TypeVar

from holdfast.registry.errors import InvalidInput, RegistryError
from holdfast.registry.formats import within
from holdfast.registry.layouts.importing import ImportedFile, Importer
from holdfast.registry.layouts.scanning import check_folder, has_sidecar, identity
from holdfast.registry.layouts.table import Found
from holdfast.registry.loading.following import OVER, Patience, watching
from holdfast.registry.writing import Committer

_T = TypeVar("_T")
#: The kinds of files with sidecars, in layouts with sidecars.
_VERIFIED: Final = ("checkpoint", "gate", "pool", "artifact", "release")


def follow_run(committer: Committer, look: Callable[[], _T], patience: Patience) -> Iterator[_T]:
    """Look at a run, and again whenever its log has grown, until the run is over."""
    seen = -1
    while True:
        run = committer.log.refresh()
        if run.next_slot > seen:
            seen = run.next_slot
            yield look()
            patience.begin()
        elif patience.is_over:
            return
        if run.status in OVER or run.dropped is not None:
            return
        patience.wait()


def follow_folder(importer: Importer, quiet_s: float, patience: Patience) -> Iterator[ImportedFile]:
    """Iterate over the files of a folder as they are imported; see `RunExchange.watch_folder`."""
    if not quiet_s > 0:
        raise InvalidInput("not a time", where="quiet_s", expected="seconds, above 0")
    check_folder(importer.root)
    return _follow(importer, _Completeness(importer, quiet_s), patience)


def _follow(
    importer: Importer, completeness: _Completeness, patience: Patience
) -> Iterator[ImportedFile]:
    done: dict[str, tuple[int, ...]] = {}
    while True:
        _, found = importer.find()
        newest = {one.phase: one.path for one in found if one.kind == "checkpoint"}
        is_news = is_held = False
        for one in found:
            is_newest, known = newest.get(one.phase) == one.path, done.get(one.path)
            with within(importer.root):
                seen = completeness.of(one, is_newest=is_newest, known=known)
            is_held |= seen is None and one.kind == "pool"  # versions come in their order
            if seen is None or seen == known or (is_held and one.kind == "pool"):
                continue
            reports = importer.take(one)
            done[one.path] = seen
            for path in importer.histories.take_gone():
                done.pop(path, None)
            new = [report for report in reports if report.outcome != "there already"]
            is_news |= bool(new)
            yield from new
        if is_news:
            patience.begin()
        if patience.is_over:
            return
        patience.wait()


class _Completeness:
    """Decides whether files are complete: by their content, else by quiet time.

    Programs write a sidecar after its file, and companions after their checkpoint. So a file
    without its sidecar, one without its entries of histories, and the newest checkpoint, are
    complete after quiet time alone.
    """

    def __init__(self, importer: Importer, quiet_s: float) -> None:
        self._layout, self._root, self._quiet_s = importer.layout, importer.root, quiet_s
        self._histories = importer.histories
        self._since: dict[str, tuple[tuple[int, ...], float]] = {}

    def of(
        self, found: Found, *, is_newest: bool, known: tuple[int, ...] | None
    ) -> tuple[int, ...] | None:
        """Return a stamp of a file's present content; `None` while the file is incomplete.

        A file of a known stamp is not looked into again.
        """
        states = [found.path, *found.companions.values()]
        paths = [*states, *([] if found.beside is None else [found.beside])]
        try:
            seen = [identity(self._root / path) for path in paths]
        except (OSError, RegistryError):
            return None  # it was renamed or removed meanwhile
        stamp = tuple(number for one in seen for number in one)
        if stamp == known:
            return stamp
        waits = is_newest and self._layout.COMPANIONS
        waits |= found.kind == "pool" and found.beside is None  # its metadata may follow
        waits |= found.kind == "checkpoint" and self._histories.lacks(found)
        waits |= (
            found.kind in _VERIFIED
            and self._layout.SIDECARS
            and not all(has_sidecar(self._root / path) for path in states)
        )
        try:
            wholes = [
                self._is_whole(path, one, waits) for path, one in zip(paths, seen, strict=True)
            ]
        except (OSError, RegistryError):
            return None
        return stamp if all(wholes) else None

    def _is_whole(self, path: str, seen: tuple[int, ...], waits: bool) -> bool:
        says = self._layout.is_complete(self._root / path)
        if says is False or (says and not waits):
            return says
        now = watching._monotonic()
        before, since = self._since.get(path, ((), now))
        if before != seen:
            since = now
        self._since[path] = seen, since
        return now - since >= self._quiet_s
