"""Saves, from the arguments of a call to the commit; and restoring.

A save is a row of values, none of which changes: `SaveRequest`, `FlatSave`, `PlannedSave`,
`WrittenSave`; then it is committed.

- `save_request`: the first three of them. `save_commit`: the fourth, and `SaveCommit`, which
  answers the committer: whether the run allows the save, which objects and lines it has.
- `saver`: `Saver`, what the three savers offer; `LocalSaver`; `RunHandle`, an open run as other
  rooms take it.
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
    from holdfast.registry.saving.earlier_steps import EarlierSteps as EarlierSteps
    from holdfast.registry.saving.pending import EXIT_WAIT as EXIT_WAIT
    from holdfast.registry.saving.pending import Backlog as Backlog
    from holdfast.registry.saving.pending import Busy as Busy
    from holdfast.registry.saving.pending import PendingSave as PendingSave
    from holdfast.registry.saving.restoring import Attempt as Attempt
    from holdfast.registry.saving.restoring import Restored as Restored
    from holdfast.registry.saving.restoring import check_source as check_source
    from holdfast.registry.saving.restoring import restore_newest as restore_newest
    from holdfast.registry.saving.save_commit import SaveCommit as SaveCommit
    from holdfast.registry.saving.save_request import FlatSave as FlatSave
    from holdfast.registry.saving.save_request import PlannedSave as PlannedSave
    from holdfast.registry.saving.save_request import SaveRequest as SaveRequest
    from holdfast.registry.saving.save_request import plan_save as plan_save
    from holdfast.registry.saving.save_request import take_apart as take_apart
    from holdfast.registry.saving.saver import LocalSaver as LocalSaver
    from holdfast.registry.saving.saver import RunHandle as RunHandle
    from holdfast.registry.saving.saver import ask as ask
else:
    __getattr__ = at_first_use(__name__)
