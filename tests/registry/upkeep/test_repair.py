"""Repair: what a run needs comes back from a mirror, bit for bit, and nothing is invented."""

from __future__ import annotations

import uuid

import numpy as np
import pytest

from holdfast import repair, sync
from holdfast.backends.wrappers import Metered, ReadOnly
from holdfast.registry.errors import Conflict, InvalidInput, UnsupportedFormat
from holdfast.registry.history.actions import Mark
from holdfast.registry.history.epochs import encode_sweep, encode_upgrade
from holdfast.registry.history.log import RunLog
from holdfast.registry.objects.keys import ObjectKey, epoch_key, slot_key
from holdfast.registry.objects.placement import Rows
from tests.support.faults import Hooked, Once, flip
from tests.support.states import same, save_small, small_state
from tests.support.stores import contents, new_backend, objects, packs_of, small_grid

HARM = {
    "gone": lambda backend, key: backend.delete(key),
    "flipped": flip,
    "short": lambda backend, key: backend.put(key, backend.get(key)[:-9]),
    "empty": lambda backend, key: backend.put(key, b""),
    "long": lambda backend, key: backend.put(key, backend.get(key) + b"x"),
}


@pytest.fixture
def home():
    return new_backend(uuid.uuid4().hex)


@pytest.fixture
def away():
    return new_backend(uuid.uuid4().hex)


@pytest.fixture
def reg(home, open_registry):
    return open_registry(home)


@pytest.fixture
def mirror(away, open_registry):
    return open_registry(away)


@pytest.fixture
def run(reg):
    run = reg.create_run("run", seed=1)
    save_small(run, 1, 2)
    return run


@pytest.fixture
def synced(run, reg, mirror):
    sync(reg, mirror)
    return mirror


@pytest.fixture
def aged(run, reg, mirror, away):
    """A mirror of another epoch: the same packs under other keys, so other placements."""
    away.put(epoch_key(1), encode_sweep(1, []))
    sync(reg, mirror)
    assert all(key.endswith(".1") for key in objects(away))
    return mirror


def states(backend, open_registry) -> list:
    run = open_registry(backend).run("run")
    return [one.load() for one in run.checkpoints()]


def keys(backend, kind: str) -> list[str]:
    return sorted(key for key in objects(backend) if key.startswith(kind))


def check_whole(home, open_registry):
    assert open_registry(home).verify(deep=True).findings == ()
    assert all(map(same, states(home, open_registry), [small_state(1), small_state(2)]))


@pytest.mark.parametrize("harm", HARM)
@pytest.mark.parametrize("kind", ["packs", "manifests", "placements"])
def test_every_object_comes_back_bit_for_bit(home, open_registry, synced, kind, harm):
    before = contents(home)
    for key in keys(home, kind):
        HARM[harm](home, key)
        report = repair(open_registry(home), synced)
        (mended,) = report.mended
        assert (mended.where, mended.how) == (key, "restored")
        assert mended.size_bytes == len(before[key])
        assert mended.affects
        assert report.ok
        assert not report.found.ok
        assert contents(home) == before
    check_whole(home, open_registry)


def test_all_of_it_comes_back_at_once(home, open_registry, synced):
    before = contents(home)
    for key in objects(home):
        home.delete(key)
    report = repair(open_registry(home), synced)
    # Which packs were missed is known only once the placements are back.
    assert {mended.where for mended in report.mended} == {k for k in before if k in objects(home)}
    assert report.ok
    assert contents(home) == before
    assert report.bytes_written == sum(len(before[key]) for key in objects(home))


def test_a_whole_registry_is_left_alone(home, open_registry, synced):
    before = contents(home)
    metered = Metered(home)
    report = repair(open_registry(metered), synced)
    assert (report.ok, report.mended, report.left) == (True, (), ())
    assert contents(home) == before
    assert not metered.snapshot().written_bytes


def test_repairing_twice_does_nothing_the_second_time(home, open_registry, synced):
    flip(home, keys(home, "packs")[0])
    repair(open_registry(home), synced)
    assert repair(open_registry(home), synced).mended == ()


def test_shallow_repairs_what_names_and_sizes_tell(home, open_registry, synced):
    first, second, *_ = keys(home, "packs")
    home.delete(first)
    flip(home, second)
    report = repair(open_registry(home), synced, deep=False)
    assert [one.where for one in report.mended] == [first]
    assert report.found.data is None
    deep = repair(open_registry(home), synced)
    assert [one.where for one in deep.mended] == [second]


def test_a_dry_run_writes_nothing_and_says_what_would_come_back(home, open_registry, synced):
    flip(home, keys(home, "packs")[0])
    home.delete(keys(home, "manifests")[0])
    before = contents(home)
    dry = repair(open_registry(ReadOnly(home)), synced, dry_run=True)
    assert contents(home) == before
    assert dry.dry_run
    wet = repair(open_registry(home), synced)
    assert dry.mended == wet.mended
    assert (dry.left, wet.left) == ((), ())


def test_another_generation_at_home_is_as_good_as_a_mirror(home, open_registry, run, mirror):
    key = keys(home, "packs")[0]
    home.put(epoch_key(1), encode_sweep(1, []))
    home.put(key[:-1] + "1", home.get(key))
    flip(home, key)
    report = repair(open_registry(home), mirror)
    assert [one.source for one in report.mended] == [f"{home.url}: {key[:-1]}1"]
    check_whole(home, open_registry)


# A mirror that is no better


@pytest.mark.parametrize("harm", HARM)
@pytest.mark.parametrize("kind", ["packs", "manifests", "placements"])
def test_what_is_damaged_at_the_mirror_too_is_told_and_not_passed_on(
    home, away, open_registry, synced, kind, harm
):
    key = keys(home, kind)[0]
    HARM[harm](home, key)
    HARM[harm](away, key)
    before, there = contents(home), contents(away)
    report = repair(open_registry(home), open_registry(away))
    assert not report.ok
    assert report.mended == ()
    (left,) = report.left
    assert left.where == key
    assert left.affects
    assert away.url in left.reason
    assert contents(home) == before
    assert contents(away) == there


def test_a_good_copy_behind_a_damaged_one_is_found(home, away, open_registry, synced):
    key = keys(home, "packs")[0]
    away.put(key[:-1] + "7", away.get(key))
    flip(home, key)
    flip(away, key)
    report = repair(open_registry(home), synced)
    assert [one.source for one in report.mended] == [f"{away.url}: {key[:-1]}7"]


def test_a_forged_object_at_the_mirror_is_not_taken(home, away, open_registry, synced):
    """One that proves its own bytes and is another object than its name says."""
    first, second = keys(home, "manifests")
    home.delete(first)
    away.put(first, away.get(second))
    report = repair(open_registry(home), open_registry(away))
    assert "another checkpoint's manifest" in report.left[0].reason
    assert first not in contents(home)


def test_a_mirror_that_does_not_know_the_state(home, open_registry, run, mirror):
    mirror.create_run("other").save(small_state(7), step=1)
    key = keys(home, "packs")[0]
    home.delete(key)
    (left,) = repair(open_registry(home), mirror).left
    assert "holds no object of this digest" in left.reason
    assert "no such state in any run" in left.reason


@pytest.mark.parametrize("url", ["memory", "path", "link"])
def test_a_registry_is_not_its_own_mirror(url, reg, run, tmp_path, open_registry):
    import holdfast

    if url == "memory":
        with pytest.raises(InvalidInput, match="its own mirror"):
            repair(reg, reg.url)
        return
    (tmp_path / "link").symlink_to(tmp_path / "path")
    with (
        holdfast.init(tmp_path / "path", skip_race_probe=True) as opened,
        pytest.raises(InvalidInput, match="its own mirror"),
    ):
        repair(opened, tmp_path / url)


# States that the mirror has in other objects


@pytest.mark.parametrize("harm", HARM)
@pytest.mark.parametrize("kind", ["packs", "manifests"])
def test_a_mirror_of_another_epoch_gives_packs_and_manifests(home, open_registry, aged, kind, harm):
    before = contents(home)
    for key in keys(home, kind):
        HARM[harm](home, key)
    report = repair(open_registry(home), aged)
    assert {one.how for one in report.mended} == {"restored"}
    assert contents(home) == before


@pytest.mark.parametrize("harm", HARM)
def test_a_placement_is_made_anew_from_a_mirror_of_another_epoch(
    home, away, open_registry, aged, harm
):
    (key, other), there = keys(home, "placements"), contents(away)
    HARM[harm](home, key)
    before = contents(home, "packs/")
    report = repair(open_registry(home), aged)
    (mended,) = report.mended
    assert mended.how == "adopted"
    assert mended.size_bytes == 0, "its packs were here"
    assert report.ok
    check_whole(home, open_registry)
    assert contents(home, "packs/") == before
    assert contents(away) == there
    assert set(keys(home, "placements")) == {key, other}, "the same placement under the same key"


@pytest.fixture
def packed_otherwise(home, open_registry, mirror):
    """A run whose packs are of another size than at the mirror: no pack of one is in the other."""
    value = np.frombuffer(np.random.default_rng(0).bytes(4096), np.uint8)
    made = {"model": {"w": value}, "plain": 3}
    for registry, pack_bytes in ((mirror, 256), (open_registry(home), 2048)):
        with small_grid(256, pack_bytes=pack_bytes):
            registry.create_run("theirs" if registry is mirror else "run").save(made, step=1)
    return made


@pytest.mark.parametrize("kind", ["packs", "placements"])
@pytest.mark.parametrize("harm", HARM)
def test_a_state_that_the_mirror_packs_otherwise_is_adopted(
    home, away, open_registry, mirror, packed_otherwise, kind, harm
):
    assert not set(keys(home, "packs")) & set(keys(away, "packs"))
    slots = len(contents(home, "runs/run/log/"))
    broken = keys(home, kind)[0]
    HARM[harm](home, broken)
    with small_grid(256):
        dry = repair(open_registry(ReadOnly(home)), mirror, dry_run=True)
        report = repair(open_registry(home), mirror)
        (mended,) = report.mended
        assert mended.how == "adopted"
        assert mended.source.startswith(away.url)
        assert mended.size_bytes > 4096
        assert dry.mended == report.mended
        assert (report.ok, dry.ok) == (True, True)
        assert len(contents(home, "runs/run/log/")) == slots + 1
        fresh = open_registry(home)
        assert same(fresh.checkpoint("run").load(), packed_otherwise)
        assert fresh.verify(deep=True).ok
        assert repair(open_registry(home), mirror).mended == ()


def test_what_is_adopted_does_not_build_on_what_is_damaged(
    home, away, open_registry, mirror, packed_otherwise
):
    """An orphan of the right name and size, and other bytes, is not trusted."""
    with small_grid(256):
        orphan = keys(away, "packs")[0]
        home.put(orphan, away.get(orphan))
        flip(home, orphan)
        flip(home, next(key for key in keys(home, "packs") if key != orphan))
        assert repair(open_registry(home), mirror).ok
        assert home.get(orphan) == away.get(orphan)
        assert same(open_registry(home).checkpoint("run").load(), packed_otherwise)


def test_a_mirror_whose_placement_lies_is_refused(
    home, away, open_registry, mirror, packed_otherwise
):
    from dataclasses import replace

    with small_grid(256):
        theirs = mirror.checkpoint("theirs")
        old = theirs.handle.reader.placement
        rows = list(old.rows)
        rows[0], rows[1] = rows[1], rows[0]
        forged = replace(old, rows=Rows(rows))
        away.put(f"placements/{forged.digest.hex()[:2]}/{forged.digest.hex()}.0", forged.encode())
        log = RunLog(mirror.handle.store, "theirs")
        log.open()
        log.append(lambda state: [theirs.handle.reader.place.changed(placement=forged.digest)])
        home.delete(keys(home, "packs")[0])
        before = contents(home)
        report = repair(open_registry(home), open_registry(away))
        assert "different chunks" in report.left[0].reason
        assert contents(home) == before


def test_another_run_at_home_gives_what_the_mirror_lacks(home, open_registry, run, mirror):
    """Two runs with placements of their own of one state; that of one is gone."""
    home.put(epoch_key(1), encode_sweep(1, [ObjectKey.parse(keys(home, "packs")[0])]))
    twin = open_registry(home).create_run("twin")
    twin.save(small_state(1), step=1)
    lost = str(run.checkpoints()[0].handle.reader.place.placement_key)
    home.delete(lost)
    report = repair(open_registry(home), mirror)
    (mended,) = report.mended
    assert (mended.how, mended.source.startswith(home.url)) == ("adopted", True)
    check_whole(home, open_registry)


def test_a_checkpoint_without_a_place_gets_one(home, open_registry, synced):
    from holdfast.registry.history.actions import AddCheckpoint
    from holdfast.registry.history.authorship import commit_line

    synced.create_run("more").save(small_state(9), step=9)
    manifest = synced.checkpoint("more").digest
    log = RunLog(open_registry(home).handle.store, "run")
    log.open()
    added = AddCheckpoint(manifest=manifest, phase="main", step=9, size_bytes=0)
    log.append(lambda run: [commit_line(run, [added])])
    report = repair(open_registry(home), synced)
    assert [one.how for one in report.mended] == ["adopted"]
    assert same(open_registry(home).checkpoint("run").load(), small_state(9))


# Beside others


def test_w3_what_is_condemned_while_it_is_adopted_is_not_named(
    home, open_registry, mirror, packed_otherwise
):
    """The whole protocol once: condemn, mark, collect, in the instant before the slot lands."""
    with small_grid(256):
        home.delete(keys(home, "packs")[0])
        hooked = Hooked(home)
        slots = len(contents(home, "runs/run/log/"))

        def sweep():
            placed = {str(k) for k in map(ObjectKey.parse, objects(home))}
            live = {str(key) for key in _needed(home, open_registry)}
            condemned = sorted(map(ObjectKey.parse, placed))
            assert home.put_if_absent(epoch_key(1), encode_sweep(1, condemned))
            log = RunLog(open_registry(home).handle.store, "run")
            log.open()
            log.append(lambda state: [Mark(epoch=1)])
            for key in placed - live:
                home.delete(key)

        hooked.before = Once(slot_key("run", slots), sweep, "put_if_absent")
        assert repair(open_registry(hooked), mirror).ok
        assert hooked.before.done
        assert same(open_registry(home).checkpoint("run").load(), packed_otherwise)
        assert open_registry(home).verify(deep=True).ok


def _needed(home, open_registry) -> set[ObjectKey]:
    from holdfast.registry.writing.object_writer import placed_keys

    one = open_registry(home).checkpoint("run")
    return set(placed_keys(one.handle.reader.place, one.handle.reader.placement))


def test_a_collection_after_a_repair_spares_what_came_back(home, open_registry, synced):
    for key in keys(home, "packs"):
        home.delete(key)
    # Everything was condemned once, and found live.
    home.put(epoch_key(1), encode_sweep(1, map(ObjectKey.parse, objects(home))))
    assert repair(open_registry(home), synced).ok
    open_registry(home).gc(grace_s=0)
    check_whole(home, open_registry)


def test_what_is_let_go_meanwhile_leaves_an_orphan_that_is_collected(home, open_registry, synced):
    victim = open_registry(home).run("run").checkpoints()[0]
    (key, *_) = set(packs_of(victim)) - set(packs_of(open_registry(home).run("run").latest()))
    home.delete(key)
    hooked = Hooked(home)

    def let_go():
        open_registry(home).run("run").retention.drop("not wanted", now=True)
        open_registry(home).gc(grace_s=0)

    hooked.before = Once(key, let_go, "put")
    report = repair(open_registry(hooked), synced)
    assert hooked.before.done
    assert [one.where for one in report.mended] == [key]
    assert objects(home) == {key}
    assert open_registry(home).verify(deep=True).ok
    open_registry(home).gc(grace_s=0)
    assert objects(home) == set()


def test_a_state_that_moved_while_it_is_adopted_stays_where_it_moved(
    home, open_registry, mirror, packed_otherwise
):
    with small_grid(256):
        home.delete(keys(home, "packs")[0])
        slots = len(contents(home, "runs/run/log/"))
        hooked = Hooked(home)

        def move():
            home.put(epoch_key(1), encode_sweep(1, []))  # so that the other one's keys are others
            assert repair(open_registry(home), mirror).ok

        hooked.before = Once(slot_key("run", slots), move, "put_if_absent")
        repair(open_registry(hooked), mirror)
        assert hooked.before.done
        assert len(contents(home, "runs/run/log/")) == slots + 1, "one new place, not two"
        fresh = open_registry(home).checkpoint("run")
        assert fresh.handle.reader.place.placement_generation == 1
        assert same(fresh.load(), packed_otherwise)


def test_a_state_that_is_let_go_while_it_is_adopted_gets_no_place(
    home, open_registry, mirror, packed_otherwise
):
    with small_grid(256):
        home.delete(keys(home, "packs")[0])
        slots = len(contents(home, "runs/run/log/"))
        hooked = Hooked(home)

        def let_go():
            open_registry(home).run("run").retention.drop("not wanted", now=True)

        hooked.before = Once(slot_key("run", slots), let_go, "put_if_absent")
        report = repair(open_registry(hooked), mirror)
        assert hooked.before.done
        assert report.ok
        assert len(contents(home, "runs/run/log/")) == slots + 1, "the drop alone"


def test_another_writers_commit_meanwhile_is_kept(home, open_registry, mirror, packed_otherwise):
    with small_grid(256):
        home.delete(keys(home, "packs")[0])
        slots = len(contents(home, "runs/run/log/"))
        hooked = Hooked(home)

        def report_metric():
            open_registry(home).checkpoint("run").report({"loss": 0.5})

        hooked.before = Once(slot_key("run", slots), report_metric, "put_if_absent")
        assert repair(open_registry(hooked), mirror).ok
        assert open_registry(home).checkpoint("run").metrics == {"loss": 0.5}
        assert same(open_registry(home).checkpoint("run").load(), packed_otherwise)


# What is not rebuilt


def test_a_slot_is_not_rebuilt(home, open_registry, synced):
    flip(home, slot_key("run", 2))
    flip(home, packs_of(synced.run("run").checkpoints()[0])[0])
    before = contents(home, "runs/")
    report = repair(open_registry(home), synced)
    assert len(report.mended) == 1, "the other one is mended"
    (left,) = report.left
    assert left.where == "run"
    assert "this registry's own" in left.reason
    assert "backup" in left.advice
    assert contents(home, "runs/") == before


def test_a_damaged_epoch_keeps_no_object_from_coming_back(home, open_registry, synced):
    home.put(epoch_key(1), b"noise")
    before = contents(home)
    home.delete(keys(home, "packs")[0])
    report = repair(open_registry(home), synced)
    assert [one.how for one in report.mended] == ["restored"]
    assert [one.where for one in report.left] == [epoch_key(1)]
    assert contents(home) == before


def test_a_damaged_epoch_keeps_states_from_being_adopted(
    home, open_registry, mirror, packed_otherwise
):
    with small_grid(256):
        home.put(epoch_key(1), b"noise")
        home.delete(keys(home, "packs")[0])
        before = contents(home)
        report = repair(open_registry(home), mirror)
        assert not report.mended
        assert contents(home) == before


def test_a_registry_that_demands_a_newer_writer_is_not_written(home, open_registry, synced):
    home.put(epoch_key(1), encode_upgrade(1, 99))
    home.delete(keys(home, "packs")[0])
    before = contents(home)
    with pytest.raises(UnsupportedFormat):
        repair(open_registry(home), synced)
    assert contents(home) == before


def test_a_damaged_orphan_is_left_to_collection(home, open_registry, synced):
    orphan = keys(home, "packs")[0]
    orphan = orphan[:-3] + ("7" if orphan[-3] != "7" else "8") + ".0"
    home.put(orphan, b"noise")
    report = repair(open_registry(home), synced)
    assert (report.ok, report.mended) == (True, ())
    assert home.get(orphan) == b"noise"


def test_a_run_that_loses_its_slots_to_others_is_told(
    home, open_registry, mirror, packed_otherwise, monkeypatch
):
    def lose(*args, **kwargs):
        raise Conflict("sweeps overtook this commit", where="run")

    with small_grid(256):
        home.delete(keys(home, "packs")[0])
        monkeypatch.setattr("holdfast.registry.writing.committer.Committer.commit", lose)
        report = repair(open_registry(home), mirror)
    assert "overtook" in report.left[0].reason


def test_gates_releases_and_pool_come_back_with_their_refs(home, open_registry, mirror):
    reg = open_registry(home)
    run = reg.create_run("run", seed=1)
    run.save(small_state(1), step=1)
    first = run.latest()
    run.pins.gates.set("good", first)
    run.pins.tags.set("keeper", first)
    sync(reg, mirror)
    for key in objects(home):
        home.delete(key)
    report = repair(open_registry(home), mirror)
    refs = {ref for one in report.mended for ref in one.affects}
    assert first.ref in refs
    assert "run/gates/good" in refs
    assert same(open_registry(home).checkpoint("run/gates/good").load(), small_state(1))


def test_a_repair_that_died_goes_on(home, open_registry, synced):
    from holdfast.backends.wrappers import Fault, Faulty, InjectedCrash

    before = contents(home)
    for key in keys(home, "packs"):
        home.delete(key)
    with pytest.raises(InjectedCrash):
        repair(open_registry(Faulty(home, [Fault(at=2)])), synced)
    assert len(objects(home)) < len([key for key in before if not key.startswith("runs/")])
    assert repair(open_registry(home), synced).ok
    assert contents(home) == before


@pytest.mark.parametrize("lie", ["another's", "rows"])
def test_a_placement_that_lies_at_home_is_replaced(home, open_registry, synced, lie):
    """Its bytes are whole, so none from a mirror mend it: the run gets another place."""
    from dataclasses import replace

    reg = open_registry(home)
    first, second = reg.run("run").checkpoints()
    wrong = second.handle.reader.place.placement
    if lie == "rows":
        rows = list(first.handle.reader.placement.rows)
        rows[0] = rows[0]._replace(offset=rows[0].offset + 8)
        forged = replace(first.handle.reader.placement, rows=Rows(rows))
        wrong = forged.digest
        name = wrong.hex()
        home.put(f"placements/{name[:2]}/{name}.0", forged.encode())
        # A mirror that was copied byte for byte has it as well.
        synced.handle.store.backend.put(f"placements/{name[:2]}/{name}.0", forged.encode())
    log = RunLog(reg.handle.store, "run")
    log.open()
    log.append(lambda state: [first.handle.reader.place.changed(placement=wrong)])
    report = repair(open_registry(home), synced)
    assert not report.found.ok
    assert [one.how for one in report.mended] == ["adopted"]
    assert report.ok
    fresh = open_registry(home)
    assert fresh.verify(deep=True).ok
    assert all(map(same, states(home, open_registry), [small_state(1), small_state(2)]))
