"""From a repository and a revision, as a client names them, to the view that they mean.

A repository is a run, `RUN` or `PROJECT/RUN`. A revision is a ref within the run, `main`, or the 40
digits of a view. Nothing is remembered that another process could not find again: the digits name
the state by their first part, and the second part is compared with the views of that state.
"""

from __future__ import annotations

import re
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import suppress
from threading import Lock
from typing import Any

from holdfast.registry.curation import Release
from holdfast.registry.errors import InvalidInput, NotFound
from holdfast.registry.face import Run, find_in_run
from holdfast.registry.hub.views import View, ViewOptions, view_of
from holdfast.registry.loading import Checkpoint, Stored
from holdfast.registry.objects import RECENT_BYTES, RecentChunks, is_run_id
from holdfast.registry.ui import Source

MAIN = "main"
#: The project of a run that has none: some clients read only names of two parts.
NO_PROJECT = "holdfast"
#: What `main` is unless the operator says it: the first of these that there is.
_MAIN = ("releases/latest", "best", "latest")
#: The revision of a view.
EXACT = re.compile(r"[0-9a-f]{40}")
#: Seconds for which the digits of a view are answered without asking the store again.
_FRESH_S = 5.0
_KEPT_VIEWS = 32
#: The names of repositories that the clients accept, and their length.
_NAME = re.compile(r"\b[\w\-.]+\b", re.ASCII)
_LONGEST_NAME = 96


def refusal(run_id: str) -> str | None:
    """Return the reason for which the clients refuse a run's name; `None` if they accept it."""
    if len(run_id) > _LONGEST_NAME:
        return f"more than {_LONGEST_NAME} characters"
    for part in ("--", ".."):
        if part in run_id:
            return f"{part} in it"
    if not _NAME.fullmatch(run_id) or run_id.endswith(".git"):
        return "it begins or ends with a sign, or ends with .git"
    return None


class Catalog:
    """The repositories of a registry, and their views."""

    def __init__(self, source: Source, options: ViewOptions, main: str | None = None) -> None:
        self._source, self._options = source, options
        source.registry.handle.suggests = False  # clients are not told which runs there are
        self._main = _MAIN if main is None else (main,)  # the refs that `main` may mean
        self._recent = RecentChunks(RECENT_BYTES)
        self._lock = Lock()
        self._views: OrderedDict[tuple[object, ...], View] = OrderedDict()
        self._exact: OrderedDict[tuple[str, str], tuple[float, View]] = OrderedDict()

    def known(self, repo: str, revision: str) -> View | None:
        """Return the view of 40 digits that was found a moment ago: no request to the store."""
        with self._lock:
            found_s, view = self._exact.get((repo, revision), (-_FRESH_S, None))
        return view if time.monotonic() - found_s < _FRESH_S else None

    def view(self, repo: str, revision: str) -> View | None:
        """Return the view of a revision, or an error; `None` if there is no such repository."""
        project, _, name = repo.rpartition("/")
        if not is_run_id(name):
            return None
        try:
            run = self._source.run(name)
        except NotFound:
            return None
        created = run.manifest.created
        own = (created and created.project) or NO_PROJECT
        if run.manifest.dropped is not None or project not in ("", own):
            return None
        found: View | None
        if revision == MAIN:
            found = self._view(self._stored_main(run))
        elif EXACT.fullmatch(revision):
            views = (self._view(one) for one in self._candidates(run, revision[:24]))
            found = next((one for one in views if one.revision == revision), None)
        else:
            found = self._view(find_in_run(run.handle.store, run.handle.log, revision))
        if found is None:
            raise NotFound("no such revision", where=f"{run.id}: {revision}")
        with self._lock:
            _keep(self._exact, (repo, found.revision), (time.monotonic(), found))
        return found

    def _stored_main(self, run: Run) -> Stored:
        for ref in self._main:
            try:
                return find_in_run(run.handle.store, run.handle.log, ref)
            except (NotFound, InvalidInput):  # a run without monitors has no best
                continue
        raise NotFound("nothing here yet", where=f"{run.id}: {', '.join(self._main)}")

    def _candidates(self, run: Run, digits: str) -> Iterator[Stored]:
        """Yield the states of a run whose ids begin with these digits, under each name."""
        pins = [*run.manifest.pins_of("release"), *run.manifest.pins_of("artifact")]
        states = [(pin.ref, pin.manifest) for pin in pins]
        states += [(f"pool/v{one.version}", one.manifest) for one in run.manifest.roster()]
        refs = [ref for ref, digest in states if digest.hex().startswith(digits)]
        for ref in (*refs, digits):
            with suppress(NotFound):
                yield find_in_run(run.handle.store, run.handle.log, ref)

    def _view(self, stored: Stored) -> View:
        """Return the view of a state, made once while what it is made of stays."""
        run = stored.handle.log.run
        pins = [pin for pin in run.pins_of("artifact") if pin.name in self._options.artifacts]
        source = stored.source_checkpoint() if isinstance(stored, Release) else None
        under = "" if isinstance(stored, Checkpoint) else stored.ref
        evicted = None if source is None else source.handle.newest_record().evicted
        key = (run.run_id, stored.digest, under, evicted, *(pin.manifest for pin in pins))
        with self._lock:
            if key in self._views:
                self._views.move_to_end(key)
                return self._views[key]
        made = view_of(stored, self._options, self._recent)
        with self._lock:
            _keep(self._views, key, made)
        return made


def _keep(kept: OrderedDict[Any, Any], key: object, value: object) -> None:
    kept[key] = value
    kept.move_to_end(key)
    if len(kept) > _KEPT_VIEWS:
        kept.popitem(last=False)
