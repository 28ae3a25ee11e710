"""The meaning of the bytes: states, checkpoints, runs, and all that is done with them.

The rooms, from the ground up; each imports only what is below it:

- `values`, `pytree`: digests, canonical JSON, records; states taken apart into JSON and arrays.
- `storage`, `precision`, `zarr`: objects on a store, read and verified; narrower types; Zarr views.
- `spec`, `history`: what a run is to be; its log, replay, retention.
- `loading`, `writing`: a state's way into memory, and onto the store.
- `comparing`, `following`, `formats`, `maintenance`, `names`, `streams`, `pool`: what uses those.
- `training`, `merging`, `transitions`: what adds checkpoints to a run.
- `run_view`, `run`, `refs`, `registry`, `sync`: the objects that users hold. `cli` is the command.
"""

from __future__ import annotations

if __name__ != "holdfast.registry":
    # Loaded under another name, every class would exist twice.
    raise ImportError("import `holdfast`: `registry` is a part of it and has no name of its own")
