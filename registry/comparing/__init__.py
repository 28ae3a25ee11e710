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
    from holdfast.registry.comparing.branches import Branches as Branches
    from holdfast.registry.comparing.branches import StepPair as StepPair
    from holdfast.registry.comparing.branches import compare_runs as compare_runs
    from holdfast.registry.comparing.branches import settings_of as settings_of
    from holdfast.registry.comparing.chunkwise import Piece as Piece
    from holdfast.registry.comparing.chunkwise import reduce_pieces as reduce_pieces
    from holdfast.registry.comparing.elements import PARTS as PARTS
    from holdfast.registry.comparing.elements import blocks as blocks
    from holdfast.registry.comparing.elements import decoded as decoded
    from holdfast.registry.comparing.elements import float8_values as float8_values
    from holdfast.registry.comparing.ranking import KeyRank as KeyRank
    from holdfast.registry.comparing.ranking import Ranking as Ranking
    from holdfast.registry.comparing.ranking import rank_config as rank_config
    from holdfast.registry.comparing.state_diff import KINDS as KINDS
    from holdfast.registry.comparing.state_diff import ComponentDiff as ComponentDiff
    from holdfast.registry.comparing.state_diff import Diff as Diff
    from holdfast.registry.comparing.state_diff import Distance as Distance
    from holdfast.registry.comparing.state_diff import TensorDiff as TensorDiff
    from holdfast.registry.comparing.state_diff import diff as diff
    from holdfast.registry.comparing.state_diff import differing_bytes as differing_bytes
    from holdfast.registry.comparing.state_diff import distances as distances
    from holdfast.registry.comparing.tensor_stats import Histogram as Histogram
    from holdfast.registry.comparing.tensor_stats import StateStats as StateStats
    from holdfast.registry.comparing.tensor_stats import TensorStats as TensorStats
    from holdfast.registry.comparing.tensor_stats import histogram as histogram
    from holdfast.registry.comparing.tensor_stats import stats as stats
    from holdfast.registry.comparing.tensor_stats import stats_of as stats_of
else:
    __getattr__ = at_first_use(__name__)
