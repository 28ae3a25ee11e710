"""One save of a run, from its arguments to its commit; and restoring.

A save reads in this order:

- `save_request`: `SaveRequest` checks the arguments; `prepare_save` takes the state apart.
- `trainer`: `Trainer` makes a `SaveCommit` and gives it to
  `holdfast.registry.writing.committer`; in the background if it was asked to.
- `save_commit`: `SaveCommit` answers the committer: `check` whether the run allows the save,
  `write_states` to put objects on the store, `actions` for the lines of the log.
- `background`: what a save does if another one is running; `pending`: `PendingSave`, and the end of
  the program.
- `backlog`: what a journal has and the registry does not.
- `restoring`: the newest checkpoint that can be loaded whole.

`holdfast.registry.history.writer_token` decides who may save. `run` and `transitions` depend on
this room. Specified in docs/spec.md, sections 11, 12 and 21; docs/architecture.md has every step.
"""
