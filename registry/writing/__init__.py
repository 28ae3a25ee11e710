"""Put states on a store and commit what names them.

- `change`: `Change`, one change of a run: the objects that it writes, the log lines that it adds.
- `committer`: `Committer`, the one loop that carries a change through. It starts again
  when a collection or another writer came between.
- `state_writer`: `StateWriter`, which changes hold: it writes, adopts and cuts states; `Storing`,
  how a save stores its bytes.
- `packing`: `write_state`, from a flat state to packs. `hashing` copies and hashes its chunks and
  finds NaN in them, `encoding` shortens them.
- `placing`: the manifest and the placement of a state, once its chunks are on the store.
- `adopting`: states of another run, registry, eviction or journal, imported.
- `object_writer`: `ObjectWriter` chooses every key and keeps the writers' rules W1 to W5.
- `readable`, `staging`: checks before a save, and memory for its copy.

Every commit goes through `Committer`, every key through `ObjectWriter`: collection is proven for
that (docs/collection-proof.md). Which chunks share a pack and how they are encoded may change; no
id depends on it. Specified in docs/spec.md, sections 11 and 12.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.registry.values.first_use import at_first_use

if TYPE_CHECKING:
    from holdfast.registry.writing.adopting import adopt
    from holdfast.registry.writing.change import (
        Change,
        Composed,
        NewCommit,
        NewCommits,
        Stale,
        after_commit,
    )
    from holdfast.registry.writing.committer import Committer
    from holdfast.registry.writing.encoding import DELTA_WORTH, Encoding, check_keyframe_every
    from holdfast.registry.writing.hashing import NAMED_AT_MOST, is_finite, is_watched
    from holdfast.registry.writing.object_writer import (
        ChosenKeys,
        NewPack,
        ObjectWriter,
        placed_keys,
        put_pack,
    )
    from holdfast.registry.writing.packing import (
        Chunk,
        chunked_entry,
        cut_groups,
        group_name,
        write_packs,
        write_stream,
    )
    from holdfast.registry.writing.placing import (
        ChunkLocation,
        Written,
        build_placement,
        cover,
        cut_state,
        locations_of,
        place_manifest,
    )
    from holdfast.registry.writing.readable import check_readable
    from holdfast.registry.writing.staging import Staging, places
    from holdfast.registry.writing.state_writer import (
        StateWriter,
        Storing,
        check_storing,
        codec_and_distance,
    )
else:
    __getattr__ = at_first_use(__name__)
