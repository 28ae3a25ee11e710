"""The heads that this machine has seen: the length of each run's log, and its last commit.

A digest proves that bytes belong together. It does not prove that they are the newest: anybody who
can write to a store can replace a log by an older copy. A reader notices that only if it remembers
heads. `folder` has the record, its file and the folder of a user's files, `memory` the
heads of an open registry. Specified in docs/spec.md, section 35.
"""

from __future__ import annotations

from holdfast.registry.store.heads.folder import (
    MAX_FILE_BYTES,
    Head,
    HeadLines,
    HeadsFile,
    place_name,
)
from holdfast.registry.store.heads.memory import MEMORY, Heads, forget, open_heads
