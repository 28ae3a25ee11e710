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
    from holdfast.registry.writing.adopting import adopt as adopt
    from holdfast.registry.writing.change import Change as Change
    from holdfast.registry.writing.change import Composed as Composed
    from holdfast.registry.writing.change import NewCommit as NewCommit
    from holdfast.registry.writing.change import NewCommits as NewCommits
    from holdfast.registry.writing.change import Stale as Stale
    from holdfast.registry.writing.change import after_commit as after_commit
    from holdfast.registry.writing.committer import Committer as Committer
    from holdfast.registry.writing.encoding import DELTA_WORTH as DELTA_WORTH
    from holdfast.registry.writing.encoding import Encoding as Encoding
    from holdfast.registry.writing.encoding import check_keyframe_every as check_keyframe_every
    from holdfast.registry.writing.hashing import NAMED_AT_MOST as NAMED_AT_MOST
    from holdfast.registry.writing.hashing import is_finite as is_finite
    from holdfast.registry.writing.hashing import is_watched as is_watched
    from holdfast.registry.writing.object_writer import ChosenKeys as ChosenKeys
    from holdfast.registry.writing.object_writer import NewPack as NewPack
    from holdfast.registry.writing.object_writer import ObjectWriter as ObjectWriter
    from holdfast.registry.writing.object_writer import placed_keys as placed_keys
    from holdfast.registry.writing.object_writer import put_pack as put_pack
    from holdfast.registry.writing.packing import Chunk as Chunk
    from holdfast.registry.writing.packing import chunked_entry as chunked_entry
    from holdfast.registry.writing.packing import cut_groups as cut_groups
    from holdfast.registry.writing.packing import group_name as group_name
    from holdfast.registry.writing.packing import write_packs as write_packs
    from holdfast.registry.writing.packing import write_stream as write_stream
    from holdfast.registry.writing.placing import ChunkLocation as ChunkLocation
    from holdfast.registry.writing.placing import Written as Written
    from holdfast.registry.writing.placing import build_placement as build_placement
    from holdfast.registry.writing.placing import cover as cover
    from holdfast.registry.writing.placing import cut_state as cut_state
    from holdfast.registry.writing.placing import locations_of as locations_of
    from holdfast.registry.writing.placing import place_manifest as place_manifest
    from holdfast.registry.writing.readable import check_readable as check_readable
    from holdfast.registry.writing.staging import Staging as Staging
    from holdfast.registry.writing.staging import places as places
    from holdfast.registry.writing.state_writer import StateWriter as StateWriter
    from holdfast.registry.writing.state_writer import Storing as Storing
    from holdfast.registry.writing.state_writer import check_storing as check_storing
    from holdfast.registry.writing.state_writer import codec_and_distance as codec_and_distance
else:
    __getattr__ = at_first_use(__name__)
