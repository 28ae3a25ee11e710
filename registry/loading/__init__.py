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
    from holdfast.registry.loading.checkpoint import Checkpoint as Checkpoint
    from holdfast.registry.loading.checkpoint import find_checkpoint as find_checkpoint
    from holdfast.registry.loading.composed import Chunks as Chunks
    from holdfast.registry.loading.composed import Joined as Joined
    from holdfast.registry.loading.destinations import Destination as Destination
    from holdfast.registry.loading.destinations import LoadPrecision as LoadPrecision
    from holdfast.registry.loading.destinations import allocate as allocate
    from holdfast.registry.loading.destinations import check_device as check_device
    from holdfast.registry.loading.destinations import to_device as to_device
    from holdfast.registry.loading.files import OPAQUE as OPAQUE
    from holdfast.registry.loading.files import TREE as TREE
    from holdfast.registry.loading.files import FileInfo as FileInfo
    from holdfast.registry.loading.files import files_in as files_in
    from holdfast.registry.loading.files import is_tree as is_tree
    from holdfast.registry.loading.fit import LoadReport as LoadReport
    from holdfast.registry.loading.fit import check_component as check_component
    from holdfast.registry.loading.fit import check_components as check_components
    from holdfast.registry.loading.fit import check_fit as check_fit
    from holdfast.registry.loading.fit import filled_once as filled_once
    from holdfast.registry.loading.fit import leaves_by_path as leaves_by_path
    from holdfast.registry.loading.fit import settle as settle
    from holdfast.registry.loading.fit import widened_paths as widened_paths
    from holdfast.registry.loading.selecting import select as select
    from holdfast.registry.loading.state_handle import CheckpointHandle as CheckpointHandle
    from holdfast.registry.loading.state_handle import StateHandle as StateHandle
    from holdfast.registry.loading.stored import LazyState as LazyState
    from holdfast.registry.loading.stored import Stored as Stored
    from holdfast.registry.loading.stored import load_to_train as load_to_train
    from holdfast.registry.loading.tensors import TensorInfo as TensorInfo
    from holdfast.registry.loading.tensors import tensors_by_path as tensors_by_path
    from holdfast.registry.loading.tensors import tensors_of as tensors_of
else:
    __getattr__ = at_first_use(__name__)
