"""The tensors of one component by name: all that a file of safetensors or of NumPy can hold."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Any

from holdfast.registry.errors import Hint, IncompatibleState
from holdfast.registry.formats.content import Content
from holdfast.registry.pytree import ArrayLeaf, FlatComponent


@dataclass(frozen=True, slots=True)
class NamedTensors:
    """The names, element types and tags that a format can hold."""

    format: str  # its name, for messages
    file: str  # the name of the file, for messages
    dtypes: Container[str]  # element types that it has
    #: The tags of `holdfast.registry.pytree` that it has: tensors, arrays, times.
    tags: frozenset[str] = frozenset({"t", "n"})
    #: The name of a component of plain values that it keeps beside the tensors.
    aside: str | None = None

    def of(self, content: Content) -> tuple[dict[str, ArrayLeaf], FlatComponent | None]:
        """Return the tensors by name, and the component that is kept beside them."""
        wanted = self._choose(content)
        leaves: dict[str, ArrayLeaf] = {}
        aside = None
        for part in content.flat(wanted).components:
            if part.name == self.aside and len(wanted) > 1 and not part.leaves:
                aside = part
            else:
                leaves |= self._flat(part)
        return leaves, aside

    def unfit(self, where: str, message: str) -> IncompatibleState:
        """Return the error for a value that the format cannot keep."""
        return IncompatibleState(
            message,
            where=where,
            expected=f"what fits into {self.file}",
            hint=Hint(
                "Pull to a .pt file, or load it: holdfast.open(URL).checkpoint(REF).load().",
                "Pull to a .pt file.",
            ),
        )

    def _choose(self, content: Content) -> list[str]:
        """Return the components to load, from their skeletons alone."""
        parts = content.parts
        bare = [name for name, part in parts.items() if self._is_bare(part.skeleton)]
        if len(bare) == len(parts) or len([name for name in parts if name != self.aside]) == 1:
            return list(parts)
        raise IncompatibleState(
            f"a {self.format} file holds the tensors of one component",
            where=content.where,
            found=", ".join(parts) or "none",
            hint="Choose one, such as `--only model`, or pull to a .pt file.",
        )

    def _flat(self, part: FlatComponent) -> dict[str, ArrayLeaf]:
        if part.is_bare:
            return {part.name: self._checked(part.leaves[0], part.name)}
        skeleton: Any = part.skeleton
        match skeleton:
            case {"d": pairs} | {"od": pairs} | {"sd": [pairs, *_]}:
                return {name: self._leaf(part, name, node) for name, node in pairs}
        raise self.unfit(part.name, "the component is not a dict of tensors")

    def _leaf(self, part: FlatComponent, name: Any, node: Any) -> ArrayLeaf:
        where = f"{part.name}/{name}"
        match node:
            case {"t": int(index)} | {"n": int(index)} | {"nt": [int(index), _]} if isinstance(
                name, str
            ) and self._is_bare(node):
                return self._checked(part.leaves[index], where)
            case {"d": _} | {"od": _} | {"sd": _}:
                raise self.unfit(where, f"{self.format} cannot keep dicts inside the component")
        raise self.unfit(where, f"{self.format} can only keep tensors by name, not this value")

    def _checked(self, leaf: ArrayLeaf, where: str) -> ArrayLeaf:
        if leaf.dtype not in self.dtypes:
            raise self.unfit(where, f"{self.format} has no element type for {leaf.dtype}")
        return leaf

    def _is_bare(self, skeleton: object) -> bool:
        return isinstance(skeleton, dict) and set(skeleton) <= self.tags
