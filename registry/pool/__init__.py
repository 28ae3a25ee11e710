"""The opponent pool of a run: past models with ratings, for self-play.

- `league`: `OpponentPool`, as users hold it; `entries`: `PoolEntry`, one model of it.
- `promotion`, `matches`: pure functions: the actions of a promotion, and of a match.
- `promoting`: a promotion as a change of the run.
- `selection`: draws opponents by the number of a game; `ratings`: the arithmetic of ratings.
- `events`: the past of the pool's entries; `model_cache`: loaded models.

The same seed and the same game must draw the same opponent everywhere: `selection` and `ratings`
do not change. `training` promotes on save through `promotion`. Specified in docs/spec.md,
section 24.
"""
