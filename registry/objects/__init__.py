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
    from holdfast.registry.objects.chunking import (
        CHUNK_BYTES,
        INLINE_BYTES,
        RECENT_BYTES,
        RecentChunks,
        grid,
    )
    from holdfast.registry.objects.framing import (
        content_bytes,
        join_lines,
        split_lines,
        unwrap_frame,
        wrap_frame,
    )
    from holdfast.registry.objects.keys import (
        ACTIVE,
        CONFIG,
        EPOCHS,
        FOLDERS,
        KINDS,
        LAST,
        NOTES,
        PARTS,
        PROBES,
        RECORD_BYTES,
        RUNS,
        SIGNATURES,
        Kind,
        ObjectKey,
        SignatureKey,
        check_run_id,
        epoch_key,
        is_probe,
        is_run_id,
        log_prefix,
        marker_key,
        note_key,
        parse_marker,
        parse_number,
        parse_part,
        part_key,
        records_in,
        signatures_prefix,
        slot_key,
        snapshot_key,
        snapshot_prefix,
        snapshot_slot,
        stem,
    )
    from holdfast.registry.objects.manifest import Component, Manifest
    from holdfast.registry.objects.pack import (
        PACK_BYTES,
        TRAILER_BYTES,
        PackEntry,
        PackTable,
        open_pack,
        read_pack_table,
        trailer,
    )
    from holdfast.registry.objects.placement import (
        MAX_DEPTH,
        NO_BASE,
        ChunkIndex,
        ChunkRow,
        PackRef,
        Placement,
        Rows,
        thinned,
    )
    from holdfast.registry.objects.tensor_entry import (
        LIST_THRESHOLD,
        NARROW_DTYPES,
        ORIGINAL_DTYPES,
        NarrowedDtype,
        TensorEntry,
    )
else:
    __getattr__ = at_first_use(__name__)
