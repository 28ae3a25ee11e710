"""A registry as users hold it: created, opened, asked for runs and refs, kept up, copied.

- `factory`: `init` and `open` connect a store, choose cache and journal, and return a `Registry`.
- `registry`: `Registry` itself; `upkeep` is the half of it that verifies, repairs and collects.
- `handles`: what `Registry` imports with the first run that it opens, so that opening is fast.
- `refs`: from `RUN/latest` or a part of an id to a stored state.
- `sync`: copies the missing history of runs from one registry to another, fast-forward only.

`holdfast.open`, `holdfast.init` and `holdfast.sync` are these functions. Rooms below know runs,
and none of them knows the registry that holds them; the command and the pages are above.
"""
