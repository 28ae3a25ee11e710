"""`holdfast://` as fsspec sees it: a file system that is read.

Owns the methods of fsspec, and translates between its conventions and ours: an absent path is a
`FileNotFoundError`, everything else that fails keeps its type.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from fsspec import AbstractFileSystem
from fsspec.callbacks import DEFAULT_CALLBACK, Callback
from fsspec.spec import AbstractBufferedFile

from holdfast.backends.escape import quoted
from holdfast.backends.opening import Transport
from holdfast.registry.adapters.filesystem.refs_tree import RefsTree
from holdfast.registry.adapters.filesystem.session import (
    File,
    Folder,
    Options,
    Resolved,
    Session,
    is_name,
)
from holdfast.registry.errors import NoSuchPath, ReadOnlyStore
from holdfast.registry.formats import new_file


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
        """Refuse.

        Raises:
            ReadOnlyStore: Always.
        """
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
