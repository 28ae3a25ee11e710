"""Streams: append-only histories that belong to a run, such as losses.

- `stream`: `Stream`, as users hold it; `segments`: runs of entries, each stored as a state.
- `appends`: which short segments a new one replaces, and the action of the commit.

The format of a segment does not change. `training` appends to streams together with a checkpoint.
Specified in docs/spec.md, section 26.
"""
