"""Make a checkpoint of others: some tensors averaged, the rest picked.

- `merged_save`: `merge`, committed like a push, and its arguments, checked.
- `merge_plan`: which tensor is averaged and which is picked, from manifests alone.
- `mixing`: reads, averages and stores the chunks, one batch at a time.

The result depends on the rounding of the averages: equal sources must give equal ids everywhere.
Specified in docs/spec.md, section 34.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast.registry.values.first_use import at_first_use

if TYPE_CHECKING:
    from holdfast.registry.deriving.merging.merged_save import merge as merge
else:
    __getattr__ = at_first_use(__name__)

#: The key of a checkpoint's meta that names the sources of a merge.
MERGE = "merge"


def merged_from(meta: Any) -> list[str]:
    """Return the sources of a merge with their weights; none if a meta tells of no merge."""
    try:
        merge = meta[MERGE]
        sources = [one["ref"] for one in merge["sources"]]
        if not all(isinstance(ref, str) for ref in sources):
            return []
        if "weights" not in merge:
            return sources
        pairs = zip(sources, merge["weights"], strict=True)
        return [f"{ref} (weight {weight})" for ref, weight in pairs]
    except (TypeError, KeyError, ValueError):
        return []
