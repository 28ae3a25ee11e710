"""What a repack chooses to rewrite, and what its new packs hold."""

from __future__ import annotations

import numpy as np
import pytest

from holdfast.backends.wrappers import Metered
from holdfast.registry.errors import Damaged, Malformed, MissingObject, NotFound
from holdfast.registry.objects.pack import PackTable, open_pack
from holdfast.registry.objects.placement import Rows
from holdfast.registry.upkeep.repacking import repack_plan as repack_plan
from tests.registry.upkeep.thinning import CHANGING, FIXED, state, thin
from tests.support.faults import flip
from tests.support.repacks import plan_repack
from tests.support.states import small_state
from tests.support.stores import contents, new_backend, packs_of, small_grid


@pytest.fixture
def dead_alone(monkeypatch):
    """Let only dead bytes count, as they do where packs are large."""
    monkeypatch.setattr(repack_plan, "SMALL_BYTES", 0)


def keys(plan) -> set[str]:
    return {str(key) for key in plan.rewritten}


def rows(plan) -> list[list[str]]:
    """Return the chunks of each new pack."""
    return [[entry.digest.hex() for entry in target.table] for target in plan.new]


# What goes


@pytest.mark.parametrize(("min_dead", "goes"), [(0.1, True), (2 / 3, True), (0.67, False)])
def test_a_pack_goes_from_a_share_of_dead_bytes_on(run, reg, dead_alone, min_dead, goes):
    first = run.save(state(1), step=1)
    thin(run, 2)
    plan = plan_repack(reg.handle.store, min_dead=min_dead)
    assert keys(plan) == (set(packs_of(first)) if goes else set())
    if goes:
        (one,) = plan.rewritten.values()
        assert (one.reason, one.live_bytes) == ("dead", FIXED)
        assert one.size_bytes > FIXED + CHANGING
        assert [target.chunk_bytes for target in plan.new] == [FIXED]


def test_a_pack_that_is_needed_throughout_stays(run, reg, dead_alone):
    thin(run, 1, 2, 3, last=3)
    plan = plan_repack(reg.handle.store, min_dead=0.0001)
    assert not plan.rewritten
    assert not plan.new
    assert not plan.places


def test_the_table_of_a_pack_is_no_dead_weight(run, reg, dead_alone):
    """Of a pack of small chunks most is its table."""
    with small_grid(80):
        run.save(state(1), step=1)
    (pack,) = run.latest().handle.reader.placement.packs
    assert pack.size_bytes > 2 * (FIXED + CHANGING)
    assert not plan_repack(reg.handle.store, min_dead=0.01).rewritten


def test_what_several_runs_need_is_counted_once_and_in_all_of_them(run, reg, dead_alone):
    checkpoint = run.save(state(1), step=1)
    fork = reg.fork(checkpoint, "fork")
    thin(run, 2)
    assert not plan_repack(reg.handle.store).rewritten
    fork.retention.drop("over", now=True)
    assert keys(plan_repack(reg.handle.store)) == set(packs_of(checkpoint))


def test_a_dropped_run_needs_nothing(run, reg):
    thin(run, 1, 2, 3)
    run.retention.drop("over", now=True)
    plan = plan_repack(reg.handle.store)
    assert not plan.rewritten
    assert not plan.new


def test_what_is_held_beside_checkpoints_counts(run, reg, dead_alone):
    for name in ("a", "b"):
        run.pins.artifacts.set(name, state(ord(name)))
    plan = plan_repack(reg.handle.store, min_dead=0.3)
    # The part that both have is stored twice; one of the packs keeps it, the other is rewritten.
    assert len(plan.tables) == 2
    assert [one.live_bytes for one in plan.rewritten.values()] == [CHANGING]
    assert [target.chunk_bytes for target in plan.new] == [CHANGING]


# Small packs


def test_small_packs_are_put_together_where_that_leaves_fewer(run, reg):
    run.save(state(1), step=1)
    assert not plan_repack(reg.handle.store).rewritten  # there is nothing to put it together with
    run.save(state(2), step=2)
    plan = plan_repack(reg.handle.store)
    assert {one.reason for one in plan.rewritten.values()} == {"small"}
    assert len(plan.rewritten) == 2
    assert [target.chunk_bytes for target in plan.new] == [FIXED + 2 * CHANGING]


def test_a_small_pack_joins_what_is_left_of_a_dead_one(run, reg):
    thin(run, 1, 2)
    plan = plan_repack(reg.handle.store)
    assert sorted(one.reason for one in plan.rewritten.values()) == ["dead", "small"]
    assert [target.chunk_bytes for target in plan.new] == [FIXED + CHANGING]


def test_small_packs_that_do_not_fit_together_stay(run, reg, monkeypatch):
    monkeypatch.setattr(repack_plan, "PACK_BYTES", 4000)
    thin(run, 1, 2, last=2)
    assert not plan_repack(reg.handle.store).rewritten


def test_small_packs_that_would_only_be_cut_otherwise_stay(run, reg, monkeypatch):
    """Two packs of 600 and 500 bytes would become two of 700 and 400."""
    monkeypatch.setattr(repack_plan, "PACK_BYTES", 700)
    fresh = np.random.default_rng(1)
    sizes = ({"w": 600}, {"v": 100, "x": 400})
    with small_grid(200):
        for step, parts in enumerate(sizes):
            tensors = {k: np.frombuffer(fresh.bytes(n), np.uint8) for k, n in parts.items()}
            run.save({"model": tensors}, step=step)
    assert not plan_repack(reg.handle.store).rewritten
    monkeypatch.setattr(repack_plan, "PACK_BYTES", 1100)
    assert len(plan_repack(reg.handle.store).rewritten) == 2


def test_a_pack_that_would_come_out_as_it_went_in_stays(run, reg, monkeypatch):
    """Three small packs, of which only two fit together."""
    monkeypatch.setattr(repack_plan, "PACK_BYTES", FIXED + 2 * CHANGING)
    saved = [run.save(state(step), step=step) for step in (1, 2, 3)]
    plan = plan_repack(reg.handle.store)
    alone = set(packs_of(saved[2])) - set(packs_of(saved[1])) - set(packs_of(saved[0]))
    assert len(alone) == 1
    assert keys(plan) == (set(packs_of(saved[0])) | set(packs_of(saved[1])))
    assert [target.chunk_bytes for target in plan.new] == [FIXED + 2 * CHANGING]


def test_runs_are_not_mixed(run, reg):
    thin(run, 1, 2, last=2)
    thin(reg.create_run("other"), 1, 2, last=2, seed=5)
    plan = plan_repack(reg.handle.store)
    assert len(plan.new) == 2
    assert set(plan.places) == {"other", "run"}
    # What one run saves does not change the packs of the others.
    reg.run("other").save(state(3, 5), step=3)
    assert len([pack for pack in rows(plan_repack(reg.handle.store)) if pack in rows(plan)]) == 1


# What the new packs hold


def test_chunks_follow_the_states_that_name_them(run, reg):
    with small_grid():
        thin(run, 1, 2, 3, 4, last=2)
        older, newer = run.checkpoints()
        plan = plan_repack(reg.handle.store)
        names = [*older.manifest.direct_chunks]
        names += [digest for digest in newer.manifest.direct_chunks if digest not in names]
        assert rows(plan) == [[name.hex() for name in names]]


def test_a_pack_takes_no_more_than_its_limit(run, reg, monkeypatch):
    monkeypatch.setattr(repack_plan, "PACK_BYTES", 1000)
    for step in range(1, 6):
        run.save({"w": np.full(400, step, np.uint8)}, step=step)
    plan = plan_repack(reg.handle.store)
    assert [target.chunk_bytes for target in plan.new] == [800, 800]
    assert len(plan.rewritten) == 4  # the fifth would have a pack for itself, as it has


def test_two_who_look_choose_the_same(run, reg, backend, open_registry):
    thin(run, 1, 2, 3, 4, last=2)
    run.pins.artifacts.set("a", small_state(3))
    reg.fork(run.latest(), "fork").save(state(5), step=5)
    first, second = (plan_repack(open_registry(backend).handle.store) for _ in range(2))
    assert first.new
    assert [target.name for target in first.new] == [target.name for target in second.new]
    assert first.places == second.places


def test_a_chunk_in_two_encodings_goes_to_two_packs():
    from holdfast.registry.objects.codecs import ZSTD
    from holdfast.registry.objects.keys import ObjectKey
    from holdfast.registry.objects.pack import PackEntry
    from holdfast.registry.objects.placement import PackRef
    from holdfast.registry.upkeep.repacking.repack_plan import _Planner
    from holdfast.registry.upkeep.repacking.survey import Survey
    from holdfast.registry.values.digest import Digest

    chunk, other = Digest.of(b"chunk"), Digest.of(b"other")
    delta = PackEntry(chunk, 0, 10, 100, ZSTD, other, Digest.of(b"stored"))
    survey = Survey()
    for rank, entry in enumerate([PackEntry(chunk, 0, 100, 100), delta]):
        key = ObjectKey("packs", Digest.of(b"%d" % rank), 0)
        survey.packs[key] = PackRef(key, 500)
        survey.first_run[key] = "run"
        survey.ranks[key] = {0: rank}
        survey.tables[key] = {0: entry}
    survey.packs_of["run"] = {}
    planner = _Planner(survey, 0.25)
    assert len(list(planner._fill(list(survey.packs)))) == 2


# Of some runs only


def test_only_what_the_named_runs_need(run, reg):
    thin(run, 1, 2, 3)
    thin(reg.create_run("other"), 1, 2, 3, seed=5)
    both = plan_repack(reg.handle.store)
    one = plan_repack(reg.handle.store, ["other"])
    assert list(one.places) == ["other"]
    assert 0 < len(one.rewritten) < len(both.rewritten)
    assert not plan_repack(reg.handle.store, []).rewritten


def test_a_run_that_shares_a_pack_with_a_named_one_is_placed_anew_too(run, reg):
    thin(run, 1, 2, 3)
    reg.fork(run.latest(), "fork")
    assert set(plan_repack(reg.handle.store, ["fork"]).places) == {"fork", "run"}


def test_an_older_run_decides_the_order(reg, run, monkeypatch):
    """A fork names its parent's states: by name it would come first."""
    import time

    thin(run, 1, 2, last=2)
    before = rows(plan_repack(reg.handle.store))
    monkeypatch.setattr(time, "time", lambda: 4e9)
    reg.fork(run.latest(), "a-fork")
    assert list(plan_repack(reg.handle.store).places) == ["run", "a-fork"]
    assert rows(plan_repack(reg.handle.store)) == before


def test_a_run_that_is_none_is_told_with_a_near_name(run, reg):
    with pytest.raises(NotFound, match="rum") as caught:
        plan_repack(reg.handle.store, ["rum"])
    assert "run" in caught.value.hint


# Reading


def test_neither_chunks_nor_manifests_are_read(run, backend, open_registry):
    thin(run, 1, 2, 3)
    calls = []
    plan_repack(open_registry(Metered(backend, calls)).handle.store)
    read = [call for call in calls if call.method == "get"]
    assert not [call for call in read if call.key.startswith("manifests/")]
    packs = [call for call in read if call.key.startswith("packs/")]
    assert len(packs) == len({call.key for call in packs}) == 2


@pytest.mark.parametrize("tail_bytes", [48, 100, 10_000])
def test_a_table_longer_than_the_tail_is_read_as_well(run, reg, backend, monkeypatch, tail_bytes):
    with small_grid():
        run.save(state(1), step=1)
    monkeypatch.setattr("holdfast.registry.objects.pack.TAIL_GUESS_BYTES", tail_bytes)
    for pack in run.latest().handle.reader.placement.packs:
        table = reg.handle.store.read_table(pack)
        assert isinstance(table, PackTable)
        assert table == open_pack(backend.get(str(pack.key)), pack.key.digest, where="test")


@pytest.mark.parametrize(
    ("harm", "error"),
    [("trailer", Damaged), ("table", Damaged), ("cut", Damaged), ("gone", MissingObject)],
)
def test_a_damaged_table_stops_it(run, reg, backend, harm, error):
    thin(run, 1, 2, 3)
    key = packs_of(run.latest())[0]
    data = backend.get(key)
    if harm in ("trailer", "table"):
        flip(backend, key, 8 * (len(data) - {"trailer": 1, "table": 60}[harm]))
    elif harm == "cut":
        backend.put(key, data[:-1])
    else:
        backend.delete(key)
    with pytest.raises(error, match=key):
        plan_repack(reg.handle.store)


def test_a_placement_that_fits_no_pack_stops_it(run, reg):
    from dataclasses import replace

    checkpoint = run.save(state(1), step=1)
    placement = checkpoint.handle.reader.placement
    first, *others = placement.rows
    shifted = replace(placement, rows=Rows([first._replace(offset=1), *others]))
    moved = checkpoint.handle.reader.place.changed(placement=shifted.digest)
    reg.handle.store.backend.put(str(moved.placement_key), shifted.encode())
    run.handle.log.append(lambda _: [moved])
    with pytest.raises(Malformed, match="name different chunks at one offset"):
        plan_repack(reg.handle.store)


def test_planning_writes_nothing(run, reg, backend):
    thin(run, 1, 2, 3)
    before = contents(backend)
    assert plan_repack(reg.handle.store).new
    assert contents(backend) == before


def test_an_empty_registry_has_nothing_to_do(open_registry):
    plan = plan_repack(open_registry(new_backend()).handle.store)
    assert not plan.rewritten
    assert not plan.new
