"""`holdfast://` as fsspec sees it: a file system that is read.

Owns the methods of fsspec, and translates between its conventions and ours: an absent path is a
`FileNotFoundError`, everything else that fails keeps its type. `RefsTree` has the folders above the
states: the registry, runs, phases, and tags and their like. It reads a path from left to right, so
each step has one meaning (section 38 of the specification).
"""

from __future__ import annotations

import os
import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from fsspec import AbstractFileSystem
from fsspec.callbacks import DEFAULT_CALLBACK, Callback
from fsspec.spec import AbstractBufferedFile

from holdfast.backends.escape import quoted
from holdfast.backends.opening import Transport
from holdfast.registry.adapters.filesystem.session import (
    File,
    Folder,
    Options,
    Resolved,
    Session,
    is_name,
)
from holdfast.registry.adapters.filesystem.state_folder import COMPANIONS, StateFolder, is_file_name
from holdfast.registry.errors import NoSuchPath, NotFound, ReadOnlyStore
from holdfast.registry.face import Run, is_digest
from holdfast.registry.formats import new_file
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


class HoldfastFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """The stored states of a registry as files: `holdfast://RUN/best/model.safetensors`.

    Every byte that it returns was verified, and a range fetches only the chunks that it touches.
    `docs/fsspec.md` describes the files. fsspec keeps one instance for equal options. An instance
    resolves a ref once, until `invalidate_cache()`.

    Args:
        registry: The URL or path of the registry. Default: the environment variable
            `HOLDFAST_REGISTRY`.
        storage_options: Options of its store; see `holdfast.open`, like those below.
        expect_id: The registry's id as it was remembered.
        cache: A folder of a local disk that keeps the chunks that are read.
        remember: Whether to check and remember the heads of its logs.
        transport: Library that moves the bytes of S3.
        resolved: Resolved refs, which a pickled instance keeps.
        asynchronous: No effect; zarr passes it.
        loop: No effect.
        use_listings_cache: No effect.
        listings_expiry_time: No effect.
        max_paths: No effect.
    """

    protocol = "holdfast"
    root_marker = ""

    def __init__(
        self,
        registry: str | os.PathLike[str] | None = None,
        *,
        storage_options: Mapping[str, Any] | None = None,
        expect_id: str | None = None,
        cache: str | None = None,
        remember: bool = True,
        transport: Transport | None = None,
        resolved: Mapping[str, Resolved] | None = None,
        asynchronous: bool = False,
        loop: object = None,
        use_listings_cache: bool = True,
        listings_expiry_time: float | None = None,
        max_paths: int | None = None,
    ) -> None:
        super().__init__(asynchronous=asynchronous, loop=loop, use_listings_cache=False)
        place = os.environ.get("HOLDFAST_REGISTRY") if registry is None else os.fspath(registry)
        self._options = Options(place, storage_options, expect_id, cache, remember, transport)
        self._open_session(resolved or {})

    def _open_session(self, resolved: Mapping[str, Resolved]) -> None:
        self._session = Session(self._options, resolved)
        self._refs = RefsTree(self._session)

    @property
    def _tree(self) -> RefsTree:
        if self._session.pid != os.getpid():  # locks and connections stay with the parent
            self._open_session(self._session.resolved)
        return self._refs

    def __reduce__(self) -> tuple[Any, ...]:
        options = {
            **self.storage_options,
            "registry": self._options.registry,
            "resolved": dict(self._session.resolved),
        }
        return _instance, (type(self), options)

    def invalidate_cache(self, path: str | None = None) -> None:
        """Resolve every ref again at its next use.

        Args:
            path: No effect: refs can share a state.
        """
        self._tree.forget()

    # Paths

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        found = super()._strip_protocol(path)
        return found.lstrip("/") if isinstance(found, str) else found

    def _find(self, path: str) -> tuple[File | Folder, str | None]:
        """Return the file or folder at a path, and the id of its state."""
        node: File | Folder | None = self._tree.root
        state_id = None
        steps = path.split("/") if path else []
        for number, step in enumerate(steps):
            if isinstance(node, Folder):
                node = node.get(step) if is_name(step) else None
                state_id = (node.state_id if isinstance(node, Folder) else None) or state_id
            else:
                node = None
            if node is None:
                where = "/".join(steps[: number + 1])
                raise NoSuchPath(
                    "no such file or folder",
                    where=f"holdfast://{path}",
                    found=f"nothing at {quoted(where)}" if where != path else None,
                    hint="`ls` lists the runs, the refs of a run, and the files of a state.",
                )
        assert node is not None
        return node, state_id

    def _find_file(self, path: str) -> File:
        node, _ = self._find(path)
        if isinstance(node, Folder):
            raise NoSuchPath("a folder and not a file", where=f"holdfast://{path}")
        return node

    # Looking

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        """List a folder, or a file as itself.

        Raises:
            NoSuchPath: There is no such path.
        """
        path = self._strip_protocol(path)
        node, state_id = self._find(path)
        if not isinstance(node, Folder):
            return [_info(path, node, state_id) if detail else path]
        # A name such as `..` would lead a copy of the folder out of it.
        named = (name for name in node.names() if is_name(name))
        paths = {f"{path}/{name}" if path else name: name for name in named}
        if not detail:
            return sorted(paths)
        if node.has_folders_only:
            return [_info(below, node, None) for below in sorted(paths)]
        found = {below: node.get(paths[below]) for below in sorted(paths)}
        return [_info(below, one, state_id) for below, one in found.items() if one is not None]

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        """Return name, type and size in bytes of a path; of a file also the `id` of its state.

        Raises:
            NoSuchPath: There is no such path.
        """
        path = self._strip_protocol(path)
        return _info(path, *self._find(path))

    def exists(self, path: str, **kwargs: Any) -> bool:
        """Return whether there is such a path; a store that fails is an error, not an answer."""
        try:
            self.info(path)
        except FileNotFoundError:
            return False
        return True

    # Reading

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any
    ) -> bytes:
        """Return a file, or a range of it.

        Args:
            path: The file.
            start: The first byte; negative numbers count from the end, like those of `end`.
            end: The byte after the last.
            kwargs: No effect.

        Raises:
            NoSuchPath: There is no such file.
            IntegrityError: A chunk is damaged or missing.
        """
        file = self._find_file(self._strip_protocol(path))
        first, stop, _ = slice(start, end).indices(file.size)
        return file.read(first, max(first, stop))

    def get_file(
        self,
        rpath: str,
        lpath: Any,
        callback: Callback = DEFAULT_CALLBACK,
        outfile: Any = None,
        **kwargs: Any,
    ) -> None:
        """Copy a file to the local disk, whole or not at all; a file of that path is replaced."""
        if outfile is not None or not isinstance(lpath, str | os.PathLike) or self.isdir(rpath):
            super().get_file(rpath, lpath, callback=callback, outfile=outfile, **kwargs)
            return
        path, size = Path(lpath), self._find_file(self._strip_protocol(rpath)).size
        path.parent.mkdir(parents=True, exist_ok=True)
        # Older versions of fsspec take no open file.
        with self.open(rpath) as source, new_file(path, size, force=True) as file:
            callback.set_size(size)
            while data := source.read(self.blocksize):
                callback.relative_update(file.write(data))

    def _open(
        self,
        path: str,
        mode: str = "rb",
        block_size: int | None = None,
        autocommit: bool = True,
        cache_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> AbstractBufferedFile:
        if mode != "rb":
            self._refuse(path)
        # The session keeps the chunks at the edges of ranges; reading ahead would move others.
        kwargs.setdefault("cache_type", "none")
        file = self._find_file(path)
        return _OpenFile(
            self, path, mode, cache_options=cache_options, size=file.size, file=file, **kwargs
        )

    # Writing

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse."""
        raise ReadOnlyStore(
            "the file system holdfast:// is only for reading",
            where=quoted(args[0]) if args else None,
            hint="Write with `run.save(state, step=...)`, `run.pins.artifacts.set(name, state)` or "
            "`holdfast push`.",
        )

    pipe_file = put_file = cp_file = mv = touch = _refuse
    mkdir = makedirs = rmdir = rm = rm_file = _refuse


class _OpenFile(AbstractBufferedFile):  # type: ignore[misc]
    """An open file; it stays the same when its ref is resolved again."""

    def __init__(self, *args: Any, file: File, **kwargs: Any) -> None:
        self._file = file
        super().__init__(*args, **kwargs)

    @property
    def readinto(self) -> NoReturn:
        """Absent: torch would use it, and replace an error in it by one of its own."""
        raise AttributeError("readinto")

    def _fetch_range(self, start: int, end: int) -> bytes:
        return self._file.read(start, min(end, self._file.size))


def _info(path: str, node: File | Folder, state_id: str | None) -> dict[str, Any]:
    if isinstance(node, Folder):
        return {"name": path, "size": 0, "type": "directory"}
    return {"name": path, "size": node.size, "type": "file", "id": state_id}


def _instance(cls: type[HoldfastFileSystem], options: dict[str, Any]) -> HoldfastFileSystem:
    return cls(**options)
