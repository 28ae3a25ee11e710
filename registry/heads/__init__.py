"""Heads that were seen before: how far each run's log went, and its last commit.

A digest proves that bytes belong together. It does not prove that they are the newest: who can
write to a store can put an older copy in place of a log. A reader notices that only by what it
remembers. `record` has the record and its file, `folder` the place where a user's files are kept,
`memory` what an open registry remembers.
"""

from __future__ import annotations

from registry.heads.memory import MEMORY, Heads, recall, trust
from registry.heads.record import MAX_FILE_BYTES, Head, HeadLines, HeadsFile

__all__ = ["MAX_FILE_BYTES", "MEMORY", "Head", "HeadLines", "Heads", "HeadsFile", "recall", "trust"]
