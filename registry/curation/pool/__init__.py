"""The opponent pool of a run: past models with ratings, for self-play.

- `league`: `OpponentPool`, as users hold it, and its loaded models; `entries`: `PoolEntry`, one
  model of it.
- `promoting`: a promotion as a change of the run; `matches`: the actions of a match, and the past
  of the pool's entries.
- `selection`: draws opponents by the number of a game; `ratings`: the arithmetic of ratings.

The same seed and the same game must draw the same opponent everywhere: `selection` and `ratings`
do not change. Specified in docs/spec.md, section 24.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.registry.values.first_use import at_first_use

if TYPE_CHECKING:
    from holdfast.registry.curation.pool.entries import PoolEntry as PoolEntry
    from holdfast.registry.curation.pool.league import OpponentPool as OpponentPool
    from holdfast.registry.curation.pool.promoting import Candidate as Candidate
    from holdfast.registry.curation.pool.promoting import EntryImport as EntryImport
    from holdfast.registry.curation.pool.promoting import ForeignEntry as ForeignEntry
    from holdfast.registry.curation.pool.promoting import candidate_of as candidate_of
    from holdfast.registry.curation.pool.promoting import find_entry as find_entry
    from holdfast.registry.curation.pool.promoting import pool_rules as pool_rules
    from holdfast.registry.curation.pool.promoting import promotion as promotion
    from holdfast.registry.curation.pool.promoting import rating_of as rating_of
    from holdfast.registry.curation.pool.ratings import DEFAULT as DEFAULT
    from holdfast.registry.curation.pool.ratings import Rating as Rating
else:
    __getattr__ = at_first_use(__name__)
