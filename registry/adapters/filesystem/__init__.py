"""Stored states as the files of a read-only fsspec file system, `holdfast://`.

- `file_system`: the class that fsspec sees. Only it imports fsspec.
- `session`: the open registry behind an instance, the states that refs were resolved to, and files
  and folders as values.
- `state_folder`: the files of one state, such as `meta.json`; `torch_archive`: its `state.pt`.

fsspec loads this room by its entry point, users by `holdfast.filesystem`.
Specified in docs/spec.md, section 38.
"""
