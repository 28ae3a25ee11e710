"""Rewrite packs: drop bytes that nobody needs, put small packs together, encode chunks again.

- `survey`: what the runs need, chunk by chunk; `repack_plan`: which packs are rewritten.
- `recoding`: the encoding of each chunk; `element_types`: the element sizes that it needs.
- `targets`, `packs`, `chunks`: the new packs, and the chunks in them, read and verified.
- `new_places`, `runs`: the new placement of each state, committed to its runs.
- `repack`: `repack`, which does all of this in order.

No id changes; the old packs stay until a collection deletes them. Specified in docs/spec.md,
section 30.
"""
