"""Policy folders of Cobre: cuts, bases and visited states of each stage, and `metadata.json`.

The state that is read is `{"metadata": ..., "cuts": {stage: ...}, "basis": ..., "states": ...}`.
The fields of all cuts of a stage are arrays, one element or row a cut, so that they are compared,
stored as differences and read in part like any tensor. A stage is named `stage_000`, by the number
within its file: the names of the files do not count.

- `wire`: FlatBuffers, read with a check of every offset.
- `stages`: the tables of a stage, as arrays and back.
- `policy`: the whole folder.

Specified by what the program of Cobre writes, in all its releases; its book and its specification
differ from it.
"""

from __future__ import annotations

from holdfast.registry.formats.cobre.policy import detect, inspect, read, validate, write
