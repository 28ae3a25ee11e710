"""The metrics and streams of a run as a figure of Plotly, with gates, bests and phases marked.

- `curves`: the curves, their points and marks, as plain values.
- `figure`: the figure. The one module that imports plotly (the extra `ui`), when one is made.

It only reads. `curves` also serves pages that show the numbers of streams.
docs/notebooks.md describes what users see.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.registry.values.first_use import at_first_use

if TYPE_CHECKING:
    from holdfast.registry.plots.curves import Axis as Axis
    from holdfast.registry.plots.curves import numbers_by_key as numbers_by_key
    from holdfast.registry.plots.figure import StreamKeys as StreamKeys
    from holdfast.registry.plots.figure import plot_run as plot_run
else:
    __getattr__ = at_first_use(__name__)
