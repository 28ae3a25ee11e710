"""Rewrite packs: drop bytes that nobody needs, put small packs together, encode chunks again.

- `survey`, `catalog`: what the runs need, chunk by chunk, and its batches; `repack_plan`: which
  packs are rewritten, and what the new ones hold.
- `recoding`: the encoding of each chunk, and the element sizes that it needs.
- `packs`, `chunks`: the new packs, and the chunks in them, read and verified.
- `runs`: the new placement of each state, committed to its runs.
- `execution`: `repack`, which does all of this in order.

No id changes; the old packs stay until a collection deletes them. Specified in docs/spec.md,
section 30.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.registry.values.first_use import at_first_use

if TYPE_CHECKING:
    from holdfast.registry.upkeep.repacking.execution import RepackReport, repack
    from holdfast.registry.upkeep.repacking.repack_plan import RewrittenPack
else:
    __getattr__ = at_first_use(__name__)
