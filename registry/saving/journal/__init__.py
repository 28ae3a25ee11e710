"""The journal: a save is durable on the machine's own disk first, and in the registry later.

- `settings`: `Journal`, the folder and its bound.
- `records`: the files of a journal. `folder`: `RunFolder`, the journal of one run.
  `registries`: the registries that runs of a journal are in.
  `file_lock`: locks between processes.
- `states`: the bytes of one entry, in a separate store.
- `entry_saves`: a save as an entry: checked now, composed again when it is carried, and looked for
  in the log since a takeover.
- `carrier`: adds the entries to the run, in order. `background`: its thread, its pools, and
  the end of the program.
- `saver`: `JournaledSaver`, which acknowledges saves. `line`: the run with the waiting entries, and
  where training continues. `checkpoint`: a checkpoint that only this machine may have, and the
  bound. `pushing`: stranded entries into a fork.

Specified in docs/spec.md, section 40.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.registry.values.first_use import at_first_use

if TYPE_CHECKING:
    from holdfast.registry.saving.journal.carrier import Carrier
    from holdfast.registry.saving.journal.folder import RunFolder, run_folders
    from holdfast.registry.saving.journal.line import JournaledLine
    from holdfast.registry.saving.journal.pushing import Listed
    from holdfast.registry.saving.journal.records import Note
    from holdfast.registry.saving.journal.registries import known_registry
    from holdfast.registry.saving.journal.saver import JournaledSaver
    from holdfast.registry.saving.journal.settings import FOLDER_VARIABLE, Journal, choose_journal
else:
    __getattr__ = at_first_use(__name__)
