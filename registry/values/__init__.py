"""Values that every other room is built from. No store, no run, no state.

- `digest`: a SHA-256 as a type of its own; `canonical`: the one byte string of a JSON value.
- `records`: the base class of every record on a store: frozen, closed, canonical.
- `parse_limits`: bounds the memory that parsing a record from a store may take.
- `dtypes`: the closed list of element types; `semver`: versions of releases.
- `amounts`: sizes, numbers and times as people read them; `markup`: facts and tables as HTML.
- `environment`, `process`, `suggest`: the versions and the host of a run, near names.
- `first_use`, `gc_pause`: names imported when they are used, Python's cycle collector.

`canonical`, `dtypes`, `digest` and `records` decide bytes and ids: they do not change. Every room
depends on this one. Specified in docs/spec.md, section 2.
"""
