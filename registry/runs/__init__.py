"""A run as its users hold it: saving into it, restoring it, naming checkpoints, reading.

- `run`: `Run`, the handle that trains: save, merge, end.
- `looping`: `LoopingRun`, its part that saves a training loop.
- `resuming`: `ResumableRun`, its part that starts, restores, and changes phase or policy.
- `curation`: `CuratedRun`, its part that names checkpoints, evicts them and brings them back.
- `view`: `RunView`, its part that only reads.
- `html`: a run as notebooks show it.
- `rooms`: what only some calls need, imported at its first use.

These are public methods: their names, arguments and errors stay. They do nothing themselves: each
calls the room that does. `refs`, `handles`, `registry`, `factory` and `sync` depend on this room.
Specified in docs/spec.md, sections 11, 21 and 23.
"""
