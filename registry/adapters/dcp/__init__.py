"""Runs as storage of torch.distributed.checkpoint (DCP): `dcp.save`, `async_save` and `load`.

- `writer`: `HoldfastWriter`, whose `write_data` is a save of a run; all ranks together if the run
  has a group. `HoldfastSavePlanner` keeps the state nested that DCP's planner is given.
- `staged`: the copy of a state that `async_save` saves later.
- `reader`: `HoldfastReader`, which fills DCP's targets, and a stored state as DCP describes one.

DCP writes no byte of a store, and reads none. Users import this room as `holdfast.dcp`. Specified
in docs/spec.md, section 43.
"""
