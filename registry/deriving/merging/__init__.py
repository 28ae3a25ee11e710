"""Make a checkpoint of others: some tensors averaged, the rest picked.

- `merged_save`: `merge`, committed like a push, and its arguments, checked.
- `merge_plan`: which tensor is averaged and which is picked, from manifests alone.
- `mixing`: reads, averages and stores the chunks, one batch at a time.

The result depends on the rounding of the averages: equal sources must give equal ids everywhere.
Specified in docs/spec.md, section 34.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.registry.values.first_use import at_first_use

if TYPE_CHECKING:
    from holdfast.registry.deriving.merging.merged_save import merge
else:
    __getattr__ = at_first_use(__name__)
