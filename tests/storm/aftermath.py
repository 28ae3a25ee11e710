"""The checks after all processes have ended: no commit is lost, and no object is missing."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import holdfast
from holdfast.registry.face.registry import Registry
from holdfast.registry.face.run import Run
from holdfast.registry.history.log import RunLog
from holdfast.registry.history.replay import RunManifest, advance
from holdfast.registry.history.slots import list_runs
from holdfast.registry.objects.keys import KINDS
from holdfast.registry.writing.object_writer import placed_keys
from tests.storm.contents import difference, state_of
from tests.storm.journal import Event
from tests.storm.pushing import PHASE, STREAM
from tests.storm.storm import Log
from tests.storm.worker import refs
from tests.traces.acceptor import Acceptor
from tests.traces.reading import read

#: A step that nobody has pushed in the storm.
_CALM_STEP = 2**41


def check(url: str, log: Log, seeds: Mapping[str, int]) -> None:
    """Check a registry over which a storm has passed."""
    with holdfast.open(url) as reg:
        states = replayed(reg)
        check_acknowledged(reg, states, log)
        live = check_live(reg, seeds)
        assert live > 0
        log.counts["live refs"] = live
        assert errors(reg) == []


def check_conforms(url: str, trace: Path) -> Counter[str]:
    """Check that the model of the protocol allows every call of the storm; return their counts."""
    with holdfast.open(url) as reg:
        acceptor = Acceptor(read(trace), reg.handle.store)
        acceptor.check()
        return acceptor.counts


def check_collected(url: str, seeds: Mapping[str, int]) -> None:
    """Collect twice in quiet, and check that exactly what is needed is left."""
    for file in _unfinished(url):
        os.utime(file, (0, 0))  # only its age distinguishes a dead writer's file from a slow one's
    for _ in range(2):
        with holdfast.open(url) as reg:
            reg.gc(grace_s=0)
    assert _unfinished(url) == []
    with holdfast.open(url) as reg:
        found = {i.key for i in reg.handle.store.backend.list() if i.key.startswith(KINDS)}
        needed = needed_keys(reg, replayed(reg))
        assert needed - found == set(), "gone, and needed"
        assert found - needed == set(), "left, and needed by nothing"
        assert list(reg.verify(deep=True).findings) == []
        check_live(reg, seeds)


def check_alive(url: str) -> None:
    """Check that calm has come: one attempt is enough to go on with each run that is left."""
    with holdfast.open(url) as reg:
        for name in reg.run_names():
            run = reg.run(name)
            state = run.manifest
            # A fork that was killed waits until it is called again: that is refused by design.
            broken_off = state.created and state.created.parent and not state.has_checkpoints
            if state.dropped is None and not broken_off:
                # No `Conflict`: nobody else writes. The bound is that of one call.
                saved = run.exchange.push(state_of(0), step=_CALM_STEP, phase=PHASE)
                assert difference(saved.load(), 0) is None
        assert errors(reg) == []


def replayed(reg: Registry) -> dict[str, RunManifest]:
    """Replay every log from its first slot, and hold it against what its snapshots give."""
    states = {}
    for name in list_runs(reg.handle.store):
        log = RunLog(reg.handle.store, name)
        states[name] = advance(RunManifest(run_id=name), log.slots())
        assert log.open() == states[name].compact(), (
            f"{name}: a snapshot gives another run than its log"
        )
    return states


def needed_keys(reg: Registry, states: dict[str, RunManifest]) -> set[str]:
    """Return the keys of all objects that something live needs."""
    needed = set()
    for state in states.values():
        for manifest in state.held:
            place = state.by_manifest[manifest]
            placement = reg.handle.store.placement(place.placement_key)
            needed |= {str(key) for key in placed_keys(place, placement)}
    return needed


def errors(reg: Registry) -> list[object]:
    """Return what a deep verification finds that costs a checkpoint."""
    return [one for one in reg.verify(deep=True).findings if one.severity == "error"]


def check_live(reg: Registry, seeds: Mapping[str, int]) -> int:
    """Load everything that can be loaded, and hold it against its seed; return how much it is."""
    loaded = 0
    for name in reg.run_names():
        run = reg.run(name)
        for ref in refs(run.manifest):
            stored = ref.find(run)
            state = stored.load()
            seed = state["model"]["seed"]
            assert seeds.get(stored.digest.hex(), seed) == seed, stored.ref
            assert difference(state, seed) is None, f"{stored.ref}: {difference(state, seed)}"
            loaded += 1
    return loaded


def check_acknowledged(reg: Registry, states: dict[str, RunManifest], log: Log) -> None:
    """Check that the history has every acknowledged action."""
    notes: dict[str, list[str]] = {}
    for who, event in log.events:
        look = _CHECKS.get(event["did"])
        if look is not None:
            state = states[event["run"]]
            assert state.dropped is not None or look(state, event), f"{who}: lost: {event}"
        if event["did"] == "saved":
            assert _was_saved(states[event["run"]], event), f"{who}: lost: {event}"
        elif event["did"] == "appended" and states[event["run"]].dropped is None:
            notes.setdefault(event["run"], []).append(event["note"])
    for name, acknowledged in notes.items():
        check_stream(reg.run(name), acknowledged)


def check_stream(run: Run, acknowledged: list[str]) -> None:
    """Check that each acknowledged entry is in the stream once."""
    found = [entry["note"] for entry in run.streams[STREAM].read()]
    assert len(set(found)) == len(found), f"{run.id}: an entry twice"
    assert set(acknowledged) <= set(found), f"{run.id}: entries lost"


def _was_saved(state: RunManifest, event: Event) -> bool:
    """Return whether the log has the checkpoint, held or evicted."""
    record = state.by_n.get(event["n"])
    told = (event["id"], event["step"])
    return record is not None and (record.manifest.hex(), record.step) == told


def _was_undone(state: RunManifest, event: Event) -> bool:
    record = state.by_n[event["n"]]
    return record.recovered or record.evicted is not None


def _was_promoted(state: RunManifest, event: Event) -> bool:
    return any(entry.version == event["version"] for entry in state.pool)


def _was_gated(state: RunManifest, event: Event) -> bool:
    pin = state.pin("gate", event["gate"])
    return pin is not None and pin.manifest.hex() == event["id"]


def _was_forked(state: RunManifest, event: Event) -> bool:
    return any(one.manifest.hex() == event["id"] for one in state.checkpoints)


def _was_evicted(state: RunManifest, event: Event) -> bool:
    records = [state.by_n[n] for n in event["checkpoints"]]
    return all(one.evicted is not None or one.recovered for one in records)


_CHECKS: dict[str, Callable[[RunManifest, Event], bool]] = {
    "undone": _was_undone,
    "promoted": _was_promoted,
    "gated": _was_gated,
    "forked": _was_forked,
    "evicted": _was_evicted,
    "dropped": lambda state, event: state.dropped is not None,
}


def _unfinished(url: str) -> list[Path]:
    """Return the files that killed writers left in a folder; a bucket has none."""
    folder = Path(url) / ".tmp"
    names = () if "://" in url or not folder.is_dir() else folder.iterdir()
    return [name for name in names if name.is_file()]
