"""Fill the tensors of a sharded model: every rank fetches a share and sends it on."""

from __future__ import annotations

from collections.abc import Container, Mapping
from concurrent.futures import ThreadPoolExecutor

from holdfast.registry.loading import (
    Destination,
    LoadReport,
    Stored,
    check_component,
    check_components,
    check_fit,
    filled_once,
    leaves_by_path,
    select,
    settle,
    tensors_by_path,
    widened_paths,
)
from holdfast.registry.objects import Manifest, TensorEntry
from holdfast.registry.pytree import ArrayLeaf
from holdfast.registry.saving.collective import shards
from holdfast.registry.saving.collective.filling import Box, Filling
from holdfast.registry.saving.collective.group import Group
from holdfast.registry.saving.collective.shards import ShardLeaf, box_begin, whole_leaf
from holdfast.registry.saving.collective.talk import LOADS, Calls, Talk
from holdfast.registry.saving.collective.telling import tell_state
from holdfast.registry.values import Digest


def load_into(
    stored: Stored,
    target: object,
    *,
    group: Group,
    component: str | None = None,
    strict: bool = True,
) -> LoadReport:
    """Fill the tensors of a sharded module, or of a nest of dicts and lists, in place.

    Every rank calls it with its part of the target: DTensors of any layout, and plain tensors that
    are whole on every rank. The layout need not be the one of the save. Each rank fetches and
    verifies about its share of the chunks, and sends the other ranks their pieces. Chunks are read
    straight into the target where its memory holds them whole; for the others a rank needs memory
    for about 100 MiB. Otherwise as `Stored.load_into`.

    Args:
        stored: A checkpoint, or another stored state; the same on every rank.
        target: An object with `state_dict()`, or a dict of tensors.
        group: The ranks, such as `holdfast.distributed.TorchGroup`.
        component: The component for the target; by default the target's top-level keys are
            components.
        strict: Whether a path on only one side is an error.

    Returns:
        The paths that were loaded, missing and unexpected.

    Raises:
        InvalidInput: The component is not a name.
        IncompatibleState: Paths, shapes or dtypes differ, the ranks load different states, or
            memory is read-only or shared in part; nothing was read.
        UnsupportedValue: Holdfast cannot fill a tensor of this layout.
        NotFound: There is no such component.
        IntegrityError: An object is damaged; do not use the target's tensors then.
        RankFailed: Another rank is dead or late; do not use the target's tensors then.
    """
    calls = Calls(group, LOADS)

    def load(talk: Talk) -> LoadReport:
        named = target if check_component(component) is None else {component: target}
        leaves = leaves_by_path(shards.flatten(named).flat)
        subject = Digest.of(repr([stored.digest.hex(), sorted(leaves)]).encode()).hex()
        tell_state(calls, talk, stored.handle.reader, subject, lambda whole: _named(whole, leaves))
        wanted = _Target(stored, leaves, component, strict=strict)
        filling = Filling(stored.handle.reader, wanted.boxes)
        filling.together(calls, talk, wanted.settle)
        return wanted.report

    return calls.make_apart(load)


class _Target:
    """The tensors of a target on this rank, and their sources."""

    def __init__(
        self,
        stored: Stored,
        leaves: Mapping[str, ArrayLeaf],
        component: str | None,
        *,
        strict: bool,
    ) -> None:
        manifest = stored.manifest
        if component is not None:
            check_components(stored.ref, [component], manifest.components)
        parts = select(stored.ref, manifest, None if component is None else [component])
        sources = tensors_by_path(parts)
        wholes = {path: whole_leaf(one) for path, one in leaves.items()}
        self.report = LoadReport.of(sources, leaves)  # the paths on each side
        widened = widened_paths(sources, wholes)
        check_fit(stored.ref, self.report, sources, wholes, strict=strict, widened=widened)
        paths = filled_once(stored.ref, sources, leaves)
        self._into = {p: Destination(leaves[p].source, widened.get(p)) for p in paths}
        stored.handle.reader.check_held(parts)
        stored.handle.reader.check_lists(manifest)
        #: The part of each tensor that is filled.
        self.boxes = [_box(leaves[p], sources[p], one.view) for p, one in self._into.items()]

    def settle(self) -> None:
        """Widen tensors in place, and copy staged ones to their target."""
        with ThreadPoolExecutor() as pool:
            settle(self._into, pool)


def _box(leaf: ArrayLeaf, entry: TensorEntry, view: memoryview) -> Box:
    return Box(leaf.path, entry, box_begin(leaf), leaf.shape, view, isinstance(leaf, ShardLeaf))


def _named(whole: Manifest, paths: Container[str]) -> list[TensorEntry]:
    found = tensors_by_path(whole.components)
    return [entry for path, entry in found.items() if path in paths]
