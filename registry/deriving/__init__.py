"""States that are made of stored states: averages, and the transition from a phase to the next.

- `merging`: a checkpoint of others: some tensors averaged, the rest picked.
- `transitions`: transitions between phases, pivots within one, and how a run starts.

Specified in docs/spec.md, sections 25 and 34.
"""
