"""The rare places: moments of the protocols that only chance, a crash or a race brings about.

Each is named by the statement of the library that runs then (`tests.support.sometimes`). A test
takes those of its own list: it fails if it ends without having been at each.
"""

from __future__ import annotations

from tests.support.sometimes import Place

#: Commits: races for a slot, lost answers, sweeps that come between.
COMMIT = {
    "a lost answer is read back as our own slot": Place(
        "registry.history.slots",
        "Slots.put",
        "return self._store.backend.get(key) == slot.data",
        when="self._store.backend.get(key) == slot.data",
    ),
    "another writer has the slot": Place(
        "registry.history.slots",
        "Slots.put",
        "if self._store.backend.put_if_absent",
        when="slot.number in self.numbers()",
    ),
    "the outcome of a slot is unknown": Place(
        "registry.history.slots", "Slots.put", "except StoreUnavailable"
    ),
    "a writer that lost often waits": Place(
        "registry.history.slots", "Races.lose", "if self.lost > 2"
    ),
    "a newer log is read after a lost race": Place(
        "registry.history.log", "RunLog._read_winner", "self.refresh()"
    ),
    "a slot needs the records of evicted checkpoints": Place(
        "registry.history.log", "RunLog._after", "except NeedsHistory"
    ),
    "lines are composed of the whole history": Place(
        "registry.history.log", "RunLog._compose", "except NeedsHistory"
    ),
    "slots that were read need the whole history": Place(
        "registry.history.log", "RunLog._fold", "except NeedsHistory"
    ),
    "a change looks for evicted records": Place(
        "registry.writing.committer", "Committer._recalling", "self.log.recall()"
    ),
    "a change is stale and made again": Place(
        "registry.writing.committer", "Committer.commit", "except Stale"
    ),
    "a mark is met between plan and commit": Place(
        "registry.writing.committer", "Committer._attempt", "except Condemned"
    ),
    "an object is gone while a change reads it": Place(
        "registry.writing.committer", "Committer._attempt", "except MissingObject"
    ),
    "objects are written again after a sweep": Place(
        "registry.writing.committer", "Committer.commit", "if run is None"
    ),
    "a mark is newer than the observed epoch": Place(
        "registry.writing.object_writer", "ObjectWriter._check_epoch", "self._epochs.require"
    ),
    "a condemned object is passed over": Place(
        "registry.writing.object_writer",
        "ObjectWriter.usable",
        "if is_sound and not",
        when="is_sound and self._epochs.condemned([key], self.observe())",
    ),
    "another writer has put the pack": Place(
        "registry.writing.object_writer", "put_pack", "return False"
    ),
    "another writer has put the manifest": Place(
        "registry.writing.object_writer", "put_small", "form.decode("
    ),
    "a commit relies on what another writer put": Place(
        "registry.writing.object_writer", "ObjectWriter._make_durable", "if unsure"
    ),
    "a new seal is met at the commit": Place(
        "registry.writing.object_writer", "ObjectWriter._recheck", "self._observed = self._begun"
    ),
    "a save repeats a checkpoint": Place(
        "registry.saving.save_commit",
        "SaveCommit.write_others",
        "self.written = WrittenSave(main, companions, repeats=True)",
    ),
    "a condemned object is copied": Place(
        "registry.writing.adopting", "_Adoption.copy_packs", "copies.append(PackCopy"
    ),
    "a state has moved while it is read": Place(
        "registry.history.state_reader",
        "StateReader._relocated",
        "if self.place != place",
    ),
    "a state is gone while it is read": Place(
        "registry.history.state_reader",
        "StateReader._relocated",
        "evicted = (",
    ),
    "a base is damaged or gone": Place(
        "registry.writing.state_writer",
        "StateWriter.choose_bases",
        "except (Archived, IntegrityError)",
    ),
}

#: Collections: several at once, beside writers, after crashes.
COLLECT = {
    "two collectors want one epoch": Place(
        "registry.history.epochs",
        "Epochs.put_sweep",
        "return self._store.backend.put_if_absent",
        when="any(one.key == epoch_key(epoch) for one in self._store.backend.list(EPOCHS))",
    ),
    "a sweep is finished by another collector": Place(
        "registry.upkeep.gc", "Collector.condemn", "if not len(fresh)"
    ),
    "a run began after the choice": Place(
        "registry.upkeep.gc", "Collector._mark_run", "log = RunLog(self._store, run_id)"
    ),
    "a run is marked already": Place(
        "registry.upkeep.gc",
        "Collector._mark_run",
        "return None if marked",
        when="marked and run.epoch >= sweep.epoch",
    ),
    "a run is marked by a newer sweep": Place(
        "registry.upkeep.gc",
        "Collector._mark_run",
        "return None if marked",
        when="run.epoch > sweep.epoch",
    ),
    "a run needs what was condemned": Place(
        "registry.upkeep.gc",
        "Collector.mark",
        "spared.add(object_rows",
        when="len(needed)",
    ),
    "a collection begins at a note": Place(
        "registry.upkeep.planning", "Planner._start", "log.start_from"
    ),
    "a run is sealed": Place(
        "registry.upkeep.planning", "Planner.make_notes", "if slot is not None"
    ),
    "a quiet run is passed over": Place(
        "registry.upkeep.sealing", "QuietRuns.find", "if needed is not None"
    ),
    "a sealed run is woken": Place(
        "registry.history.log", "RunLog.announce", "marker = marker_key"
    ),
    "a sealed run was woken by another writer": Place(
        "registry.history.log", "RunLog.announce", "self._store.backend.make_durable([marker])"
    ),
    "an undrop brings states from a mirror": Place(
        "registry.curation.dropping", "undrop", "return committer.writer.adopt"
    ),
    "a quiet run has lost its log during a collection": Place(
        "registry.upkeep.gc",
        "Collector._mark_run",
        "self._planner.quiet.check(log)",
        when="run_id in self._planner.quiet.runs",
    ),
    "a placement is gone when a collection asks for it": Place(
        "registry.upkeep.planning", "Planner.needed_by", "except MissingObject"
    ),
    "an undrop is faster than the end of the delay": Place(
        "registry.upkeep.planning", "Planner._free_if_due", "self.freed.discard(log.run_id)"
    ),
    "a registry is told to keep during a collection": Place(
        "registry.upkeep.planning", "Planner.check_rules", "if self._epochs.header(epoch).keep"
    ),
    "a full store condemns what its reserve has space for": Place(
        "registry.upkeep.gc", "Collector.spend_reserve", "few = chosen.largest"
    ),
    "a marker has outlived its seal": Place(
        "registry.upkeep.sealing", "QuietRuns.is_sealed", "self._finished[log.run_id] = sealed"
    ),
}

#: Copies into a mirror, moves into new packs, and thinnings, beside other writers.
CARE = {
    "a run is compared whole again": Place(
        "registry.face.syncing", "sync", "del compared.before[name]"
    ),
    "the destination has lost a state that a sync relied on": Place(
        "registry.face.syncing", "_RunCopy.lines", "if missing and not ("
    ),
    "the source has moved an object during a sync": Place(
        "registry.face.syncing",
        "_RunCopy.read_again",
        "return self._run.next_slot != read",
        when="self._run.next_slot != read",
    ),
    "a repack plans again": Place(
        "registry.upkeep.repacking.execution", "repack", "except MissingObject"
    ),
    "another repack has moved a state first": Place(
        "registry.upkeep.repacking.runs", "RunRepack._note_lost", "self.lost.add"
    ),
    "a thinned state has got another holder": Place(
        "registry.curation.thinning", "PlacedThinnings.actions", "if sorted(held.get"
    ),
    "a key has signed another history": Place(
        "registry.history.signatures", "sign_commit", "raise Conflict("
    ),
    "a signature comes while its commit is checked": Place(
        "registry.upkeep.signature_check",
        "SignatureCheck._check_runs",
        "found[run_id] = self._read_run(later",
    ),
    "a version is gone while a follower fetches it": Place(
        "registry.hub.engines.following", "EngineFollower._poll", "continue"
    ),
    "an engine was started again": Place(
        "registry.hub.engines.following",
        "_Link._keep_at",
        "self.engine.tell(version)",
        when="self.confirmed == version",
    ),
}

#: A journal: its machine dies, its registry is away, another machine takes over.
JOURNAL = {
    "a journal is stranded": Place(
        "registry.saving.journal.carrier", "Carrier._outcome", "except Stranded"
    ),
    "an entry was carried by a process that died": Place(
        "registry.saving.journal.carrier",
        "Carrier._carry",
        "if entry.save is None",
        when="scan.commit_of(entry.write) is not None",
    ),
    "states of an unfinished save are deleted": Place(
        "registry.saving.journal.folder",
        "RunFolder.remove_unacknowledged",
        "if not [*self._copies(write)]",
    ),
    "training goes on without the registry": Place(
        "registry.saving.journal.folder",
        "RunFolder.open_copy",
        "return takeover.slot < log.run.next_slot",
    ),
    "an entry is in the log when its slot is composed": Place(
        "registry.saving.journal.entry_saves", "LogScan.is_due", "return False"
    ),
    "the note of an entry is lost": Place(
        "registry.saving.journal.carrier", "Carrier._outcome", "if number < max("
    ),
    "the registry answers again": Place(
        "registry.history.log", "RunLog.refresh", "self.check_unchanged()"
    ),
}

#: Saves of all ranks together, of which one is late, or dies.
COLLECTIVE = {
    "a rank has missed a call and makes the next": Place(
        "registry.saving.collective.talk", "Calls.make", "limit_s, earlier = talk.again_s"
    ),
    "the ranks are out of step": Place(
        "registry.saving.collective.talk", "Talk._check_steps", "if behind"
    ),
    "rank 0 says nothing": Place(
        "registry.saving.collective.talk", "Talk._from_first", "if not found"
    ),
    "a rank says nothing": Place("registry.saving.collective.talk", "Talk.gather", "if missing"),
    "only connections are lost": Place(
        "registry.saving.collective.talk", "Talk.gather", "raise unlinked_error"
    ),
    "a rank looks into the log for the outcome": Place(
        "registry.saving.collective.sides",
        "Following._look_for_it",
        "self.writer.log.refresh()",
    ),
    "a rank finds the commit of a lost rank 0": Place(
        "registry.saving.collective.sides", "Following._look_for_it", "if found is not None"
    ),
    "a rank finds no commit of a lost rank 0": Place(
        "registry.saving.collective.sides", "Following._look_for_it", "unknown = RankFailed("
    ),
    "rank 0 loses its connections": Place(
        "registry.saving.collective.sides", "Leading._have_stored", "except LinksBroken"
    ),
    "a rank loses its connections": Place(
        "registry.saving.collective.sides", "Following._obey", "except LinksBroken"
    ),
}

PLACES = {**COMMIT, **COLLECT, **CARE, **JOURNAL, **COLLECTIVE}
