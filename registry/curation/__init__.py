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
    from holdfast.registry.curation.cards import MAX_BYTES as MAX_BYTES
    from holdfast.registry.curation.cards import parse_card as parse_card
    from holdfast.registry.curation.cards import write_card as write_card
    from holdfast.registry.curation.forking import inherit as inherit
    from holdfast.registry.curation.forking import inheritance as inheritance
    from holdfast.registry.curation.marks import STATUS_REASONS as STATUS_REASONS
    from holdfast.registry.curation.marks import Progress as Progress
    from holdfast.registry.curation.marks import checkpoint_marks as checkpoint_marks
    from holdfast.registry.curation.marks import progress_of as progress_of
    from holdfast.registry.curation.marks import run_remarks as run_remarks
    from holdfast.registry.curation.namings import Naming as Naming
    from holdfast.registry.curation.namings import Namings as Namings
    from holdfast.registry.curation.namings import names_of as names_of
    from holdfast.registry.curation.namings import read_namings as read_namings
    from holdfast.registry.curation.pins import Artifacts as Artifacts
    from holdfast.registry.curation.pins import Gates as Gates
    from holdfast.registry.curation.pins import Pins as Pins
    from holdfast.registry.curation.pins import find_pin as find_pin
    from holdfast.registry.curation.pins import kept as kept
    from holdfast.registry.curation.pins import own as own
    from holdfast.registry.curation.pruning import RunRetention as RunRetention
    from holdfast.registry.curation.releases import Release as Release
    from holdfast.registry.curation.releases import Releases as Releases
    from holdfast.registry.curation.thinning import PER_SAVE as PER_SAVE
    from holdfast.registry.curation.thinning import PlacedThinnings as PlacedThinnings
    from holdfast.registry.curation.thinning import place_thinnings as place_thinnings
else:
    __getattr__ = at_first_use(__name__)
