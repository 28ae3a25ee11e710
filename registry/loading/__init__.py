"""Stored states as users hold them, and reading them into memory.

- `state_handle`: `StateHandle`, a stored state as the rest of Holdfast takes it.
- `stored`: `Stored`, its face: a state that a run keeps: `load`, `load_into`, lazy and Zarr access;
  `lazy_state`: the state as a mapping that reads at first access.
- `checkpoint`: `Checkpoint`, a stored state with its step, metrics and companions.
- `files`: the files of a state that was pushed as a folder; `composed`: files of known bytes and
  chunks, read in ranges.
- `destinations`: memory for a whole state, or the memory of a model that exists.
- `tensors`: the tensors of a state by path.
- `fit`: compares a stored state with the model that it is to fill.
- `selecting`: components, and parts of them by their paths.

Nothing here writes to a store, except that `Checkpoint.report` commits metrics. The bytes come
from `holdfast.registry.history.state_reader`, verified. Specified in docs/spec.md, sections 14
and 33.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.registry.values.first_use import at_first_use

if TYPE_CHECKING:
    from holdfast.registry.loading.checkpoint import Checkpoint, find_checkpoint
    from holdfast.registry.loading.composed import Chunks, Joined
    from holdfast.registry.loading.destinations import (
        Destination,
        LoadPrecision,
        allocate,
        check_device,
        to_device,
    )
    from holdfast.registry.loading.files import OPAQUE, TREE, FileInfo, files_in, is_tree
    from holdfast.registry.loading.fit import (
        LoadReport,
        check_component,
        check_components,
        check_fit,
        filled_once,
        leaves_by_path,
        settle,
        widened_paths,
    )
    from holdfast.registry.loading.selecting import select
    from holdfast.registry.loading.state_handle import CheckpointHandle, StateHandle
    from holdfast.registry.loading.stored import LazyState, Stored, load_to_train
    from holdfast.registry.loading.tensors import TensorInfo, tensors_by_path, tensors_of
else:
    __getattr__ = at_first_use(__name__)
