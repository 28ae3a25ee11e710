"""The folders above the states: the registry, runs, phases, and tags and their like.

Reads a path from left to right, so each step has one meaning (section 38 of the specification).
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator

from holdfast.registry.adapters.filesystem.session import File, Folder, Session
from holdfast.registry.adapters.filesystem.state_folder import COMPANIONS, StateFolder, is_file_name
from holdfast.registry.errors import NotFound
from holdfast.registry.face import Run, is_digest
from holdfast.registry.history import phase_segment
from holdfast.registry.loading import Checkpoint, Stored
from holdfast.registry.spec import Monitor

#: Folders of pins -> the kind of their pins.
_PINS = {"tags": "tag", "gates": "gate", "releases": "release", "artifacts": "artifact"}
_STEP = re.compile(r"step\d{1,16}")
#: The most states whose files are kept.
_KEPT_STATES = 16


class RefsTree:
    """Everything that an instance of the file system shows."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._states: OrderedDict[str, Folder] = OrderedDict()

    def forget(self) -> None:
        """Resolve every ref again at its next use."""
        with self._session.lock:
            self._session.forget()
            self._states.clear()

    @property
    def root(self) -> Folder:
        """The folder of runs."""
        return Folder(lambda: self._session.registry.run_names(), self._run, has_folders_only=True)

    def _run(self, name: str) -> Folder | None:
        run = self._session.run(name)
        if run is None:
            return self._state(name) if is_digest(name) else None
        return Folder(
            lambda: self._names_in_run(run),
            lambda step: self._in_run(run, step),
            has_folders_only=True,
        )

    def _names_in_run(self, run: Run) -> Iterator[str]:
        for name in ("latest", "best"):
            if self._in_run(run, name) is not None:
                yield name
        yield from map(phase_segment, run.manifest.phases_saved)
        for name, kind in _PINS.items():
            if run.manifest.pins_of(kind):
                yield name
        if run.manifest.roster():
            yield "pool"

    def _in_run(self, run: Run, step: str) -> Folder | None:
        ref = f"{run.id}/{step}"
        if step == "latest" or is_digest(step):
            return self._state(ref)
        if step == "best":
            return self._best(ref, run.manifest.monitors)
        if step in _PINS:
            pins = run.manifest.pins_of(_PINS[step])
            names = [pin.name for pin in pins]
            if step == "releases" and run.manifest.release is not None:
                names.append("latest")
            return self._states_below(ref, names)
        if step == "pool":
            return self._states_below(ref, [f"v{one.version:04d}" for one in run.manifest.roster()])
        phase = _phase_named(run, step) or _phase_named(run.refresh(), step)
        return None if phase is None else self._phase(run, phase)

    def _states_below(self, ref: str, names: Iterable[str]) -> Folder:
        return Folder(
            lambda: names, lambda name: self._state(f"{ref}/{name}"), has_folders_only=True
        )

    def _phase(self, run: Run, phase: str) -> Folder:
        ref = f"{run.id}/{phase_segment(phase)}"

        def names() -> Iterator[str]:
            for name in ("latest", "best"):
                if get(name) is not None:
                    yield name
            yield from (f"step{record.step:08d}" for record in run.manifest.live(phase))

        def get(step: str) -> Folder | None:
            if step == "best":
                return self._best(f"{ref}/best", run.manifest.spec.phase(phase).monitors)
            is_named = step == "latest" or _STEP.fullmatch(step)
            return self._state(f"{ref}/{step}") if is_named else None

        return Folder(names, get, has_folders_only=True)

    def _best(self, ref: str, monitors: Iterable[Monitor]) -> Folder | None:
        """Return the files of the best, and below it the best by each metric."""
        best = self._state(ref)
        labels = [one.label for one in monitors if "/" not in one.label]
        metrics = [name for name in labels if not is_file_name(name)]
        if best is None and not any(self._state(f"{ref}/{name}") for name in metrics):
            return None

        def names() -> Iterator[str]:
            if best is not None:
                yield from best.names()
            # By the first monitor it is this very state.
            others = metrics if best is None else metrics[1:]
            yield from (name for name in others if self._state(f"{ref}/{name}") is not None)

        def get(step: str) -> File | Folder | None:
            if is_file_name(step):
                return None if best is None else best.get(step)
            return self._state(f"{ref}/{step}")

        return Folder(names, get, state_id=None if best is None else best.state_id)

    def _state(self, ref: str) -> Folder | None:
        """Return the files of the state that a ref names; None if it names nothing."""
        with self._session.lock:
            if ref in self._states:
                self._states.move_to_end(ref)
                return self._states[ref]
            stored = self._session.find(ref)
            return None if stored is None else self._keep(ref, stored)

    def _keep(self, ref: str, stored: Stored) -> Folder:
        def companion(name: str) -> Folder | None:
            below = f"{ref}/{COMPANIONS}/{name}"
            try:
                # Of this very state, whatever the ref means by now.
                found = stored.companion(name) if isinstance(stored, Checkpoint) else None
            except NotFound:
                found = None
            with self._session.lock:
                return (
                    None if found is None else self._states.get(below) or self._keep(below, found)
                )

        made = StateFolder(stored, self._session.recent, companion).folder
        self._states[ref] = made
        if len(self._states) > _KEPT_STATES:
            self._states.popitem(last=False)
        return made


def _phase_named(run: Run, step: str) -> str | None:
    declared = [phase.name for phase in run.manifest.spec.phases]
    known = [*run.manifest.phases_saved, *declared]
    return next((phase for phase in known if step in (phase, phase_segment(phase))), None)
