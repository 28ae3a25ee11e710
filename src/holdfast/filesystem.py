"""The fsspec file system of `holdfast://` URLs; fsspec finds it by the entry point.

`fsspec.filesystem("holdfast", registry="s3://bucket/team")` makes one, and so does every library
that opens URLs through fsspec. `docs/fsspec.md` in the source tree describes its files.
"""

from __future__ import annotations

from holdfast.registry.adapters.filesystem.file_system import HoldfastFileSystem

__all__ = ["HoldfastFileSystem"]
