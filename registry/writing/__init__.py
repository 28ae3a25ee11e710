"""Put states on a store and commit what names them.

- `change`: `Change`, one change of a run: the objects that it writes, the log lines that it adds.
- `committer`: `Committer`, the one loop that carries a change through. It starts again
  when a collection or another writer came between.
- `saving`: `write_state`, from a flat state to packs. `hashing` copies and hashes its chunks,
  `encoding` and `deltas` shorten them, `finite` finds NaN in them.
- `placing`: the manifest and the placement of a state, once its chunks are on the store.
- `adopting`: states that another run, registry or eviction left, taken over.
- `object_writer`: `Writer` chooses every key and keeps the writers' rules W1 to W5.
- `readable`, `free_space`, `staging`: checks before a save, and memory for its copy.

Every commit goes through `Committer`, every key through `Writer`: collection is proven for that
(docs/collection.md). Which chunks share a pack and how they are encoded may change; no id depends
on it. Specified in docs/spec.md, sections 11 and 12.
"""
