"""In the training loop: when to save, and requests by signals, notices and other ranks.

- `checkpointer`: `Checkpointer`, the result of `run.checkpointer(...)`; `options`: its
  arguments, and the processes that exit together.
- `stopping`: signal handlers, and the thread that ends a process that takes too long to exit;
  `notice`: a file or a callable that announces the end, whether a run is overdue, and the time for
  which training waited for saves.

It stores nothing of its own: it calls the saver of the run. Specified in docs/spec.md, section
36; docs/training.md is for users.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.registry.values.first_use import at_first_use

if TYPE_CHECKING:
    from holdfast.registry.saving.loop.checkpointer import Checkpointer
    from holdfast.registry.saving.loop.notice import (
        LastHeard,
        failed_saves,
        last_heard,
        waited_share,
    )
    from holdfast.registry.saving.loop.options import LoopOptions, Stopping
else:
    __getattr__ = at_first_use(__name__)
