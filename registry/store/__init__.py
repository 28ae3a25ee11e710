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
    from holdfast.registry.store.address import VARIABLE as VARIABLE
    from holdfast.registry.store.address import Address as Address
    from holdfast.registry.store.address import from_pairs as from_pairs
    from holdfast.registry.store.blocks import BLOCK_BYTES as BLOCK_BYTES
    from holdfast.registry.store.blocks import Lease as Lease
    from holdfast.registry.store.cache_folder import open_folder as open_folder
    from holdfast.registry.store.chunk_cache import BYTES_VARIABLE as BYTES_VARIABLE
    from holdfast.registry.store.chunk_cache import ChunkCache as ChunkCache
    from holdfast.registry.store.connecting import FOLDER_VARIABLE as FOLDER_VARIABLE
    from holdfast.registry.store.connecting import choose_cache as choose_cache
    from holdfast.registry.store.connecting import create_store as create_store
    from holdfast.registry.store.connecting import open_store as open_store
    from holdfast.registry.store.connecting import open_store_on as open_store_on
    from holdfast.registry.store.connecting import trust as trust
    from holdfast.registry.store.fetching import Cache as Cache
    from holdfast.registry.store.fetching import Fetch as Fetch
    from holdfast.registry.store.fetching import verify_chunk as verify_chunk
    from holdfast.registry.store.fetching import verify_pack_chunks as verify_pack_chunks
    from holdfast.registry.store.lazy import LazyTensor as LazyTensor
    from holdfast.registry.store.lazy import Source as Source
    from holdfast.registry.store.progress import Progress as Progress
    from holdfast.registry.store.progress import Transfers as Transfers
    from holdfast.registry.store.progress import bar as bar
    from holdfast.registry.store.progress import terminal_bar as terminal_bar
    from holdfast.registry.store.reading import StateIndex as StateIndex
    from holdfast.registry.store.reading import Target as Target
    from holdfast.registry.store.reading import check_list_lengths as check_list_lengths
    from holdfast.registry.store.reading import fetch_chunks as fetch_chunks
    from holdfast.registry.store.reading import index_chunks as index_chunks
    from holdfast.registry.store.reading import read_lists as read_lists
    from holdfast.registry.store.reading import read_tensors as read_tensors
    from holdfast.registry.store.store import DAY_S as DAY_S
    from holdfast.registry.store.store import WRITER_VERSION as WRITER_VERSION
    from holdfast.registry.store.store import RegistryConfig as RegistryConfig
    from holdfast.registry.store.store import Store as Store
    from holdfast.registry.store.store import ask_time as ask_time
    from holdfast.registry.store.store import check_writer_version as check_writer_version
    from holdfast.registry.store.store import decode_manifest as decode_manifest
    from holdfast.registry.store.store import gaps as gaps
    from holdfast.registry.store.store import missing as missing
    from holdfast.registry.store.store import read_config as read_config
    from holdfast.registry.store.threads import RUNS_AT_ONCE as RUNS_AT_ONCE
    from holdfast.registry.store.threads import Claims as Claims
    from holdfast.registry.store.threads import Pools as Pools
    from holdfast.registry.store.threads import Threads as Threads
    from holdfast.registry.store.threads import abandon as abandon
    from holdfast.registry.store.threads import in_batches as in_batches
    from holdfast.registry.store.threads import results as results
    from holdfast.registry.store.verified_packs import VerifiedPacks as VerifiedPacks
    from holdfast.registry.store.verified_packs import is_sound as is_sound
    from holdfast.registry.store.workers import Outcome as Outcome
    from holdfast.registry.store.workers import WorkerAddress as WorkerAddress
    from holdfast.registry.store.workers import Workers as Workers
else:
    __getattr__ = at_first_use(__name__)
