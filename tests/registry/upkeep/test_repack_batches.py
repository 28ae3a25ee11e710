"""A repack in several batches: memory has a bound, and each batch leaves a sound registry."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast import Retention
from holdfast.backends import Backend
from holdfast.backends.memory import MemoryBackend
from holdfast.backends.wrappers import Fault, Faulty, InjectedCrash
from holdfast.registry.errors import MissingObject, StorageError
from holdfast.registry.face.factory import open_on
from holdfast.registry.upkeep.gc import collect
from holdfast.registry.upkeep.repacking import catalog, execution, runs
from holdfast.registry.upkeep.repacking.execution import RepackReport
from tests.registry.upkeep.histories import loaded, write_history
from tests.registry.upkeep.thinning import attempt, state, thin
from tests.support.faults import Hooked, Once
from tests.support.inline import without_threads
from tests.support.states import same
from tests.support.stores import contents, needed, new_backend, small_grid
from tests.support.strategies import examples


@contextmanager
def bounded(chunks: int) -> Iterator[list[list[int]]]:
    """Bound the batches; yield the lengths of the tables of each batch that is planned."""
    found: list[list[int]] = []
    survey = catalog.Catalog.survey

    def noted(*args):
        made = survey(*args)
        found.append([len(table) for table in made.tables.values()])
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(catalog, "BATCH_CHUNKS", chunks)
        patch.setattr(runs, "_ROWS_PER_SLOT", chunks)
        patch.setattr(catalog.Catalog, "survey", noted)
        yield found


def repacked(backend: Backend, **options) -> RepackReport:
    with without_threads(open_on(backend)) as registry:
        return registry.repack(**options)


def settled(backend: Backend, **options) -> int:
    """Collect and repack until nothing is left to do; return the dead bytes that stay."""
    for _ in range(8):
        with without_threads(open_on(backend)) as registry:
            collect(registry.handle.store, grace_s=0)
            if not registry.repack(**options).rewritten:
                return registry.usage().dead_bytes
    raise AssertionError("each repack finds something to do")


@given(
    st.integers(0, 10**6), st.sampled_from([3, 10, 30, 80]), st.sampled_from([None, None, "zstd"])
)
@examples(10)
def test_any_history_is_repacked_within_the_bound(seed, bound, compression):
    backend = new_backend()
    with small_grid(600, list_threshold=8), bounded(bound) as batches:
        write_history(backend, seed)
        before = loaded(backend)
        repacked(backend, compression=compression)
        assert all(sum(tables) <= bound or len(tables) == 1 for tables in batches)
        assert same(loaded(backend), before)
        settled(backend, compression=compression)
        assert same(loaded(backend), before)


@pytest.fixture
def two_runs(grid) -> MemoryBackend:
    """Two runs and a fork, of which much is dead: more than one batch."""
    backend = new_backend()
    with without_threads(open_on(backend)) as registry:
        run = registry.create_run("run", seed=1)
        thin(run, 1, 2, 3, last=2)
        registry.fork(run.latest(), "fork")
        thin(registry.create_run("other", seed=1), 1, 2, 3, last=2, seed=5)
    return backend


def copied(backend: MemoryBackend) -> MemoryBackend:
    fresh = MemoryBackend()
    for key, data in contents(backend).items():
        fresh.put(key, data)
    return fresh


def test_a_crash_in_any_batch_leaves_a_sound_registry(two_runs):
    before = loaded(two_runs)
    with bounded(40) as batches:
        backend = copied(two_runs)
        points = attempt(Faulty(backend))
        assert len(batches) >= 2
        dead = settled(backend)
        for at in points:
            backend = copied(two_runs)
            with pytest.raises(InjectedCrash):
                attempt(Faulty(backend, [Fault(at, after=at % 2 == 0)]))
            assert same(loaded(backend), before)
            assert settled(backend) == dead
        assert same(loaded(backend), before)
    assert len(points) >= 8  # of each batch a pack, placements, and a slot


def test_what_the_batches_before_a_crash_moved_is_not_moved_again(two_runs):
    with bounded(16) as batches:
        whole = repacked(copied(two_runs))
        backend = copied(two_runs)
        hooked = Hooked(backend)

        def dies() -> None:
            raise InjectedCrash

        hooked.before = Once("runs/other/log/", dies, "put_if_absent")
        batches.clear()
        with pytest.raises(InjectedCrash):
            repacked(hooked)
        assert len(batches) >= 2
        assert {*whole.runs} == {"run", "fork", "other"}
        later = repacked(backend)
    assert later.runs == ("other",)
    assert later.bytes_moved < whole.bytes_moved


def test_a_plan_that_is_made_again_counts_what_its_batches_had_freed(two_runs, monkeypatch):
    with bounded(16):
        plan, calls = execution.plan_repack, []

        def gone_once(*args, **options):
            calls.append(1)
            for done, batch in enumerate(plan(*args, **options)):
                if done and len(calls) == 1:
                    raise MissingObject("evicted and collected while this planned")
                yield batch

        monkeypatch.setattr(execution, "plan_repack", gone_once)
        report = repacked(two_runs)
    assert len(calls) == 2
    with without_threads(open_on(two_runs)) as registry:
        kept = needed(registry)
    freed = [one.size_bytes for one in report.rewritten if str(one.pack) not in kept]
    assert report.freed_bytes == sum(freed) > 0


def test_a_state_in_two_batches_is_placed_in_each_and_counted_once(run, reg, monkeypatch):
    for step in (1, 2):
        model = state(step)["model"]
        turned = {name: values[::-1].copy() for name, values in model.items()}
        run.save({"a": model, "b": turned}, step=step)
    run.retention.prune(Retention(last=1))
    read, reads = [], runs.RunRepack._read

    def noted(self, place):
        read.append(place)
        return reads(self, place)

    monkeypatch.setattr(runs.RunRepack, "_read", noted)
    slots = run.manifest.next_slot
    with bounded(1) as batches:
        planned = reg.repack(dry_run=True)
        report = reg.repack()
    assert len(batches) == 2 * 4
    assert planned == replace(report, dry_run=True)
    assert (report.packs_read, report.checkpoints) == (2, 1)
    assert reg.run("run").manifest.next_slot == slots + 2
    assert len(read) == 2  # it is known where the first batch has put the state


def test_a_disk_without_space_for_the_database_is_told(two_runs, monkeypatch):
    backend = copied(two_runs)
    before = contents(backend)
    monkeypatch.setattr(catalog, "_TABLES", catalog._TABLES + "PRAGMA max_page_count = 6;")
    with pytest.raises(StorageError, match="temporary file") as caught:
        repacked(backend)
    assert "TMPDIR" in caught.value.hint
    assert contents(backend) == before


def test_states_of_many_rows_go_to_slots_of_their_own(two_runs):
    def slots() -> int:
        backend = copied(two_runs)
        old = contents(backend).keys()
        repacked(backend)
        return len(
            [key for key in contents(backend).keys() - old if key.startswith("runs/run/log")]
        )

    few = slots()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "_ROWS_PER_SLOT", 1)
        assert slots() == few + 1
