"""The immutable objects of a store, as bytes and as values: no module here reads or writes a store.

- `keys`: the names of all objects; `framing`: how a file proves its own bytes.
- `manifest`: the content of a state; `tensor_entry`: one tensor of it.
- `chunking`: where tensors are cut into chunks; `codecs`: how a chunk is encoded.
- `pack`: a file of chunks; `placement`: where the chunks of a manifest are.

The formats change only with a new version and new samples in tests/golden. Specified in
docs/spec.md, sections 3 and 5 to 7.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.registry.values.first_use import at_first_use

if TYPE_CHECKING:
    from holdfast.registry.objects.chunking import CHUNK_BYTES as CHUNK_BYTES
    from holdfast.registry.objects.chunking import INLINE_BYTES as INLINE_BYTES
    from holdfast.registry.objects.chunking import RECENT_BYTES as RECENT_BYTES
    from holdfast.registry.objects.chunking import RecentChunks as RecentChunks
    from holdfast.registry.objects.chunking import grid as grid
    from holdfast.registry.objects.framing import content_bytes as content_bytes
    from holdfast.registry.objects.framing import join_lines as join_lines
    from holdfast.registry.objects.framing import split_lines as split_lines
    from holdfast.registry.objects.framing import unwrap_frame as unwrap_frame
    from holdfast.registry.objects.framing import wrap_frame as wrap_frame
    from holdfast.registry.objects.keys import ACTIVE as ACTIVE
    from holdfast.registry.objects.keys import CONFIG as CONFIG
    from holdfast.registry.objects.keys import EPOCHS as EPOCHS
    from holdfast.registry.objects.keys import FOLDERS as FOLDERS
    from holdfast.registry.objects.keys import KINDS as KINDS
    from holdfast.registry.objects.keys import LAST as LAST
    from holdfast.registry.objects.keys import NOTES as NOTES
    from holdfast.registry.objects.keys import PARTS as PARTS
    from holdfast.registry.objects.keys import PROBES as PROBES
    from holdfast.registry.objects.keys import RECORD_BYTES as RECORD_BYTES
    from holdfast.registry.objects.keys import RUNS as RUNS
    from holdfast.registry.objects.keys import SIGNATURES as SIGNATURES
    from holdfast.registry.objects.keys import Kind as Kind
    from holdfast.registry.objects.keys import ObjectKey as ObjectKey
    from holdfast.registry.objects.keys import SignatureKey as SignatureKey
    from holdfast.registry.objects.keys import check_run_id as check_run_id
    from holdfast.registry.objects.keys import epoch_key as epoch_key
    from holdfast.registry.objects.keys import is_probe as is_probe
    from holdfast.registry.objects.keys import is_run_id as is_run_id
    from holdfast.registry.objects.keys import log_prefix as log_prefix
    from holdfast.registry.objects.keys import marker_key as marker_key
    from holdfast.registry.objects.keys import note_key as note_key
    from holdfast.registry.objects.keys import parse_marker as parse_marker
    from holdfast.registry.objects.keys import parse_number as parse_number
    from holdfast.registry.objects.keys import parse_part as parse_part
    from holdfast.registry.objects.keys import part_key as part_key
    from holdfast.registry.objects.keys import records_in as records_in
    from holdfast.registry.objects.keys import signatures_prefix as signatures_prefix
    from holdfast.registry.objects.keys import slot_key as slot_key
    from holdfast.registry.objects.keys import snapshot_key as snapshot_key
    from holdfast.registry.objects.keys import snapshot_prefix as snapshot_prefix
    from holdfast.registry.objects.keys import snapshot_slot as snapshot_slot
    from holdfast.registry.objects.keys import stem as stem
    from holdfast.registry.objects.manifest import Component as Component
    from holdfast.registry.objects.manifest import Manifest as Manifest
    from holdfast.registry.objects.pack import PACK_BYTES as PACK_BYTES
    from holdfast.registry.objects.pack import TRAILER_BYTES as TRAILER_BYTES
    from holdfast.registry.objects.pack import PackEntry as PackEntry
    from holdfast.registry.objects.pack import PackTable as PackTable
    from holdfast.registry.objects.pack import open_pack as open_pack
    from holdfast.registry.objects.pack import read_pack_table as read_pack_table
    from holdfast.registry.objects.pack import trailer as trailer
    from holdfast.registry.objects.placement import MAX_DEPTH as MAX_DEPTH
    from holdfast.registry.objects.placement import NO_BASE as NO_BASE
    from holdfast.registry.objects.placement import ChunkIndex as ChunkIndex
    from holdfast.registry.objects.placement import ChunkRow as ChunkRow
    from holdfast.registry.objects.placement import PackRef as PackRef
    from holdfast.registry.objects.placement import Placement as Placement
    from holdfast.registry.objects.placement import Rows as Rows
    from holdfast.registry.objects.placement import thinned as thinned
    from holdfast.registry.objects.tensor_entry import LIST_THRESHOLD as LIST_THRESHOLD
    from holdfast.registry.objects.tensor_entry import NARROW_DTYPES as NARROW_DTYPES
    from holdfast.registry.objects.tensor_entry import ORIGINAL_DTYPES as ORIGINAL_DTYPES
    from holdfast.registry.objects.tensor_entry import NarrowedDtype as NarrowedDtype
    from holdfast.registry.objects.tensor_entry import TensorEntry as TensorEntry
else:
    __getattr__ = at_first_use(__name__)
