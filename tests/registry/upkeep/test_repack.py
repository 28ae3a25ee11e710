"""Repacking while others read, save, sync, collect and repack: nothing is lost, no id changes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
import pytest

from holdfast import Retention, sync
from holdfast.backends.memory import MemoryBackend
from holdfast.backends.wrappers import Fault, Faulty, InjectedCrash, Metered
from holdfast.registry.errors import (
    Conflict,
    Damaged,
    InvalidInput,
    MissingObject,
    RegistryError,
    StoreUnavailable,
)
from holdfast.registry.face.factory import open_on
from holdfast.registry.face.registry import Registry
from holdfast.registry.history.actions import Place
from holdfast.registry.history.epochs import encode_sweep
from holdfast.registry.history.log import RunLog
from holdfast.registry.objects import codecs
from holdfast.registry.objects.keys import ObjectKey, epoch_key, log_prefix
from holdfast.registry.upkeep.gc import collect
from holdfast.registry.upkeep.repacking import execution as repack
from holdfast.registry.upkeep.repacking import packs as repack_packs
from holdfast.registry.upkeep.repacking import repack_plan as repack_plan
from holdfast.registry.upkeep.repacking import runs as repack_runs
from holdfast.registry.values.digest import Digest
from tests.registry.upkeep.thinning import as_delta, attempt, settled, state, thin
from tests.support.faults import Hooked, Once, flip
from tests.support.inline import without_threads
from tests.support.loads import check_states
from tests.support.repacks import plan_repack
from tests.support.states import same, save_small, small_state
from tests.support.stores import contents, new_backend, objects, packs, packs_of, small_grid

pytestmark = pytest.mark.usefixtures("grid")

SLOTS = "runs/run/log/"


def loads(registry: Registry) -> None:
    """Check that everything that is held is whole, and that checkpoints are what was saved."""
    check_states(registry, lambda one: state(one.step, 5 * one.ref.startswith("other/")))


def slots(registry: Registry, run_id: str = "run") -> list[list[object]]:
    """Return the lines of each slot."""
    return [
        [line for _, line in slot.lines] for slot in RunLog(registry.handle.store, run_id).slots()
    ]


def named_packs(registry: Registry, run_id: str = "run") -> set[str]:
    run_state = registry.run(run_id).manifest
    places = [run_state.by_manifest[manifest] for manifest in run_state.held]
    store = registry.handle.store
    return {str(p.key) for place in places for p in store.placement(place.placement_key).packs}


def collected(backend) -> None:
    """Collect everything that no run needs, in another process."""
    with open_on(backend) as registry:
        collect(registry.handle.store, grace_s=0)


def repacked(backend) -> None:
    """Repack in another process."""
    with open_on(backend) as registry:
        registry.repack()


# What it does


def test_dead_bytes_go_and_everything_else_stays_what_it_is(run, reg, backend, open_registry):
    thin(run, 1, 2, 3, 4, 5, last=2)
    ids = [checkpoint.digest for checkpoint in run.checkpoints()]
    report = reg.repack()
    loads(open_registry(backend))
    collected(backend)
    fresh = open_registry(backend)
    loads(fresh)
    assert [checkpoint.digest for checkpoint in fresh.run("run").checkpoints()] == ids
    packs = [key for key in objects(backend) if key.startswith("packs/")]
    assert len(packs) == 1
    kept = sum(sum(map(len, state(s)["model"].values())) for s in (4, 5)) - 1200
    # A second list for the second tensor of each state.
    assert report.bytes_moved == kept + sum(fresh_lists(fresh))
    assert not fresh.repack().rewritten


def fresh_lists(registry: Registry) -> list[int]:
    checkpoints = registry.run("run").checkpoints()
    return list({d: n for ck in checkpoints for d, n in _lists(ck).items()}.values())


def _lists(checkpoint) -> dict[Digest, int]:
    direct = checkpoint.manifest.direct_chunks
    return {digest: direct[digest] for digest in checkpoint.manifest.chunk_lists}


def test_a_report_tells_what_was_done(run, reg, backend):
    thin(run, 1, 2, 3, last=2)
    old = named_packs(reg)
    sizes = {key: len(data) for key, data in contents(backend).items()}
    counted = []
    planned = reg.repack(dry_run=True)
    report = reg.repack(progress=counted.append)
    assert {str(one.pack) for one in report.rewritten} == old
    assert report.packs_read == len(old)
    assert report.packs_written == 1
    assert report.freed_bytes == sum(sizes[key] for key in old)
    assert report.bytes_moved == counted[-1] == sum(one.live_bytes for one in report.rewritten)
    assert report.runs == ("run",)
    assert report.checkpoints == 2
    assert planned == replace(report, dry_run=True)


def test_a_dry_run_writes_nothing(run, reg, backend):
    thin(run, 1, 2, 3)
    before = contents(backend)
    assert reg.repack(dry_run=True).rewritten
    assert contents(backend) == before


def test_nothing_is_written_where_nothing_is_gained(run, reg, backend):
    thin(run, 1, 2, 3, last=2)
    reg.repack()
    before = contents(backend)
    report = reg.repack()
    assert report == repack.RepackReport(dry_run=False)
    assert contents(backend) == before


@pytest.mark.parametrize("share", [0, -0.1, 1.01, float("nan")])
def test_a_share_that_is_none_is_refused(reg, share):
    with pytest.raises(InvalidInput, match="share"):
        reg.repack(min_dead=share)


def test_only_places_are_written(run, reg):
    thin(run, 1, 2, 3, last=2)
    before = slots(reg)
    head = run.manifest.head
    reg.repack()
    after = slots(reg)
    assert after[: len(before)] == before
    ((*added,),) = after[len(before) :]
    assert all(type(line) is Place for line in added)
    assert len(added) == 2
    assert reg.run("run").manifest.head == head


def test_places_go_to_several_slots_where_there_are_many(run, reg, monkeypatch):
    monkeypatch.setattr(repack_runs, "_PLACES_PER_SLOT", 2)
    thin(run, *range(1, 8), last=5)
    before = len(slots(reg))
    reg.repack()
    assert [len(lines) for lines in slots(reg)[before:]] == [2, 2, 1]
    loads(reg)


def test_manifests_are_not_written_again(run, reg, backend):
    thin(run, 1, 2, 3, last=2)
    manifests = {key for key in objects(backend) if key.startswith("manifests/")}
    backend.put(epoch_key(1), encode_sweep(1, []))
    reg.repack()
    assert {key for key in objects(backend) if key.startswith("manifests/")} == manifests
    assert {ObjectKey.parse(key).generation for key in named_packs(reg)} == {1}


def test_a_load_reads_neighbours_together(run, backend, open_registry):
    """Each save changed another part of a state, so it is in many packs; a repack makes it one."""
    for step in range(1, 7):
        parts = {f"part{n}": np.full(300, n if step > n else 100 + n, np.uint8) for n in range(6)}
        run.save({"model": parts}, step=step)
    run.retention.prune(Retention(last=1))
    calls: list = []
    reads = []
    for _ in range(2):
        checkpoint = open_registry(Metered(backend, calls)).run("run").latest()
        calls.clear()
        assert same(checkpoint.load(), {"model": parts})
        reads.append(sum(call.key.startswith("packs/") for call in calls))
        repacked(backend)
    assert reads[1] == 1 < reads[0]


def test_every_kind_of_state_is_moved(reg, backend, open_registry):
    from holdfast.registry.spec import Phase, Pool, RunSpec, Stream

    spec = RunSpec(
        phases=(Phase(name="1", companions=("reference",)),),
        inference=("model",),
        pool=Pool(phase="1", size=2, promote_on_save=True),
        streams=(Stream(name="losses", lifetime="forever"),),
    )
    run = reg.create_run("run", seed=1, preset=spec)
    for step in (1, 2, 3):
        kept = {"companions": {"reference": small_state(70 + step)}} if step < 3 else {}
        run.save(state(step), step=step, streams={"losses": [{"step": step, "loss": 0.5}]}, **kept)
    run.pins.artifacts.set("bank", small_state(50))
    run.status = "completed"
    run.retention.prune(Retention(last=2))
    store, now = reg.handle.store, run.manifest
    held = [store.placement(now.by_manifest[manifest].placement_key) for manifest in now.held]
    report = reg.repack()
    assert report.checkpoints == sum(bool(placement.packs) for placement in held) >= 6
    collected(backend)
    fresh = open_registry(backend)
    loads(fresh)
    opened = fresh.run("run")
    assert [entry["loss"] for entry in opened.streams["losses"].read()] == [0.5] * 3
    assert same(fresh.stored("run/artifacts/bank").load(), small_state(50))
    assert same(opened.latest().companions["reference"].load(), small_state(72))
    assert same(fresh.stored("run/pool/v0003").load(), {"model": state(3)["model"]})


def test_runs_that_share_packs_share_the_new_ones(run, reg, backend, open_registry):
    thin(run, 1, 2, 3, last=2)
    for checkpoint, name in zip(run.checkpoints(), ("a", "b"), strict=True):
        reg.fork(checkpoint, name)
    report = reg.repack()
    assert set(report.runs) == {"run", "a", "b"}
    assert report.packs_written == 1
    collected(backend)
    loads(open_registry(backend))
    assert len(packs(backend)) == 1


def test_stored_bytes_are_moved_as_they_are(run, reg, backend, monkeypatch):
    """A delta, with its base in a row of its own, keeps codec, base and the digest of its bytes."""
    monkeypatch.setattr(codecs, "CODECS", ("raw", "xor"))
    first, second = (
        run.save({"w": np.full(200, n, np.uint8), "v": np.full(150, 10 + n, np.uint8)}, step=n)
        for n in (1, 2)
    )
    base, delta = next(iter(first.manifest.direct_chunks)), b"few bytes"
    encoded = as_delta(reg, second, base, delta)
    report = reg.repack()
    assert report.packs_written
    fresh = reg.checkpoint(f"run/{second.digest.hex()}")
    placement = fresh.handle.reader.placement
    assert placement.extra == encoded.extra
    number = next(n for n, row in enumerate(encoded.rows) if row.codec == 1)
    row = placement.rows[number]
    assert (row.codec, row.base) == (1, encoded.rows[number].base)
    pack = placement.packs[row.pack]
    assert pack != encoded.packs[encoded.rows[number].pack]
    assert backend.get(str(pack.key))[row.offset :][: row.stored_bytes] == delta
    table = reg.handle.store.read_table(pack)
    (entry,) = [one for one in table if one.codec == "xor"]
    assert (entry.base, entry.stored_digest) == (base, Digest.of(delta))


# Damage


def test_a_damaged_chunk_is_not_passed_on(run, reg, backend):
    thin(run, 1, 2, 3, last=2)
    key = packs_of(run.latest())[-1]
    flip(backend, key, 9)
    before = contents(backend)
    with pytest.raises(Damaged, match=f"{key} at offset 0: damaged chunk"):
        reg.repack()
    assert contents(backend) == before


def test_a_dead_chunk_may_be_damaged(run, reg, backend, open_registry):
    thin(run, 1, 2, 3)
    newest = run.latest().handle.reader.placement
    (oldest,) = [ref.key for ref in newest.packs if ref.key != newest.packs[-1].key][:1]
    alive = {row.offset for row in newest.rows if newest.packs[row.pack].key == oldest}
    table = reg.handle.store.read_table(next(ref for ref in newest.packs if ref.key == oldest))
    unneeded = next(entry for entry in table if entry.offset not in alive)
    flip(backend, str(oldest), 8 * unneeded.offset)
    reg.repack()
    collected(backend)
    loads(open_registry(backend))


@pytest.mark.parametrize("harm", ["flip", "cut"])
def test_a_new_pack_that_a_crash_left_damaged_is_replaced(run, reg, backend, open_registry, harm):
    thin(run, 1, 2, 3, last=2)
    before = contents(backend)
    reg.repack()
    (new,) = named_packs(reg)
    sound = backend.get(new)
    # As if the repack had died before its slot, and the disk had then gone bad.
    for key in contents(backend).keys() - before.keys() - {new}:
        backend.delete(key)
    if harm == "flip":
        flip(backend, new, 3000)
    else:
        backend.put(new, sound[:-9])
    with open_on(backend) as later:
        later.repack()
    assert backend.get(new) == sound
    collected(backend)
    loads(open_registry(backend))


# Crashes


@dataclass(frozen=True)
class World:
    """A store in memory with two runs that share packs, and the way to start again from it."""

    template: MemoryBackend

    def copy(self) -> MemoryBackend:
        fresh = MemoryBackend()
        for key, data in contents(self.template).items():
            fresh.put(key, data)
        return fresh


@pytest.fixture(scope="module")
def world() -> World:
    backend = new_backend()
    with small_grid(256, list_threshold=8), without_threads(open_on(backend)) as registry:
        run = registry.create_run("run", seed=1)
        thin(run, 1, 2, 3, last=2)
        registry.fork(run.latest(), "fork")
        run.save(state(4), step=4)
    return World(backend)


def test_a_crash_at_any_write_costs_nothing(world):
    """To die at a read is to die before the next write."""
    backend = world.copy()
    points = attempt(Faulty(backend))
    clean = settled(backend, loads)
    for at in points:
        for after in (False, True):
            backend = world.copy()
            with pytest.raises(InjectedCrash):
                attempt(Faulty(backend, [Fault(at, after=after)]))
            with without_threads(open_on(backend)) as registry:
                loads(registry)
            # The same packs, whatever the first one had done: nothing is left over, or twice.
            assert settled(backend, loads) == clean
    assert len(points) >= 7  # two packs, three placements, two slots


@pytest.mark.parametrize(
    ("reads", "every"), [(False, 1), (True, 3), pytest.param(True, 1, marks=pytest.mark.soak)]
)
def test_no_answer_at_any_call_costs_nothing(world, reads, every):
    backend = world.copy()
    points = attempt(Faulty(backend, count_reads=reads))
    clean = settled(backend, loads)
    calls = 0
    for at in points[::every]:
        backend = world.copy()
        # Of a read it is all the same whether the store did it; a write may have happened.
        fault = Fault(at, after=not reads, error=StoreUnavailable("no answer", where="test"))
        try:
            attempt(Faulty(backend, [fault], count_reads=reads))
        except RegistryError:
            calls += 1
        assert settled(backend, loads) == clean
    assert calls


def test_one_that_broke_off_between_runs_is_finished_without_moving_again(world):
    """One run names the new packs and the other the old ones: the bytes are there already."""
    backend = world.copy()
    hooked = Hooked(backend)

    def dies():
        raise InjectedCrash

    hooked.before = Once("runs/fork/log/", dies, "put_if_absent")
    with pytest.raises(InjectedCrash):
        attempt(Faulty(hooked))
    assert hooked.before.done
    with open_on(backend) as registry:
        assert not named_packs(registry) & named_packs(registry, "fork")
        report = registry.repack(["fork"])
        assert report.runs == ("fork",)
        assert report.packs_written == 0
        assert report.freed_bytes
        assert named_packs(registry) == named_packs(registry, "fork")


# Others meanwhile


def before_the_slot(backend, action: Callable[[], object], run_id: str = "run"):
    """Return a store on which something happens right before a run's next slot is put."""
    hooked = Hooked(backend)
    hooked.before = Once(log_prefix(run_id), action, "put_if_absent")
    return hooked


@pytest.mark.parametrize("collects", [False, True], ids=["evicted", "collected"])
def test_what_is_evicted_meanwhile_gets_no_place(run, backend, open_registry, collects):
    thin(run, 1, 2, 3, last=3)
    gone = run.checkpoints()[0]

    def evict():
        with open_on(backend) as registry:
            registry.run("run").retention.prune(Retention(last=2))
        if collects:
            collected(backend)

    hooked = before_the_slot(backend, evict)
    open_registry(hooked).repack()
    assert hooked.before.done
    fresh = open_registry(backend)
    assert fresh.run("run").history.manifest().by_manifest[gone.digest] == gone.handle.reader.place
    collected(backend)
    loads(open_registry(backend))


def test_a_run_that_is_dropped_meanwhile_gets_no_place(run, backend, open_registry):
    thin(run, 1, 2, 3, last=2)

    def drop():
        with open_on(backend) as registry:
            registry.run("run").retention.drop("over", now=True)

    hooked = before_the_slot(backend, drop)
    report = open_registry(hooked).repack()
    assert (report.checkpoints, report.placed_meanwhile) == (0, 0)
    assert report.packs_in_vain == report.packs_written == 1
    assert type(slots(open_registry(backend))[-1][0]) is not Place
    collected(backend)
    assert not objects(backend)


def test_packs_that_another_run_let_go_of_are_freed_by_who_moved_last(
    run, reg, backend, open_registry
):
    thin(run, 1, 2, 3, last=2)
    reg.fork(run.latest(), "fork")

    def drop():
        with open_on(backend) as registry:
            registry.run("fork").retention.drop("over", now=True)

    hooked = before_the_slot(backend, drop, "fork")
    report = open_registry(hooked).repack()
    assert hooked.before.done
    assert (report.runs, report.placed_meanwhile) == (("run",), 0)
    assert report.freed_bytes == sum(one.size_bytes for one in report.rewritten) > 0


def test_what_is_saved_meanwhile_is_placed_anew_too(run, backend, open_registry):
    thin(run, 1, 2, 3, last=2)
    hooked = before_the_slot(backend, lambda: run.save(state(4), step=4))
    report = open_registry(hooked).repack()
    assert report.checkpoints == 3
    old = {str(one.pack) for one in report.rewritten}
    fresh = open_registry(backend)
    assert old.isdisjoint(named_packs(fresh))
    assert report.freed_bytes == sum(one.size_bytes for one in report.rewritten)
    collected(backend)
    loads(open_registry(backend))


def test_bytes_that_somebody_took_up_again_are_not_told_as_freed(run, backend, open_registry):
    """What was evicted when this looked comes back before the slot: its pack has to stay."""
    thin(run, 1, 2, 3)

    def undo():
        with open_on(backend) as registry:
            assert registry.run("run").retention.undo()

    hooked = before_the_slot(backend, undo)
    report = open_registry(hooked).repack()
    fresh = open_registry(backend)
    loads(fresh)
    still = named_packs(fresh)
    gone = [one for one in report.rewritten if str(one.pack) not in still]
    assert len(gone) < len(report.rewritten)
    assert report.freed_bytes == sum(one.size_bytes for one in gone)
    collected(backend)
    loads(open_registry(backend))


def test_a_second_repacker_finds_its_work_done(run, backend, open_registry):
    thin(run, 1, 2, 3, last=2)
    hooked = before_the_slot(backend, lambda: repacked(backend))
    before = len(slots(open_registry(backend)))
    report = open_registry(hooked).repack()
    assert hooked.before.done
    assert len(slots(open_registry(backend))) == before + 1
    # Its slot is the very bytes of this one's, so that nobody can say whose it is.
    assert (report.checkpoints, report.placed_meanwhile) == (2, 0)
    assert (report.packs_written, report.packs_in_vain) == (1, 0)
    collected(backend)
    loads(open_registry(backend))
    assert len(packs(backend)) == 1


@pytest.mark.sometimes("another repack has moved a state first")
def test_a_pack_that_another_repacker_takes_up_is_not_in_vain(run, backend, open_registry):
    thin(run, 1, 2, 3, last=2)

    def other():
        with open_on(backend) as registry:
            registry.run("run").pins.tags.set("other", registry.run("run").latest())
        repacked(backend)

    hooked = before_the_slot(backend, other)
    report = open_registry(hooked).repack()
    assert hooked.before.done
    assert (report.checkpoints, report.placed_meanwhile, report.freed_bytes) == (0, 2, 0)
    assert (report.packs_written, report.packs_in_vain) == (1, 0)
    collected(backend)
    loads(open_registry(backend))
    assert len(packs(backend)) == 1


def test_a_sweep_of_the_new_packs_before_they_are_named(run, backend, open_registry):
    """W3: objects that were condemned meanwhile are put again, under the epoch of the sweep."""
    thin(run, 1, 2, 3, last=2)
    hooked = before_the_slot(backend, lambda: collected(backend))
    report = open_registry(hooked).repack()
    assert report.packs_written == 2  # the first one was swept
    assert report.packs_in_vain == 1
    assert report.in_vain_bytes < report.bytes_moved
    fresh = open_registry(backend)
    assert {ObjectKey.parse(key).generation for key in named_packs(fresh)} == {1}
    loads(fresh)
    collected(backend)
    loads(open_registry(backend))


def test_sweeps_that_never_end_are_told(run, backend, open_registry):
    thin(run, 1, 2, 3, last=2)
    hooked = Hooked(backend)

    def sweep(method, key):
        if method == "put_if_absent" and key.startswith(SLOTS):
            collected(backend)

    hooked.before = sweep
    with pytest.raises(Conflict, match="overtook this repack 5 times"):
        open_registry(hooked).repack()
    loads(open_registry(backend))


def test_w1_each_run_is_read_before_its_epoch_is_observed(run, reg, backend, open_registry):
    thin(run, 1, 2, 3, last=2)
    thin(reg.create_run("other"), 1, 2, seed=5)
    calls: list = []
    hooked = Metered(backend, calls)
    open_registry(hooked).repack()
    keys = [call.key for call in calls if call.method == "list"]
    planned = keys.index("epochs/")
    order = [key for key in keys[planned + 1 :] if key.startswith(("epochs/", "runs/"))]
    kinds = [key.split("/")[-2] for key in order]
    opened, observed = {*kinds[:2], *kinds[3:5]}, kinds[2::3]
    assert (len(kinds), opened, observed) == (6, {"snapshots", "log"}, 2 * ["epochs"])


@pytest.mark.parametrize("small", [0, 2**24], ids=["as they are", "put together"])
def test_runs_that_hold_one_content_under_two_keys_come_to_share_it(
    run, reg, backend, open_registry, monkeypatch, small
):
    """A sweep condemned the first key and spared it: who needs it goes on, nobody else may."""
    monkeypatch.setattr(repack_plan, "SMALL_BYTES", small)
    shared = small_state(9)
    run.pins.artifacts.set("a", shared)
    backend.put(epoch_key(1), encode_sweep(1, map(ObjectKey.parse, objects(backend))))
    with open_on(backend) as registry:
        other = registry.create_run("other")
        other.pins.artifacts.set("a", shared)
        assert not named_packs(registry) & named_packs(registry, "other")
    report = reg.repack()
    assert report.packs_written == (1 if small else 0)
    assert named_packs(reg) == named_packs(reg, "other")
    collected(backend)
    assert same(open_registry(backend).stored("run/artifacts/a").load(), shared)


def test_a_condemned_pack_is_copied_for_a_run_that_may_not_name_it(
    run, reg, backend, open_registry, monkeypatch
):
    """Both packs with the part that two runs share are condemned; each run may name its own."""
    monkeypatch.setattr(repack_plan, "SMALL_BYTES", 0)
    shared, fixed = state(1)["model"]["w"][:2000], state(1)["model"]["fixed"]
    other = reg.create_run("other")
    run.pins.artifacts.set("a", {"m": {"x": shared, "y": fixed}})
    other.pins.artifacts.set("a", {"m": {"x": shared, "z": small_state()["model"]["b"]}})
    (larger,) = named_packs(reg)
    backend.put(epoch_key(1), encode_sweep(1, map(ObjectKey.parse, objects(backend))))
    assert reg.repack().runs == ("other",)
    fresh = open_registry(backend)
    assert fresh.verify(deep=True).ok
    assert larger not in named_packs(fresh, "other")
    # Now there is a key for it that everybody may name.
    assert fresh.repack().runs == ("run",)
    collected(backend)
    left = packs(backend)
    assert {ObjectKey.parse(key).generation for key in left} == {1}
    assert len(left) == 2
    fresh = open_registry(backend)
    assert fresh.verify(deep=True).ok
    assert same(fresh.stored("run/artifacts/a").load()["m"]["x"], shared)
    assert same(fresh.stored("other/artifacts/a").load()["m"]["x"], shared)


@pytest.mark.sometimes("a repack plans again")
def test_what_is_gone_while_it_looks_makes_it_look_again(run, backend, open_registry):
    thin(run, 1, 2, 3, last=3)

    def evict():
        with open_on(backend) as registry:
            registry.run("run").retention.prune(Retention(last=1))
        collected(backend)

    hooked = Hooked(backend)
    hooked.before = Once("placements/", evict, "get")
    open_registry(hooked).repack()
    assert hooked.before.done
    collected(backend)
    loads(open_registry(backend))


def test_what_is_gone_for_good_is_told(run, reg, backend):
    thin(run, 1, 2, 3, last=2)
    backend.delete(packs_of(run.latest())[0])
    with pytest.raises(MissingObject, match="gone"):
        reg.repack()


# Readers


@pytest.mark.parametrize("at", ["manifests/", "placements/", "packs/"])
def test_a_reader_goes_on_through_a_repack_and_a_collection(run, backend, open_registry, at):
    thin(run, 1, 2, 3, last=2)
    hooked = Hooked(backend)
    reader = open_registry(hooked)
    checkpoint = reader.run("run").latest()

    def move():
        repacked(backend)
        collected(backend)

    hooked.before = Once(at, move, "get")
    assert same(checkpoint.load(), state(3))
    assert hooked.before.done


def test_a_reader_that_has_everything_in_memory_but_the_chunks(run, backend, open_registry):
    thin(run, 1, 2, 3, last=2)
    checkpoint = open_registry(backend).run("run").latest()
    assert same(checkpoint.load(), state(3))
    repacked(backend)
    collected(backend)
    assert same(checkpoint.load(), state(3))


# A trainer that goes on


def _moved(backend, collects: bool) -> None:
    repacked(backend)
    if collects:
        collected(backend)


@pytest.mark.parametrize("collects", [False, True], ids=["repacked", "collected"])
@pytest.mark.parametrize("when", ["between saves", "within a save"])
@pytest.mark.parametrize("next_step", [3, 4], ids=["the same again", "another"])
def test_a_trainer_saves_on(run, backend, open_registry, collects, when, next_step):
    """What a handle remembers of where its states lay is never believed against the log."""
    hooked = Hooked(backend)
    trainer = open_registry(hooked).run("run")
    for step in (1, 2, 3):
        trainer.save(state(step), step=step)
    trainer.retention.prune(Retention(last=1))
    old = named_packs(open_registry(backend))
    if when == "between saves":
        _moved(backend, collects)
    else:
        hooked.before = Once(SLOTS, lambda: _moved(backend, collects), "put_if_absent")
    trainer.save(state(next_step), step=next_step)
    if when == "within a save" and next_step == 4:
        assert hooked.before.done
    trainer.save(state(5), step=5)
    trainer.save(state(5), step=5)
    with open_on(backend) as fresh:
        assert named_packs(fresh) <= contents(backend).keys()
        if collects:
            assert not old & named_packs(fresh)
        loads(fresh)
    repacked(backend)
    collected(backend)
    loads(open_registry(backend))


@pytest.mark.parametrize("next_step", [3, 4], ids=["the same again", "another"])
def test_a_trainer_that_had_only_opened_the_run(run, backend, open_registry, next_step):
    """Its first save looks for bases by the places that it knows, which are gone."""
    thin(run, 1, 2, 3)
    trainer = open_registry(backend).run("run")
    repacked(backend)
    collected(backend)
    trainer.exchange.push(state(next_step), step=next_step)
    with open_on(backend) as fresh:
        loads(fresh)
        assert named_packs(fresh) <= contents(backend).keys()


def test_a_trainer_of_equal_content_at_a_later_step(run, backend, open_registry):
    """A save of what is stored already names old places only, which are gone."""
    kept = small_state(3)
    save_small(run, 1, 2)
    run.save(kept, step=3)
    run.retention.prune(Retention(last=1))
    run.save(small_state(4), step=4)
    repacked(backend)
    collected(backend)
    run.save(kept, step=5)
    with open_on(backend) as fresh:
        assert fresh.verify(deep=True).findings == ()
        assert same(fresh.checkpoint("run/main/step5").load(), kept)


def test_everybody_at_once(backend, open_registry):
    """Two trainers, a repacker and a collector, each as fast as it can."""
    errors: list[BaseException] = []
    done = threading.Event()

    def until_done(act: Callable[[], object]) -> Callable[[], None]:
        def go() -> None:
            while not done.is_set():
                with suppress(Conflict, MissingObject):  # too busy: the next one goes on
                    act()

        return go

    def train(name: str, seed: int) -> Callable[[], None]:
        def go() -> None:
            with open_on(backend) as registry:
                run = registry.create_run(name, seed=1, retention=Retention(last=3))
                step = 1
                while step <= 12:
                    with suppress(Conflict):  # sweeps came between five times: save again
                        run.save(state(step, seed), step=step)
                        step += 1

        return go

    def caught(act: Callable[[], None]) -> Callable[[], None]:
        def go() -> None:
            try:
                act()
            except BaseException as error:
                errors.append(error)

        return go

    trainers = [
        threading.Thread(target=caught(train(name, seed)))
        for name, seed in (("run", 0), ("other", 5))
    ]
    movers = [
        threading.Thread(target=caught(until_done(act)))
        for act in (lambda: repacked(backend), lambda: collected(backend))
    ]
    for thread in (*trainers, *movers):
        thread.start()
    for thread in trainers:
        thread.join()
    done.set()
    for thread in movers:
        thread.join()
    assert not errors
    with open_on(backend) as fresh:
        loads(fresh)
        steps = {
            name: [ck.step for ck in fresh.run(name).checkpoints()] for name in fresh.run_names()
        }
    assert steps == {"run": [10, 11, 12], "other": [10, 11, 12]}


# Other registries, forks, undo


def test_sync_works_both_ways_after_it(run, reg, backend, open_registry):
    thin(run, 1, 2, 3, last=2)
    mirror = open_registry(new_backend("mirror-of-repacked"))
    sync(reg, mirror)
    thin(run, 4, last=2)
    repacked(backend)
    collected(backend)
    with open_on(backend) as moved:
        sync(moved, mirror)
        loads(mirror)
        mirror.repack()
        collect(mirror.handle.store, grace_s=0)
        with open_on(mirror.handle.store.backend) as fresh:
            loads(fresh)
            fresh.run("run").save(state(5), step=5)
            sync(fresh, moved)
    loads(open_registry(backend))


def test_an_eviction_can_be_undone_after_it(run, reg, backend, open_registry):
    thin(run, 1, 2, 3)
    repacked(backend)
    undone = reg.run("run").retention.undo()
    assert [checkpoint.step for checkpoint in undone] == [1, 2]
    loads(open_registry(backend))
    repacked(backend)
    collected(backend)
    loads(open_registry(backend))


def test_a_fork_after_it(run, reg, backend, open_registry):
    thin(run, 1, 2, 3)
    repacked(backend)
    collected(backend)
    fork = open_registry(backend).fork("run/latest", "fork")
    fork.save(state(4), step=4)
    run.retention.drop("over", now=True)
    repacked(backend)
    collected(backend)
    loads(open_registry(backend))


def test_a_base_is_read_by_way_of_one_place(run, backend, open_registry):
    """A repack between manifest and placement: the chunks that a save counts on are there."""
    thin(run, 1, 2, 3)
    hooked = Hooked(backend)
    mine = open_registry(hooked).run("run")
    hooked.before = Once("placements/", lambda: _moved(backend, collects=True), "get")
    base = mine.latest().handle.reader.base()
    assert hooked.before.done
    assert base.place.placement == base.placement.digest
    assert mine.manifest.is_placed(base.place)
    assert {str(pack.key) for pack in base.placement.packs} <= objects(backend)


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_fork_looks_again_where_its_parent_was_moved(run, backend, open_registry, moment):
    """Before the child exists, the collection puts no mark into its log."""
    thin(run, 1, 2, 3)
    hooked = Hooked(backend)
    registry = open_registry(hooked)
    source = registry.checkpoint("run/latest")
    moves = Once("runs/child/log/", lambda: _moved(backend, collects=True), "put_if_absent")
    setattr(hooked, moment, moves)
    registry.fork(source, "child")
    assert moves.done
    assert same(open_registry(backend).checkpoint("child").load(), source.load())
    assert open_registry(backend).verify(deep=True).findings == ()


def test_reads_bridge_gaps_and_are_bounded(run, reg, backend, open_registry, monkeypatch):
    """Chunks of one pack are read in few requests, however many unneeded ones are between them."""
    thin(run, *range(1, 9), last=8)
    run.retention.prune(Retention(every=4))
    calls: list = []

    def reads() -> int:
        calls.clear()
        plan = plan_repack(reg.handle.store)
        store = open_registry(Metered(backend, calls)).handle.store
        for target in plan.new:
            body = repack_packs.make_body(store, target)
            assert len(body) == target.size_bytes
        return sum(call.key.startswith("packs/") for call in calls)

    sources = len(plan_repack(reg.handle.store).rewritten)
    assert reads() == sources
    monkeypatch.setattr(repack_packs, "_GAP_BYTES", -1)
    each = reads()
    monkeypatch.setattr(repack_packs, "_GAP_BYTES", 0)
    assert sources <= reads() < each
    monkeypatch.setattr(repack_packs, "_GAP_BYTES", 2**20)
    monkeypatch.setattr(repack_packs, "_READ_BYTES", 1)
    assert reads() == each
