"""What the views ask: each module reads a registry and returns frozen dataclasses, without HTML.

- `runs`: the newest runs, a row each; `run`: one run, from `events`, `values`, `checkpoint_rows`,
  `forks`, `streams` and `timeline`.
- `side_by_side`: several runs; `lineage`: forks, merges and transitions across runs.
- `trouble`: an error as a page shows it; `encoded`: plain values of a log.
- `checkpoint`, `compare`, `pool`: stored states, found by `states`; `storage`, `health`: the whole
  registry. `tensor_charts`, `pool_charts` and `storage_charts` draw their answers.

A query takes a `Source` and plain arguments. It reads only what its view shows: its tests state the
requests. A run or a part of it that cannot be read becomes a `Trouble` in the answer.
Specified in docs/spec.md, section 42.
"""
