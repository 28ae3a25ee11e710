"""The meaning of the bytes: states, checkpoints and runs.

The rooms, from the ground up; each imports only what is below it:

- `values`, `pytree`: digests, canonical JSON, records; states taken apart into JSON and arrays.
- `storage`, `precision`, `zarr`: objects on a store, read and verified; narrower types; Zarr views.
- `spec`, `history`: the rules of a run; its log, replay, retention.
- `writing`, `loading`: put states on a store, and read them into memory.
- `comparing`, `following`, `formats`, `maintenance`, `names`, `streams`, `pool`: one use each.
- `training`, `merging`, `transitions`: add checkpoints to a run.
- `runs`, `registries`: the objects and functions for users. `cli` is the command.

docs/architecture.md describes them, with every step of a save and of a load.
"""

from __future__ import annotations

if __name__ != "holdfast.registry":
    # Loaded under another name, every class would exist twice.
    raise ImportError("import `holdfast`: `registry` is a part of it and has no name of its own")
