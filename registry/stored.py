"""A stored state as a user holds it: what it is, and its way back into memory.

Checkpoints, releases, artifacts and entries of the pool are all such states. Reading names nothing
on the store and takes no token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from registry import pytree
from registry.actions import CommitKeys, Place
from registry.bursts import allocation_burst
from registry.canonical import Json
from registry.destinations import Destination, to_device
from registry.digest import Digest
from registry.errors import IncompatibleState, MissingObject, NotFound
from registry.loading import Target, index_chunks, read_lists, read_tensors
from registry.log import RunLog
from registry.manifest import Component, Manifest, TensorEntry
from registry.placement import Placement
from registry.placing import Base
from registry.plain import decode_plain
from registry.store import Store
from registry.suggest import near

_NAMED_AT_MOST = 8
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What `load_into` did.

    Attributes:
        loaded: Paths of the tensors that were filled.
        missing: Paths in the target that the checkpoint does not have.
        unexpected: Paths in the checkpoint that the target does not have.
    """

    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor of a checkpoint, told from its manifest alone.

    Attributes:
        path: Component and keys joined with `/`.
        dtype: Name of its element type.
        shape: Axis lengths.
        nbytes: Size in bytes.
        content: Its bytes' identity: equal for equal dtype, shape and bytes, and only then.
    """

    path: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    content: Digest


class Stored:
    """A state that a run keeps under some name. Nothing of it is read before it is asked for.

    Attributes:
        digest: Its id: equal for equal states, in every registry.
    """

    def __init__(self, store: Store, log: RunLog, digest: Digest, ref: str) -> None:
        self._store = store
        self._log = log
        self._ref = ref
        self.digest = digest

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.ref} {self.digest.short}>"

    @property
    def run_id(self) -> str:
        """The run that keeps it."""
        return self._log.run_id

    @property
    def ref(self) -> str:
        """A name that finds it again."""
        return f"{self.run_id}/{self._ref}"

    @property
    def size_bytes(self) -> int:
        """Bytes of all its tensors, however few of them this registry had to store anew."""
        return self.manifest.nbytes

    def commit_keys(self) -> CommitKeys | None:
        """Return the keys of the state that its commit keeps instead of its manifest."""
        return None

    @property
    def components(self) -> dict[str, Digest]:
        """Digest of each top-level key; equal digests mean equal components, in any checkpoint."""
        return {name: part.digest for name, part in self.manifest.components.items()}

    @property
    def manifest(self) -> Manifest:
        """What its state is."""
        return self._relocated(lambda place: self._store.manifest(place.manifest_key))

    @property
    def placement(self) -> Placement:
        """Where its chunks lie in this registry."""
        return self._relocated(lambda place: self._store.placement(place.placement_key))

    def load(self, *, only: str | Iterable[str] | None = None, map_location: object = "cpu") -> Any:
        """Return the state, byte for byte and type for type as it was saved, every byte verified.

        Args:
            only: The component that is wanted, or several; all without it.
            map_location: Device for the tensors, as `torch.device` or its name.

        Raises:
            NotFound: A component in `only` does not exist.
            IntegrityError: Something is damaged or gone; nothing is returned.
        """
        manifest = self.manifest
        aside = self._aside()
        names = [only] if isinstance(only, str) else only
        wanted = self._select(manifest, _without(names, aside))
        with allocation_burst():
            arrays, targets = _allocate(self.ref, wanted)
        self._read(manifest, targets)
        if str(map_location) != "cpu":
            arrays = {name: to_device(made, map_location) for name, made in arrays.items()}
        with allocation_burst():
            parts = [(name, part.skeleton, arrays[name]) for name, part in wanted.items()]
            state = pytree.unflatten(manifest.kind, parts)
        return self._with_commit_keys(state, aside, names)

    def load_into(
        self, target: object, *, component: str | None = None, strict: bool = True
    ) -> LoadReport:
        """Fill the tensors of a module, or of a nest of dicts and lists, in place.

        Bytes go straight into the target's memory where it is contiguous and on the CPU, and
        through one staging tensor otherwise. Plain values of the checkpoint are left alone.

        Args:
            target: An object with `state_dict()`, or a dict of tensors.
            component: The component that the target stands for; without it the target's top-level
                keys are components.
            strict: Whether a path that only one side has is an error.

        Raises:
            IncompatibleState: Paths, shapes or dtypes differ; nothing was read.
            NotFound: There is no such component.
            IntegrityError: Something is damaged; the target's tensors are then not to be used.
        """
        manifest = self.manifest
        named = {component: target} if component is not None else target
        with allocation_burst():
            sources = _tensors_by_path(self._select(manifest, component and [component]))
            leaves = _leaves_by_path(named)
        report = LoadReport(
            loaded=tuple(path for path in sources if path in leaves),
            missing=tuple(path for path in leaves if path not in sources),
            unexpected=tuple(path for path in sources if path not in leaves),
        )
        _check_fit(self.ref, report, sources, leaves, strict=strict)
        with allocation_burst():
            into = {path: Destination(leaves[path].source) for path in report.loaded}
        self._read(manifest, _distinct(self.ref, sources, into))
        for destination in into.values():
            destination.settle()
        return report

    def tensors(self) -> dict[str, TensorInfo]:
        """Return every tensor by path, from the manifest alone."""
        return {
            path: TensorInfo(path, entry.dtype, entry.shape, entry.nbytes, entry.content)
            for path, entry in _tensors_by_path(self.manifest.components).items()
        }

    def base(self) -> Base:
        """Return what it is and where, for a state that is stored against it.

        Raises:
            IntegrityError: Its manifest or placement is damaged or gone.
        """

        def read(place: Place) -> Base:
            # All of it by one place: what a save takes for covered must be what lies there (W2a).
            manifest = self._store.manifest(place.manifest_key)
            placement = self._store.placement(place.placement_key)
            lists = read_lists(self._store, manifest, placement)
            index_chunks(manifest, placement, lists)
            return Base(place, manifest, placement, lists)

        return self._relocated(read)

    def _aside(self) -> dict[str, Any]:
        kept = self.commit_keys()
        return {} if kept is None else decode_plain(kept.values)

    def _with_commit_keys(
        self, state: Any, aside: Mapping[str, Any], names: Iterable[str] | None
    ) -> Any:
        """Put the keys that the commit keeps where they stood in the state."""
        kept = self.commit_keys()
        if kept is None:
            return state
        wanted = set(kept.order if names is None else names)
        merged = {**state, **{name: aside[name] for name in wanted if name in aside}}
        return type(state)((name, merged[name]) for name in kept.order if name in merged)

    def _select(self, manifest: Manifest, only: Iterable[str] | None) -> dict[str, Component]:
        names = list(manifest.components) if only is None else list(only)
        for name in names:
            if name not in manifest.components:
                raise NotFound(
                    "no such component",
                    where=f"{self.ref}: {name}",
                    expected=", ".join(manifest.components),
                    hint=near(name, manifest.components),
                )
        return {name: part for name, part in manifest.components.items() if name in names}

    def _read(self, manifest: Manifest, targets: list[Target]) -> None:
        def read(place: Place) -> None:
            placement = self._store.placement(place.placement_key)
            read_tensors(self._store, manifest, placement, targets)

        self._relocated(read)

    def digest_lists(self) -> dict[Digest, bytes]:
        """Return the stored digest lists of its largest tensors."""
        manifest = self.manifest
        return self._relocated(
            lambda place: read_lists(
                self._store, manifest, self._store.placement(place.placement_key)
            )
        )

    def _relocated(self, read: Callable[[Place], _T]) -> _T:
        """Read by way of the place that the log gives; once more where a repack moved it."""
        place = self.place
        try:
            return read(place)
        except MissingObject as error:
            state = self._log.refresh()
            if self.place != place:
                return read(self.place)
            if self.digest in state.held:
                raise
            raise MissingObject(
                "this state was let go, and collected since",
                where=self.ref,
                hint="A mirror that was synced before may still hold it.",
            ) from error

    @property
    def place(self) -> Place:
        """Where its manifest and placement lie in this registry."""
        try:
            return self._log.state.by_manifest[self.digest]
        except KeyError:
            raise MissingObject(
                "the log gives no place for this checkpoint",
                where=self.ref,
                hint="Run `holdfast verify`; a mirror can restore it.",
            ) from None


def _allocate(
    ref: str, parts: Mapping[str, Component]
) -> tuple[dict[str, list[object]], list[Target]]:
    """Return fresh arrays for components, and what is to be read into them."""
    arrays: dict[str, list[object]] = {}
    targets: list[Target] = []
    for name, part in parts.items():
        kinds = pytree.leaf_kinds(part.skeleton)
        try:
            made = [
                pytree.allocate(tensor.dtype, tensor.shape, kinds.get(index, "bytes"))
                for index, tensor in enumerate(part.tensors)
            ]
        except (MemoryError, RuntimeError) as error:  # torch says RuntimeError
            raise IncompatibleState(
                "the component does not fit into memory",
                where=f"{ref}: {name}",
                found=f"{part.nbytes} bytes",
                hint="Load fewer components with only=[...].",
            ) from error
        arrays[name] = [value for value, _ in made]
        targets += zip(part.tensors, [view for _, view in made], strict=True)
    return arrays, targets


def _tensors_by_path(parts: Mapping[str, Component]) -> dict[str, TensorEntry]:
    found = {}
    for name, part in parts.items():
        paths = pytree.leaf_paths(name, part.skeleton)
        found.update({paths[index]: part.tensors[index] for index in _arrays(part.skeleton)})
    return found


def _leaves_by_path(target: object) -> dict[str, pytree.ArrayLeaf]:
    return {
        part.leaves[index].path: part.leaves[index]
        for part in pytree.flatten(target).components
        for index in _arrays(part.skeleton)
    }


def _distinct(
    ref: str, sources: Mapping[str, TensorEntry], into: Mapping[str, Destination]
) -> list[Target]:
    """Return what is read where; tensors that share memory are read once.

    Raises:
        IncompatibleState: Tensors of different content would go to the same memory.
    """
    targets: list[Target] = []
    last, begin, end = "", -1, -1
    for path in sorted(into, key=lambda path: into[path].address):
        destination = into[path]
        if destination.address >= end or not destination.view.nbytes:
            targets.append((sources[path], destination.view))
            last, begin = path, destination.address
            end = begin + destination.view.nbytes
            continue
        same_place = (destination.address, destination.view.nbytes) == (begin, end - begin)
        if not same_place or sources[path].content != sources[last].content:
            raise IncompatibleState(
                "two tensors of the target share memory and differ in the checkpoint",
                where=f"{ref}: {last} and {path}",
                hint="Untie them, or load one of the two into its own tensor.",
            )
    return targets


def _arrays(skeleton: Json) -> list[int]:
    """Return the numbers of the leaves that are tensors or arrays, not long strings."""
    kinds = pytree.leaf_kinds(skeleton)
    return [index for index, kind in kinds.items() if kind in ("torch", "numpy")]


class _Leaf(Protocol):
    dtype: str
    shape: tuple[int, ...]


def _check_fit(
    ref: str,
    report: LoadReport,
    sources: Mapping[str, TensorEntry],
    leaves: Mapping[str, _Leaf],
    *,
    strict: bool,
) -> None:
    wrong = []
    for path in report.loaded:
        have, want = sources[path], leaves[path]
        if (have.dtype, have.shape) != (want.dtype, want.shape):
            wrong.append(
                f"{path} is {have.dtype}{list(have.shape)}, target {want.dtype}{list(want.shape)}"
            )
    if strict:
        wrong += [f"{path} is not in the checkpoint" for path in report.missing]
        wrong += [f"{path} is not in the target" for path in report.unexpected]
    if not wrong:
        return
    shown = "; ".join(wrong[:_NAMED_AT_MOST])
    more = f"; and {len(wrong) - _NAMED_AT_MOST} more" if len(wrong) > _NAMED_AT_MOST else ""
    raise IncompatibleState(
        "the checkpoint does not fit the target",
        where=ref,
        found=shown + more,
        hint="Nothing was changed. Name the right component, or pass strict=False to fill what "
        "both sides have.",
    )


def _without(names: Iterable[str] | None, aside: Mapping[str, Any]) -> list[str] | None:
    return None if names is None else [name for name in names if name not in aside]
