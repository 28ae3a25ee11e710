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
    from holdfast.registry.curation.pool.entries import PoolEntry
    from holdfast.registry.curation.pool.league import OpponentPool
    from holdfast.registry.curation.pool.promoting import (
        Candidate,
        EntryImport,
        ForeignEntry,
        candidate_of,
        find_entry,
        pool_rules,
        promotion,
        rating_of,
    )
    from holdfast.registry.curation.pool.ratings import DEFAULT, Rating
else:
    __getattr__ = at_first_use(__name__)
