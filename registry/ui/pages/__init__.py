"""Every view, in the order of the navigation. A view is added by its line here.

- `view`: the type `View`, its question (`Asked`) and its answer (`Shown`).
- `events`, `timeline`: the history of a run; `contents`: the tensors of a state.
- Each other module is one view, named as in its path: its query, and its `VIEW`.

The docstring of `holdfast.registry.ui` has the steps to add a view. Specified in
docs/spec.md, section 42.
"""

from __future__ import annotations

from holdfast.registry.ui.pages import (
    checkpoint,
    diff,
    health,
    lineage,
    names,
    pool,
    run,
    runs,
    side_by_side,
    storage,
)
from holdfast.registry.ui.pages.view import View

VIEWS: tuple[View, ...] = (
    runs.VIEW,
    names.VIEW,
    lineage.VIEW,
    run.VIEW,
    lineage.OF_RUN,
    pool.VIEW,
    side_by_side.VIEW,
    checkpoint.VIEW,
    diff.VIEW,
    storage.VIEW,
    health.VIEW,
)
