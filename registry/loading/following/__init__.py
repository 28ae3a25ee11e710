"""Follow a run while it trains.

- `watching`: `Watch` gives each checkpoint to one follower of a group, at least once.
- `following`: `Following` keeps the weights of a model at the newest checkpoint.
- `swapping`: which chunks of the model differ, and writing them into its own memory.

`Watch` commits claims, through `writing`; `Following` only reads.
Specified in docs/spec.md, section 28.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.registry.values.first_use import at_first_use

if TYPE_CHECKING:
    from holdfast.registry.loading.following.following import Following
    from holdfast.registry.loading.following.watching import OVER, Patience, Watch
else:
    __getattr__ = at_first_use(__name__)
