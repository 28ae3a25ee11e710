"""Follow a run while it trains.

- `watching`: `Watch` gives each checkpoint to one follower of a group, at least once.
- `following`: `Following` keeps the weights of a model at the newest checkpoint.
- `swapping`, `resident`: which chunks of the model differ, and writing them into its own memory.

`Watch` commits claims, through `writing`; `Following` only reads. `runs` depends on this room.
Specified in docs/spec.md, section 28.
"""
