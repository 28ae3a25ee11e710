"""A stored state: its tensors and components, and how to load it.

Checkpoints, releases, artifacts and entries of the pool are such states. Reading writes nothing and
needs no writer token.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from holdfast.backends.escape import printable, quoted
from holdfast.registry import pytree
from holdfast.registry.errors import InvalidInput, NotFound, RegistryError
from holdfast.registry.loading.state_handle import StateHandle
from holdfast.registry.objects import Component, Manifest, TensorEntry
from holdfast.registry.store import LazyTensor
from holdfast.registry.values import Digest, collector_paused, near

if TYPE_CHECKING:
    from holdfast.registry.loading.destinations import LoadPrecision
    from holdfast.registry.loading.files import FileInfo
    from holdfast.registry.loading.fit import LoadReport
    from holdfast.registry.loading.tensors import TensorInfo
    from holdfast.registry.values import markup


class LazyState(Mapping[str, Any]):
    """A state, or a dict in it, that loads each value at its first access, verified, and keeps it.

    Args:
        ref: The state, for errors.
        names: The keys of the mapping.
        load: Returns the state with the value at one path alone, in the dicts that lead to it.
        below: The path of the dict; `None` for the whole state.
        depth: The number of dicts that lead to the dict at this path.
    """

    def __init__(
        self,
        ref: str,
        names: Sequence[str],
        load: Callable[[str], Any],
        below: str | None = None,
        depth: int = 0,
    ) -> None:
        self._ref, self._names, self._load = ref, dict.fromkeys(names), load
        self._below, self._depth = below, depth
        self._loaded: dict[str, Any] = {}

    def __repr__(self) -> str:
        loaded = ", ".join(self._loaded) or "nothing"
        return f"<LazyState {self._ref}: {loaded} loaded of {', '.join(self._names)}>"

    def __getitem__(self, name: str) -> Any:
        """Return a component; it is read at the first access."""
        if name not in self._names:
            raise NotFound(
                "no such component" if self._below is None else "nothing at this path",
                where=f"{self._ref}: {'' if self._below is None else f'{self._below}/'}{name}",
                expected=", ".join(self._names),
                hint=near(str(name), self._names),
            )
        if name not in self._loaded:
            if self._below is None:
                self._loaded[name] = self._load(name)[name]
            else:
                self._loaded[name] = self._load_below(name)
        return self._loaded[name]

    def __contains__(self, name: object) -> bool:
        """Return whether this is a key; nothing is read."""
        return name in self._names

    def _load_below(self, name: str) -> Any:
        value = self._load(f"{self._below}/{name}")
        for _ in range(self._depth + 1):
            (value,) = value.values()  # a path leaves one value in each dict
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def _ipython_key_completions_(self) -> list[str]:
        return list(self)

    def __len__(self) -> int:
        return len(self._names)


_LOGGER = logging.getLogger("holdfast")
#: The most narrowed tensors that a warning names.
_NAMED_AT_MOST = 4


def _load_one(stored: Stored, path: str) -> Any:
    return stored.load(only=path)


class Stored:
    """A state that a run keeps under some name. Its data is read only when it is asked for."""

    def __init__(self, handle: StateHandle) -> None:
        self._handle = handle

    @property
    def handle(self) -> StateHandle:
        """Its inner value, which other parts of Holdfast take; not for programs."""
        return self._handle

    @property
    def digest(self) -> Digest:
        """Its id: equal for equal states, in every registry."""
        return self._handle.digest

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.ref} {self.digest.short}>"

    def _repr_html_(self) -> str:
        from holdfast.registry.values import markup

        kind = type(self).__name__
        return markup.safely(
            kind,
            lambda: markup.describe(kind, self.ref, self._handle.facts(), self._html_of_parts()),
        )

    def _html_of_parts(self) -> markup.Rows | Exception:
        """Return its components; this reads the manifest, one object, unless it was read."""
        from holdfast.registry.values import markup

        try:
            # The place of a state that the run does not keep is found in the whole log.
            is_placed = self.digest in self._handle.log.run.by_manifest
            parts = self.manifest.components if is_placed else {}
        except Exception as error:  # shown in the place of the components
            return error
        heads = ("component", "tensors", "size", "types", "digest")
        rows = (_component_row(name, part) for name, part in parts.items())
        return markup.Rows(heads, rows, len(parts), "components")

    @property
    def run_id(self) -> str:
        """The run that keeps it."""
        return self._handle.log.run_id

    @property
    def ref(self) -> str:
        """Its ref, by which the registry finds it."""
        return self._handle.ref

    @property
    def size_bytes(self) -> int:
        """Bytes of all its tensors, even if the registry had most of them already."""
        return self.manifest.nbytes

    @property
    def components(self) -> dict[str, Digest]:
        """Digest of each top-level key; equal digests mean equal components, in any checkpoint."""
        return {name: part.digest for name, part in self.manifest.components.items()}

    @property
    def manifest(self) -> Manifest:
        """Its manifest: the description of the state."""
        return self._handle.manifest

    def load(
        self,
        *,
        only: str | Iterable[str] | None = None,
        map_location: object = "cpu",
        precision: LoadPrecision = "stored",
    ) -> Any:
        """Return the state, byte for byte and type for type as it was saved, every byte verified.

        Args:
            only: One component, or several; by default all. A path below a component
                (`regions/cortex`) leads through dicts; only what is at its end is read, and the
                result has the dicts around it.
            map_location: Device for the tensors, as `torch.device` or its name.
            precision: The type of tensors that were saved with less precision: as `stored`, or
                `original`; the lost bits stay lost.

        Raises:
            InvalidInput: There is no such precision or device.
            NotFound: A component or path in `only` does not exist.
            Thinned: A component was given up when the checkpoint was thinned.
            IntegrityError: An object is damaged or missing; nothing is returned.
        """
        from holdfast.registry.loading.destinations import check_device, check_load_precision

        check_load_precision(precision)
        check_device(map_location)
        return self._handle.load(only, map_location, precision)

    def load_into(
        self, target: object, *, component: str | None = None, strict: bool = True
    ) -> LoadReport:
        """Fill the tensors of a module, or of a nest of dicts and lists, in place.

        If the target's memory is contiguous and on the CPU, bytes are read directly into it,
        otherwise through a staging tensor. Plain values of the checkpoint are not loaded. A tensor
        that was saved with less precision fits a target of its stored type, and a target of its
        original type, for which it is widened exactly. Nobody else may write to the target
        meanwhile: the result would be a mixture.

        Args:
            target: An object with `state_dict()`, or a dict of tensors.
            component: The component for the target; by default the target's top-level keys are
                components.
            strict: Whether a path on only one side is an error.

        Raises:
            InvalidInput: The component is not a name.
            IncompatibleState: Paths, shapes or dtypes differ, or memory is read-only or shared in
                part; nothing was read.
            NotFound: There is no such component.
            IntegrityError: An object is damaged; do not use the target's tensors then.
        """
        from holdfast.registry.loading.fit import check_component

        named = target if check_component(component) is None else {component: target}
        manifest = self._handle.reader.begin()
        with self._handle.reader.reading():
            return self._fill(named, manifest, component, strict=strict)

    def _fill(
        self, named: object, manifest: Manifest, component: str | None, *, strict: bool
    ) -> LoadReport:
        """Fill the tensors below the keys of the state."""
        from holdfast.registry.loading.destinations import Destination
        from holdfast.registry.loading.fit import (
            LoadReport,
            check_components,
            check_fit,
            filled_once,
            leaves_by_path,
            settle,
            widened_paths,
        )
        from holdfast.registry.loading.selecting import select
        from holdfast.registry.loading.tensors import tensors_by_path

        with collector_paused():
            if component is not None:
                check_components(self.ref, [component], manifest.components)
            parts = select(self.ref, manifest, None if component is None else [component])
            sources, leaves = tensors_by_path(parts), leaves_by_path(pytree.flatten(named))
        self._handle.reader.check_held(parts)
        report = LoadReport.of(sources, leaves)
        widened = widened_paths(sources, leaves)
        check_fit(self.ref, report, sources, leaves, strict=strict, widened=widened)
        with collector_paused():
            paths = filled_once(self.ref, sources, leaves)
            wanted, into = [], {}  # what is read, and the destinations to settle afterwards
            for path in paths:
                leaf = leaves[path]
                view = leaf.in_place()
                if view is None or path in widened:
                    one = into[path] = Destination(leaf.source, widened.get(path), view=view)
                    view = one.view
                wanted.append((sources[path], view))
        del leaves  # they keep a view of every tensor
        self._handle.reader.read(manifest, wanted)
        settle(into, self._handle.store.pools.hashing)
        return report

    def files(self) -> dict[str, FileInfo]:
        """Return the files of a folder that was pushed, by name; none for any other state.

        Reads no tensors: each file's size and plain SHA-256 were noted when it was pushed.

        Raises:
            IntegrityError: The description of the folder is damaged.
        """
        from holdfast.registry.loading.files import TREE, files_in, is_tree

        if not is_tree(self.manifest.components):
            return {}
        return files_in(self._handle.load(TREE)[TREE], self.ref)

    def lazily(self, below: str | None = None) -> LazyState:
        """Return the state as a mapping that loads each component whole, at its first access.

        For a slice of one tensor index it by its path, as in `checkpoint["model/w"][:3]`.

        Args:
            below: A component, or a path as in `load(only=...)`: the mapping then has the values of
                the dict there, such as the regions below `regions`.

        Raises:
            NotFound: There is no dict at this path.
        """
        from holdfast.registry.loading.selecting import dict_at

        load = partial(_load_one, self)
        if below is not None:
            path, depth, names = dict_at(self.ref, self.manifest, below)
            return LazyState(self.ref, names, load, path, depth)
        kept = self._handle.commit_keys()
        names = tuple(self.manifest.components) if kept is None else kept.order
        return LazyState(self.ref, names, load)

    def tensors(self) -> dict[str, TensorInfo]:
        """Return every tensor by path, from the manifest alone."""
        from holdfast.registry.loading.tensors import tensors_of

        return tensors_of(self.manifest)

    def __getitem__(self, path: str) -> LazyTensor:
        """Return a lazy tensor: an index reads only the chunks that it needs."""
        if not isinstance(path, str):
            raise InvalidInput(
                "a tensor is named by its path", where=self.ref, found=quoted(path)[:80]
            )
        if "_arrays" not in self.__dict__:
            self._handle.reader.begin()
        if path not in self._arrays:
            raise NotFound(
                "no such tensor",
                where=f"{self.ref}: {path}",
                hint=near(path, self._arrays) or "`tensors()` lists the paths.",
            )
        return LazyTensor(f"{self.ref}: {path}", *self._arrays[path], self._handle.reader)

    def __contains__(self, path: object) -> bool:
        """Return whether the state has a tensor of this path."""
        return path in self._arrays

    def __iter__(self) -> Iterator[str]:
        """Yield the paths of its tensors."""
        return iter(self._arrays)

    def _ipython_key_completions_(self) -> list[str]:
        try:
            return list(self)
        except RegistryError:  # the index itself will raise the error
            return []

    @cached_property
    def _arrays(self) -> dict[str, tuple[TensorEntry, str]]:
        """Tensors and their kinds by path; cached, since programs ask for thousands."""
        found = {}
        with collector_paused():
            for name, part in self.manifest.components.items():
                for index, (path, kind) in pytree.array_paths(name, part.skeleton).items():
                    found[path] = part.tensors[index], kind
        return found

    def zarr(self) -> Any:
        """Return the state as a read-only `zarr.Group` over the same chunks.

        Raises:
            InvalidInput: zarr is not installed.
            IncompatibleState: A tensor has a path that Zarr cannot name.
        """
        from holdfast.registry.loading.tensors import tensors_by_path
        from holdfast.registry.loading.zarr import open_zarr

        tensors = tensors_by_path(self.manifest.components)
        return open_zarr(self._handle.reader, self.ref, self.digest, tensors)


def _component_row(name: str, part: Component) -> tuple[object, ...]:
    from holdfast.registry.values import size

    types = ", ".join(sorted({entry.dtype for entry in part.tensors}))
    return name, len(part.tensors), size(part.nbytes), types, part.digest.short


def load_to_train(stored: Stored, map_location: object) -> Any:
    """Return a state to continue training from: every tensor in its original type.

    If some were saved with less precision, a warning names them, since training then continues with
    slightly different values.
    """
    from holdfast.registry.loading.tensors import tensors_of

    tensors = tensors_of(stored.handle.reader.begin())
    lossy = [info for info in tensors.values() if info.original is not None]
    state = stored.load(map_location=map_location, precision="original")
    if lossy:
        named = [f"{info.path} ({info.dtype})" for info in lossy[:_NAMED_AT_MOST]]
        more = len(lossy) - len(named)
        _LOGGER.warning(
            "%s: saved with less precision; these have their types again, not the bits that were "
            "lost: %s%s",
            stored.ref,
            printable(", ".join(named)),
            f" and {more} more" if more else "",
        )
    return state
