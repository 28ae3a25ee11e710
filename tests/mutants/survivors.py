"""Changes that survive since no test can notice them, each with the reason."""

from __future__ import annotations

_SAME_MOMENT = "It differs only where the clock shows the very same moment."
_ANNOTATION = "An annotation of a function within a function: nothing evaluates it."

SURVIVORS = {
    "registry.history.slots:Slots.put: pause(0.02, attempt) -> pass": (
        "It only waits before the next attempt, which finds the same."
    ),
    "registry.history.slots:Slots.put: time.monotonic() > until -> time.monotonic() >= until": (
        _SAME_MOMENT
    ),
    "registry.history.slots:Slots.numbers: 1 -> 2": (
        "Of `start - 1`: one slot more is listed, and the numbers are given from `start` on."
    ),
    "registry.history.epochs:Epochs.condemned_by: key.generation < epoch -> "
    "key.generation <= epoch": (
        "A sweep names no key that was put under its own epoch: there is none yet."
    ),
    "registry.writing.object_writer:ObjectWriter.begin: self._observed is None -> "
    "not (self._observed is None)": (
        "It only reads the epoch early: `observe` reads it where nothing has begun to."
    ),
    "registry.saving.journal.carrier:Carrier._outcome: committer.log.refresh() -> pass": (
        "The slot is composed for the newest log anyway; only objects may be sent in vain."
    ),
    "registry.saving.journal.carrier:Carrier._outcome: number < max(self._folder.noted(), "
    "default=0) -> number <= max(self._folder.noted(), default=0)": (
        "An entry that waits has no note, so its number is not the newest one of a note."
    ),
    "registry.saving.journal.carrier:Carrier._outcome: 0 -> 1": (
        "Without notes the first entry, number 1, is not below 1 either."
    ),
    "registry.saving.journal.carrier:Carrier._scan_for: self._scan.start > entry.search_from -> "
    "self._scan.start >= entry.search_from": "The same slots are read once more.",
    "registry.saving.journal.background:BackgroundCarrier.await_all: left_s <= 0 -> left_s < 0": (
        _SAME_MOMENT
    ),
    "registry.saving.collective.agreement:_unequal: True -> False": (
        "The keys are the same, so both lists are of one length."
    ),
    "registry.saving.collective.sides:Plans.keys: 0 -> 1": (
        "Of `known[0]`: without it no plan is used again, and each save makes an equal one."
    ),
    "registry.writing.object_writer:Condemned.__init__: super().__init__("
    "f'{len(keys)} objects were condemned meanwhile') -> pass": (
        "Its text is shown to nobody: the objects are written again."
    ),
    "registry.upkeep.planning:Planner._list_active: len(active) <= len(self.quiet.runs) -> "
    "len(active) < len(self.quiet.runs)": "Both ways list the same; it chooses the cheaper one.",
    "registry.saving.journal.folder:RunFolder.ids: 0 -> 1": (
        "The first machine of a journal gets number 2; only the order counts."
    ),
    "registry.history.authorship:new_authorship: 8 -> 9": (
        "The random name of a write is a byte longer."
    ),
    "registry.upkeep.sealing:seal: list[Line] | None -> list[Line] & None": _ANNOTATION,
    "registry.writing.object_writer:ObjectWriter.commit: Sequence[Line | bytes] | None -> "
    "Sequence[Line | bytes] & None": _ANNOTATION,
    "registry.saving.collective.exchange:_exchange: 1 -> 2": (
        "Of `reshape(-1)`: NumPy takes every negative number so. Tests notice `give[2]`."
    ),
    "registry.history.slots:still_ends: end.slots > 1 -> end.slots >= 1": (
        "Of a log of one slot: the key of slot -1, too, comes before that of slot 0."
    ),
    "registry.history.slots:still_ends: 2 -> 3": (
        "Of `_FEW + 2`: the listing may have one slot more. Both numbers are above the limit."
    ),
    "registry.saving.journal.folder:RunFolder.open_copy: 1 -> 2": (
        "Of `default=-1`: every number of commits is larger than both."
    ),
    "registry.saving.journal.background:DaemonPools.__init__: super().__init__(_THREADS) -> pass": (
        "Everything that uses what it would have is overridden."
    ),
    "registry.upkeep.planning:Planner._read_run: log.compact() -> pass": (
        "It only frees memory: no collection asks for the records of evicted checkpoints."
    ),
    "registry.writing.object_writer:ObjectWriter.note_small: self._durable.update(keys) -> pass": (
        "The files are only synced once more before the slot."
    ),
    "registry.saving.collective.talk:Calls.break_links: 1 -> 2": (
        "The number only makes the name of connections another one."
    ),
    "registry.upkeep.gc:Collector.spend_reserve: len(chosen) > _CONDEMNED_WHEN_FULL -> "
    "len(chosen) >= _CONDEMNED_WHEN_FULL": (
        "At exactly this number all are condemned both ways. Only one more look follows."
    ),
}
