"""Saves and loads that every rank of a job makes together; one commit for all.

- `group`: `Group`, the seam between the ranks: messages with deadlines, and bulk bytes.
  `torch_group` implements it for torch.distributed.
- `shards`, `torch_shards`: one rank's state, with its box of each tensor, and values that each rank
  keeps for itself; chunks and parts of ranks as boxes.
- `patterns`: tensors that are cut alike; `plan`: the rank that stores each chunk, and the bytes
  that travel to it.
- `agreement`: one rank's share of a save, and the check that the shares agree; `exchange`: each
  rank's work: exchange pieces, store the owned chunks; `state_end`: rank 0's table of all stored
  chunks, then manifest and placement.
- `sides`: the side of rank 0 and that of the others, which call these; `talk`: their messages and
  errors. `saver`: the saver of a run with a group.
- `telling`: reads of the store that rank 0 makes for all ranks.
- `filling`: fill boxes of stored tensors; `loading`: fill sharded models.

Nothing on the store shows how many ranks wrote a state. Specified in docs/spec.md, section 43.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.registry.values.first_use import at_first_use

if TYPE_CHECKING:
    from holdfast.registry.saving.collective.filling import Box, Filling
    from holdfast.registry.saving.collective.group import DEADLINE_S, Group
    from holdfast.registry.saving.collective.loading import load_into
    from holdfast.registry.saving.collective.saver import CollectiveSaver
    from holdfast.registry.saving.collective.shards import ShardLeaf
    from holdfast.registry.saving.collective.talk import LOADS, Calls, Talk
    from holdfast.registry.saving.collective.telling import open_together, tell_state
else:
    __getattr__ = at_first_use(__name__)
