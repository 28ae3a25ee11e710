"""The heads that this machine has seen: the length of each run's log, and its last commit.

A digest proves that bytes belong together. It does not prove that they are the newest: anybody who
can write to a store can replace a log by an older copy. A reader notices that only if it remembers
heads. `folder` has the record, its file and the folder of a user's files, `memory` the
heads of an open registry. Specified in docs/spec.md, section 35.
"""

from __future__ import annotations

from holdfast.registry.store.heads.folder import MAX_FILE_BYTES as MAX_FILE_BYTES
from holdfast.registry.store.heads.folder import Head as Head
from holdfast.registry.store.heads.folder import HeadLines as HeadLines
from holdfast.registry.store.heads.folder import HeadsFile as HeadsFile
from holdfast.registry.store.heads.folder import place_name as place_name
from holdfast.registry.store.heads.memory import MEMORY as MEMORY
from holdfast.registry.store.heads.memory import Heads as Heads
from holdfast.registry.store.heads.memory import forget as forget
from holdfast.registry.store.heads.memory import open_heads as open_heads
