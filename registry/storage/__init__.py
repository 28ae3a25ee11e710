"""The immutable objects on a store, and how they are read.

- `keys`: the names of all objects; `framing`: how a file proves its own bytes.
- `manifest`: what a state is; `tensor_entry`: a tensor in it; `manifest_text` finds the parts in
  its text.
- `chunking`: where the tensors of a state are cut. `pack`: a file of chunks.
  `placement`: where the chunks of a state are. `codecs`: how a chunk is encoded.
- `store`: `Store`, one open registry: backend, threads, caches. `connecting` creates and opens it
  at an `address`, with options that `option_texts` reads.
- `workers`: bulk work in units, by threads here or by an executor's workers, which reach the store
  by a `worker_address`.
- `reading`, `fetching`, `ranged_reads`: from a manifest to verified bytes in memory.
- `lazy`: tensors that are read when they are indexed; `chunk_cache`: chunks on a local disk;
  `recent_chunks`: the decoded ones that a view read last.
- `heads`: the ends of logs that this machine has seen. `progress`: bars of the bytes that move.

No id depends on the threads, the caches and the order of requests: change them freely. The formats
change only with a new version and new samples in tests/golden. `history`, `writing` and `loading`
are built on this room. Specified in docs/spec.md, sections 3, 5 to 7, 14, 32, 35 and 44.
"""
