"""The meaning of the bytes: states, checkpoints and runs.

Each folder here is a room: a package with one subject, described in its `__init__.py`. The rooms
form layers, and a room imports only rooms below its own layer, by the names that they list. The
layers are in `pyproject.toml`, where `lint-imports` checks them. docs/architecture.md describes the
rooms in the same order, and shows a save, a load and a collection step by step.
"""

from __future__ import annotations

if __name__ != "holdfast.registry":
    # Loaded under another name, every class would exist twice.
    raise ImportError("import `holdfast`: `registry` is a part of it and has no name of its own")
