"""Read what is no tensor in a stored state: plain values, arrays of NumPy, tuples of tensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from holdfast.registry import pytree
from holdfast.registry.dcp.description import Description
from holdfast.registry.loading.allocating import allocate
from holdfast.registry.loading.stored import Stored, reader_of
from holdfast.registry.storage.manifest import Component


def read_values(stored: Stored, description: Description, keys: Iterable[str]) -> dict[str, Any]:
    """Return some values by DCP's keys; every byte is verified.

    Raises:
        IntegrityError: An object is damaged, or a skeleton breaks a rule of the format.
        IncompatibleState: A value needs a library or an adapter that is not here.
    """
    manifest, wanted = stored.manifest, list(keys)
    parts = {
        key: _component(manifest.components[name], name, node)
        for key in wanted
        if key not in description.given
        for name, node in [description.nodes[key]]
    }
    made = allocate(stored.ref, parts, "stored")
    reader_of(stored).read(manifest, made.targets)
    values = {
        key: pytree.unflatten_component(part.skeleton, made.arrays[key], name=key)
        for key, part in parts.items()
    }
    return {key: values[key] if key in values else description.given[key] for key in wanted}


def _component(part: Component, name: str, node: Any) -> Component:
    skeleton, numbers = pytree.renumbered(name, node, len(part.tensors))
    return Component.build(skeleton, [part.tensors[number] for number in numbers])
