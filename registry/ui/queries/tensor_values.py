"""The values of tensors within a budget of bytes: statistics of many, the histogram of one."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.registry.comparing.histograms import Histogram, histogram
from holdfast.registry.comparing.stats import TensorStats, stats_of
from holdfast.registry.loading.fit import tensors_by_path
from holdfast.registry.ui.queries.states import find
from holdfast.registry.ui.source import Source

#: Bytes of tensors that one request may read.
BUDGET_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Statistics:
    """Statistics of tensors, as far as the budget went.

    Attributes:
        tensors: The statistics of those that were read, in the order of the state.
        read_bytes: Their bytes.
        left: Number of tensors that the budget did not reach.
        left_bytes: Their bytes.
        budget_bytes: The budget.
    """

    tensors: tuple[TensorStats, ...]
    read_bytes: int
    left: int
    left_bytes: int
    budget_bytes: int


def statistics(source: Source, ref: str, *, budget_bytes: int = BUDGET_BYTES) -> Statistics:
    """Read tensors in their order until the budget is spent, and return their statistics.

    Raises:
        NotFound: The ref names nothing.
        IntegrityError: Something is damaged or gone.
    """
    stored = find(source, ref)
    chosen, left, spent = [], [], 0
    for path, entry in tensors_by_path(stored.manifest.components).items():
        nbytes = 0 if entry.inline is not None else entry.nbytes
        if spent + nbytes <= budget_bytes:
            chosen.append(path)
            spent += nbytes
        else:
            left.append(entry.nbytes)
    found = stats_of(stored, chosen)
    return Statistics(found.tensors, spent, len(left), sum(left), budget_bytes)


def distribution(
    source: Source, ref: str, path: str, *, budget_bytes: int = BUDGET_BYTES
) -> Histogram:
    """Return the histogram of one tensor; read at most the budget, spread over the tensor.

    Raises:
        NotFound: The ref or the path names nothing.
        IntegrityError: Something is damaged or gone.
    """
    return histogram(find(source, ref), path, budget_bytes=budget_bytes)
