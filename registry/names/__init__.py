"""Names that keep stored states, and evictions that a user asks for.

- `pins`: gates, artifacts and tags; `releases`: `Releases`, states under semantic versions.
- `marks`: the names that point at each checkpoint.
- `cards`: model cards as YAML; the one module of the registry that imports it.
- `forking`: a new run that continues from a checkpoint of another one.
- `pruning`: evict, undo an eviction, drop a run.

All of them commit through `holdfast.registry.writing.committer`, and none needs the writer token.
`runs` and `registry` offer them to users. Specified in docs/spec.md, sections 22, 23 and
27.
"""
