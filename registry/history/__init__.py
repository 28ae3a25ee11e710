"""The history of a run: its log, the actions in it, and their replay.

- `log`: `RunLog` opens a run, reads its slots and appends one. `slots` has the files,
  `tail` checks that the log is still the one that was read, `snapshots` shortens the reading.
- `actions`: all that a commit can say; `replay`: `RunManifest`, the run after all its commits.
- `creation`: the first commit; `retention`, `tiers`: which checkpoints are kept, and why.
- `action_texts`: actions in words; `step_names`: the names of phases and steps.
- `writer_token`: which handle may save. `epochs`: the log of sweeps that all runs share.
- `state_reader`: where a stored state is (`PlacedState`), and reading it from there.

The fields of actions and the rules of replay are on every store: they change only with a new
version. `Slots.put` is the only place where a commit is made. `writing`, `loading` and everything
above are built on this room. Specified in docs/spec.md, sections 8 to 10, 12 and 22.
"""
