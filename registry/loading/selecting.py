"""Select components of a state, and parts of them by paths through dicts."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.registry import pytree
from holdfast.registry.errors import NotFound
from holdfast.registry.loading.fit import check_components
from holdfast.registry.objects import Component, Manifest
from holdfast.registry.values import near

#: The most names that a message lists.
_LISTED_AT_MOST = 8


def select(ref: str, manifest: Manifest, only: Iterable[str] | None) -> dict[str, Component]:
    """Return the wanted components, cut down to the wanted paths."""
    if only is None:
        return dict(manifest.components)
    wanted: dict[str, set[str]] = {}
    for path in only:
        wanted.setdefault(_component_of(manifest, path), set()).add(path)
    check_components(ref, wanted, manifest.components)
    return {
        name: part if name in wanted[name] else _cut_down(ref, name, part, wanted[name])
        for name, part in manifest.components.items()
        if name in wanted
    }


def dict_at(ref: str, manifest: Manifest, path: str) -> tuple[str, int, tuple[str, ...]]:
    """Return the path of a dict, the number of dicts from the state to it, and the names in it."""
    name = _component_of(manifest, path)
    check_components(ref, [name], manifest.components)
    part = manifest.components[name]
    path = pytree.component_path(name) if path == name else path
    found = pytree.steps_at(name, part.skeleton, path)
    if found is None:
        raise _nothing_at(ref, name, part, path)
    return path, found[0], tuple(found[1])


def _component_of(manifest: Manifest, path: str) -> str:
    """Return the component that a path is or begins with; the path itself if there is none."""
    if path in manifest.components:
        return path
    found = (
        name for name in manifest.components if path.startswith(f"{pytree.component_path(name)}/")
    )
    return next(found, path)


def _cut_down(ref: str, name: str, part: Component, paths: Iterable[str]) -> Component:
    count = len(part.tensors)
    found = pytree.cut_down(name, part.skeleton, set(paths), count)
    if found is not None:
        skeleton, numbers = found
        return Component.build(skeleton, [part.tensors[number] for number in numbers])
    missing = next(one for one in paths if not pytree.cut_down(name, part.skeleton, {one}, count))
    raise _nothing_at(ref, name, part, missing)


def _nothing_at(ref: str, name: str, part: Component, path: str) -> NotFound:
    above = path
    while (found := pytree.steps_at(name, part.skeleton, above)) is None and "/" in above:
        above = above.rpartition("/")[0]
    known = [f"{above}/{step}" for step in (found[1] if found else ())]
    return NotFound(
        "nothing at this path",
        where=f"{ref}: {path}",
        expected=", ".join(known[:_LISTED_AT_MOST]) or "a path through dicts",
        hint=near(path, known),
    )
