"""The store in a folder of a local disk.

- `backend`: `LocalBackend`; `disk`: the system calls on single files, durable and many at once.
- `folders`: opens folders without following links; `walk`: lists a tree in the order of its keys.
- `mounts`: the file systems that are safe; `reserve`: space kept to free space on a full disk.

docs/spec.md, section 1.
"""
