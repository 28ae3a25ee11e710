"""One open registry on a backend, and everything that reads its objects.

- `store`: `Store`: backend, threads, caches. `connecting` creates and opens it at an `address`.
- `reading`, `fetching`: from a manifest to verified bytes in memory; `lazy`: tensors that are read
  when they are indexed; `blocks`: staging memory.
- `chunk_cache`, `cache_folder`: chunks on a local disk. `heads`: the ends of logs that this machine
  has seen. `progress`: bars of the bytes that move.
- `threads`: the thread pools; `workers`: bulk work in units, by threads here or by an executor's
  workers, and how those reach the store.

No id depends on threads, caches and the order of requests: change them freely. Specified in
docs/spec.md, sections 14, 32, 35 and 44.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.registry.values.first_use import at_first_use

if TYPE_CHECKING:
    from holdfast.registry.store.address import VARIABLE, Address, from_pairs
    from holdfast.registry.store.blocks import BLOCK_BYTES, Lease
    from holdfast.registry.store.cache_folder import open_folder
    from holdfast.registry.store.chunk_cache import BYTES_VARIABLE, ChunkCache
    from holdfast.registry.store.connecting import (
        FOLDER_VARIABLE,
        choose_cache,
        create_store,
        open_store,
        open_store_on,
        trust,
    )
    from holdfast.registry.store.fetching import Cache, Fetch, verify_chunk, verify_pack_chunks
    from holdfast.registry.store.lazy import LazyTensor, Source
    from holdfast.registry.store.progress import Progress, Transfers, bar, terminal_bar
    from holdfast.registry.store.reading import (
        StateIndex,
        Target,
        check_list_lengths,
        fetch_chunks,
        index_chunks,
        read_lists,
        read_tensors,
    )
    from holdfast.registry.store.store import (
        DAY_S,
        WRITER_VERSION,
        RegistryConfig,
        Store,
        ask_time,
        check_writer_version,
        decode_manifest,
        gaps,
        missing,
        read_config,
    )
    from holdfast.registry.store.threads import (
        RUNS_AT_ONCE,
        Claims,
        Pools,
        Threads,
        abandon,
        in_batches,
        results,
        together,
    )
    from holdfast.registry.store.verified_packs import VerifiedPacks, is_sound
    from holdfast.registry.store.workers import Outcome, WorkerAddress, Workers
else:
    __getattr__ = at_first_use(__name__)
