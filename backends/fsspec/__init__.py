"""Stores behind file systems of fsspec.

- `file_systems`: those that may hold a registry, and how a URL or an object becomes a store.
- `files`: plain files, for programs that know nothing of a registry.
- `store`: `FsspecBackend`, from fsspec's common methods and a dialect; `dialect`: what differs.
- `s3`, `azure`, `gcs`: the dialects of s3fs, adlfs and gcsfs.

docs/spec.md, section 1.
"""
