"""Names that keep stored states, evictions that a user asks for, the opponent pool, and streams.

- `pins`: gates, artifacts and tags; `releases`: states under semantic versions; `cards`: model
  cards as YAML; `namings`: who set a release, tag or label; `marks`: the names that point at each
  checkpoint. `forking`: a new run that continues from a checkpoint of another one.
- `pruning`: prune, evict, thin, undo, drop a run; `thinning`: the places of thinned checkpoints;
  `holding`: holds until a date; `dropping`: the drop of a run, and its undrop.
- `pool`: past models with ratings, for self-play. `streams`: append-only histories.

All of them commit through `writing`, and none needs the writer token. Specified in docs/spec.md,
sections 22 to 24, 26 and 27.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.registry.values.first_use import at_first_use

if TYPE_CHECKING:
    from holdfast.registry.curation.cards import MAX_BYTES, parse_card, write_card
    from holdfast.registry.curation.forking import inherit, inheritance
    from holdfast.registry.curation.marks import (
        STATUS_REASONS,
        Progress,
        checkpoint_marks,
        progress_of,
        run_remarks,
    )
    from holdfast.registry.curation.namings import Naming, Namings, names_of, read_namings
    from holdfast.registry.curation.pins import Artifacts, Gates, Pins, find_pin, kept, own
    from holdfast.registry.curation.pruning import RunRetention
    from holdfast.registry.curation.releases import Release, Releases
    from holdfast.registry.curation.thinning import PER_SAVE, PlacedThinnings, place_thinnings
else:
    __getattr__ = at_first_use(__name__)
