"""Stored states as users hold them, and reading them into memory.

- `stored`: `Stored`, a state that a run keeps: `load`, `load_into`, lazy and Zarr access;
  `lazy_state`: the state as a mapping that reads at first access.
- `checkpoint`: `Checkpoint`, a stored state with its step, metrics and companions.
- `files`: the files of a state that was pushed as a folder.
- `allocating`: memory for a whole state; `destinations`: the memory of a model that exists.
- `fit`: compares a stored state with the model that it is to fill.
- `selecting`: components, and parts of them by their paths.

Nothing here writes to a store, except that `Checkpoint.report` commits metrics. The bytes come
from `holdfast.registry.history.state_reader`, verified. Specified in docs/spec.md, sections 14
and 33.
"""
