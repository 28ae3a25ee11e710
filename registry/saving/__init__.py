"""Saves, from the arguments of a call to the commit; and restoring.

A save is a row of values, none of which changes: `SaveRequest`, `FlatSave`, `PlannedSave`,
`WrittenSave`; then it is committed.

- `save_request`: the first three of them. `save_commit`: the fourth, and `SaveCommit`, which
  answers the committer: whether the run allows the save, which objects and lines it has.
- `saver`: `LocalSaver`, the plainest of three savers; `RunHandle`, an open run as other rooms take
  it.
- `pipeline`: the steps of every save. `ownership`: the hold of a handle on its run.
- `pending`: saves in the background, and the end of the program. `logged`: numbers of steps
  between checkpoints.
- `restoring`: the newest checkpoint that can be loaded whole.
- `journal`: a save is durable on the machine's own disk first, and in the registry later.
- `collective`: saves and loads that all ranks of a job make together.
- `loop`: the checkpointer of a training loop: when it saves, and how it stops.

`holdfast.registry.history.writer_token` decides who may save. Specified in docs/spec.md, sections
11, 12, 21, 36, 40 and 43; docs/architecture.md has every step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.registry.values.first_use import at_first_use

if TYPE_CHECKING:
    from holdfast.registry.saving.earlier_steps import EarlierSteps
    from holdfast.registry.saving.pending import EXIT_WAIT, Backlog, Busy, PendingSave
    from holdfast.registry.saving.restoring import Attempt, Restored, check_source, restore_newest
    from holdfast.registry.saving.save_commit import SaveCommit
    from holdfast.registry.saving.save_request import (
        FlatSave,
        PlannedSave,
        SaveRequest,
        plan_save,
        take_apart,
    )
    from holdfast.registry.saving.saver import LocalSaver, RunHandle, ask
else:
    __getattr__ = at_first_use(__name__)
