"""Compare checkpoints and describe their tensors, in bounded memory.

- `state_diff`: two checkpoints compared by their manifests, and tensors element by element.
- `branches`: two runs side by side: their fork, settings, steps and first difference.
- `ranking`: keys of configurations ranked by how strongly they go with a metric, over many runs.
- `tensor_stats`: extremes, means and norms of the tensors of a stored state; a histogram of one.
- `chunkwise`, `elements`: chunks read one after another, and their bytes as numbers.

It only reads, through `loading`. docs/cli.md describes what users see; docs/spec.md, section 14,
how chunks are read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.registry.values.first_use import at_first_use

if TYPE_CHECKING:
    from holdfast.registry.comparing.branches import Branches, StepPair, compare_runs, settings_of
    from holdfast.registry.comparing.chunkwise import Piece, reduce_pieces
    from holdfast.registry.comparing.elements import PARTS, blocks, decoded, float8_values
    from holdfast.registry.comparing.ranking import KeyRank, Ranking, rank_config
    from holdfast.registry.comparing.state_diff import (
        KINDS,
        ComponentDiff,
        Diff,
        Distance,
        TensorDiff,
        diff,
        differing_bytes,
        distances,
    )
    from holdfast.registry.comparing.tensor_stats import (
        Histogram,
        StateStats,
        TensorStats,
        histogram,
        stats,
        stats_of,
    )
else:
    __getattr__ = at_first_use(__name__)
