"""Bulk work on other processes: one report and one registry, whoever did the work."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast import sync
from holdfast.backends.wrappers import Call, Metered
from holdfast.registry.comparing.tensor_stats import stats
from holdfast.registry.errors import Damaged, WorkersFailed
from holdfast.registry.face.registry import Registry
from holdfast.registry.history.actions import Place
from holdfast.registry.history.log import RunLog
from holdfast.registry.objects.keys import ObjectKey
from holdfast.registry.objects.placement import Placement, Rows
from holdfast.registry.spec import Retention
from holdfast.registry.store import workers
from holdfast.registry.writing.placing import make_place
from tests.support.commands import invoke
from tests.support.executors import Crossing
from tests.support.faults import flip
from tests.support.stores import commit_lines, contents, objects, small_grid


def drawn(seed: int, size: int = 1500) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 40, size).astype(np.float32)


def fill(registry: Registry, runs: int, steps: int) -> None:
    for number in range(runs):
        run = registry.create_run(f"run{number}", seed=number)
        for step in range(1, steps + 1):
            weights = drawn(number)
            weights[: 10 * step] += step  # changes from save to save: differences
            run.save({"model": {"w": weights, "b": drawn(step, 40)}, "log": {"n": step}}, step=step)


def copied(folder: Path, name: str, **options: object) -> Registry:
    """Return a copy of a registry, opened."""
    place = folder.with_name(name)
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(folder, place)
    return holdfast.open(place, remember=False, **options)


def as_json(report: object) -> str:
    return json.dumps(asdict(report), default=str)  # type: ignore[call-overload]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs with differences, compressed chunks, chunk lists and evicted checkpoints."""
    place = tmp_path_factory.mktemp("bulk") / "sound"
    with small_grid(256, list_threshold=8), holdfast.init(place, keyframe_every=6) as registry:
        fill(registry, 3, 8)
        registry.run("run0").retention.prune(Retention(last=3))
    return place


def misplace(registry: Registry, run_id: str, place: Place, placement: Placement) -> None:
    """Give a state a sound placement that names another chunk than its pack does."""
    rows = list(placement.rows)
    rows[0] = rows[0]._replace(stored_bytes=rows[0].stored_bytes - 1)
    wrong = replace(placement, rows=Rows(rows))
    key = ObjectKey("placements", wrong.digest, 0)
    registry.handle.store.backend.put(str(key), wrong.encode())
    log = RunLog(registry.handle.store, run_id)
    log.open()
    log.append(lambda _: [make_place(place.manifest_key, key)])


@pytest.fixture
def damaged(sound: Path) -> Path:
    """The same with every kind of damage to an object."""
    with closing(copied(sound, "damaged")) as registry:
        backend = registry.handle.store.backend
        needed = [registry.run("run1").checkpoints()[n].handle.reader.placement for n in range(8)]
        packs = [str(placement.packs[-1].key) for placement in needed]
        flip(backend, packs[0])
        backend.delete(packs[1])
        backend.put(packs[2], backend.get(packs[2])[:-1])
        places = [
            checkpoint.handle.reader.place for checkpoint in registry.run("run1").checkpoints()
        ]
        flip(backend, str(places[3].placement_key))
        backend.delete(str(places[4].manifest_key))
        flip(backend, str(places[5].manifest_key))
        whole = registry.run("run2").latest().handle.reader
        misplace(registry, "run2", whole.place, whole.placement)
    return sound.with_name("damaged")


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_BATCH_UNITS", 3)


@pytest.fixture
def sound(made: Path) -> Iterator[Path]:
    """The registry of `made`, which only this process can read."""
    with small_grid(256, list_threshold=8):
        yield made


def test_a_verification_finds_the_same(sound: Path, damaged: Path) -> None:
    for place in (sound, damaged):
        with closing(holdfast.open(place, remember=False)) as registry:
            here = registry.verify(deep=True)
            shown: list[int] = []
            executor = Crossing(2)
            there = registry.verify(deep=True, executor=executor, progress=shown.append)
            assert as_json(there) == as_json(here)
            assert here.ok == (place == sound)
            assert executor.calls > 10
            assert shown[-1] == here.bytes_checked
            for more in ({}, {"decode": True}):
                assert registry.verify(executor=executor, **more) == registry.verify(**more)
    assert {one.kind for one in here.findings} == {"missing", "manifest", "pack", "placement"}
    assert any("than its tensor gives it" in one.message for one in here.findings)  # a row


def test_a_verification_that_was_broken_off_resumes_on_other_workers(
    sound: Path, tmp_path: Path
) -> None:
    notes = tmp_path / "notes"
    with closing(holdfast.open(sound, remember=False)) as registry:
        packs = registry.verify(deep=True).data.packs
        shown: list[int] = []

        def break_off(done: int) -> None:
            shown.append(done)
            if len(shown) == 5:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            registry.verify(resume=notes, executor=Crossing(), progress=break_off)
        noted = notes.read_bytes().count(b"packs/")
        assert noted == 5 < packs
        data = registry.verify(resume=notes, executor=Crossing()).data
        assert (data.packs_noted, data.packs_read) == (noted, packs - noted)


def test_a_sync_copies_the_same(sound: Path, tmp_path: Path) -> None:
    """A worker that dies after it put an object changes neither report nor registry."""
    reports, held = [], []
    for number, executor in enumerate((None, Crossing(2))):
        with (
            closing(holdfast.open(sound, remember=False)) as source,
            holdfast.init(tmp_path / str(number)) as mirror,
        ):
            shown: list[int] = []
            reports.append(sync(source, mirror, executor=executor, progress=shown.append))
            assert shown[-1] == reports[-1].bytes_copied > 0
            assert mirror.verify(deep=True, decode=True).ok
            held.append(
                (objects(mirror.handle.store.backend), commit_lines(mirror.handle.store.backend))
            )
            again = sync(source, mirror, executor=executor)
            assert again.bytes_copied == 0
    assert as_json(reports[0]) == as_json(reports[1])
    assert held[0] == held[1]


def test_nothing_damaged_is_copied_by_a_worker(damaged: Path, tmp_path: Path) -> None:
    with (
        closing(holdfast.open(damaged, remember=False)) as source,
        holdfast.init(tmp_path / "mirror") as mirror,
    ):
        with pytest.raises(Damaged, match="packs/"):
            backend = source.handle.store.backend
            places = [one.handle.reader.place for one in source.run("run0").checkpoints()]
            flip(backend, str(source.handle.store.placement(places[0].placement_key).packs[0].key))
            try:
                sync(source, mirror, ["run0"], executor=Crossing())
            finally:
                flip(
                    backend,
                    str(source.handle.store.placement(places[0].placement_key).packs[0].key),
                )
        assert mirror.run("run0").checkpoints() == []
        assert sync(source, mirror, ["run0"], executor=Crossing()).runs[0].checkpoints


def test_a_sweep_while_workers_copy_asks_for_new_keys(sound: Path, tmp_path: Path) -> None:
    """W3 holds for what workers put: the collection deletes it before the commit names it."""
    with (
        closing(holdfast.open(sound, remember=False)) as source,
        holdfast.init(tmp_path / "mirror") as mirror,
        closing(holdfast.open(tmp_path / "mirror", remember=False)) as other,
    ):
        deleted: list[int] = []

        def sweep() -> None:
            if not deleted and len(contents(mirror.handle.store.backend, "placements/")) == 8:
                deleted.append(other.gc(grace_s=0).deleted.objects)

        sync(source, mirror, ["run1"], executor=Crossing(after=sweep))
        assert deleted[0]
        assert mirror.verify(deep=True).ok
        assert mirror.run("run1").latest().digest == source.run("run1").latest().digest


def test_a_repack_makes_the_same_packs(sound: Path) -> None:
    """It moves chunks, and decodes and encodes others."""
    options = {"compression": "zstd", "keyframe_every": 2}
    reports, held = [], []
    for name, executor in (("here", None), ("there", Crossing(2))):
        with closing(copied(sound, name)) as registry:
            planned = registry.repack(dry_run=True, executor=executor, **options)
            reports.append(
                (as_json(planned), as_json(registry.repack(executor=executor, **options)))
            )
            assert registry.verify(deep=True, decode=True).ok
            held.append(objects(registry.handle.store.backend))
    assert reports[0] == reports[1]
    assert held[0] == held[1]
    assert json.loads(reports[0][1])["packs_written"]


def test_a_collection_deletes_the_same(sound: Path) -> None:
    """Workers read the placements, and nothing else."""
    reports, held = [], []
    for name, executor in (("here", None), ("there", Crossing(2))):
        with closing(copied(sound, name)) as registry:
            calls: list[Call] = []
            store = registry.handle.store
            store.backend = Metered(store.backend, calls)
            for options in ({"shard": "2/3"}, {}, {"full": True}):
                done = registry.gc(grace_s=0, executor=executor, **options)
                reports.append(as_json(replace(done, unfinished_bytes=0)))
            read = [call.key for call in calls if call.method == "get"]
            assert any(key.startswith("placements/") for key in read) == (executor is None)
            assert registry.verify(deep=True).ok
            held.append(objects(store.backend))
    assert executor.calls > 3
    assert reports[:3] == reports[3:]
    assert json.loads(reports[0])["deleted"]["objects"] > 0
    assert held[0] == held[1]


def test_what_a_worker_cannot_read_stops_a_collection(damaged: Path) -> None:
    with closing(copied(damaged, "stopped")) as registry:
        before = objects(registry.handle.store.backend)
        with pytest.raises(Damaged, match=r"(?s)placements/.*Nothing was deleted"):
            registry.gc(grace_s=0, executor=Crossing())
        with ProcessPoolExecutor(1, get_context("spawn")) as broken:
            broken.submit(os.getpid).result()
            for process in list(broken._processes.values()):
                process.kill()
            with pytest.raises(WorkersFailed):
                registry.gc(grace_s=0, executor=broken)
        assert objects(registry.handle.store.backend) == before


def test_counts_and_statistics_are_the_same(sound: Path, damaged: Path) -> None:
    for place in (sound, damaged):
        with closing(holdfast.open(place, remember=False)) as registry:
            here, there = registry.usage(), registry.usage(executor=Crossing())
            assert as_json(there) == as_json(here)
    with closing(holdfast.open(sound, remember=False)) as registry:
        state = registry.stored("run1")
        assert stats(state.handle, executor=Crossing(2)) == stats(state.handle)


# Real processes


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A registry that any process can read: cut as usual."""
    place = tmp_path_factory.mktemp("bulk") / "plain"
    with holdfast.init(place) as registry:
        fill(registry, 2, 12)
        pack = registry.run("run1").latest().handle.reader.placement.packs[-1]
        flip(registry.handle.store.backend, str(pack.key))
    return place


class Killer:
    """Kills a process when the first units are done."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.steps = 0

    def __call__(self, _: int) -> None:
        if not self.steps:
            os.kill(self.pid, signal.SIGKILL)
        self.steps += 1


def test_a_pool_of_processes(plain: Path, tmp_path: Path) -> None:
    """A pool that lost a process is broken: a typed error, and the next call continues."""
    notes = tmp_path / "notes"
    with (
        ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool,
        closing(holdfast.open(plain, remember=False)) as registry,
    ):
        here = registry.verify(deep=True)
        assert as_json(registry.verify(deep=True, executor=pool)) == as_json(here)
        killer = Killer(next(iter(pool._processes)))
        with pytest.raises(WorkersFailed, match="BrokenProcessPool"):
            registry.verify(resume=notes, executor=pool, progress=killer)
        again = registry.verify(resume=notes)
        assert again.findings == here.findings
        assert again.data.packs_noted


def test_a_cluster_that_is_not_there_is_named(plain: Path, monkeypatch) -> None:
    pytest.importorskip("distributed", reason="the extra `dask` is not installed")
    wrong = invoke("du", "-r", plain, "--dask", "scheduler")
    assert (wrong.exit_code, "expected tcp://HOST:PORT; found scheduler" in wrong.stderr) == (
        3,
        True,
    )
    monkeypatch.setitem(sys.modules, "distributed", None)
    absent = invoke("du", "-r", plain, "--dask", "tcp://127.0.0.1:1")
    assert (absent.exit_code, "[dask]'" in absent.stderr) == (3, True)


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning")
def test_a_cluster_of_dask_that_loses_a_worker(plain: Path, tmp_path: Path) -> None:
    distributed = pytest.importorskip("distributed", reason="the extra `dask` is not installed")
    with (
        distributed.LocalCluster(
            2,
            threads_per_worker=1,
            processes=True,
            dashboard_address="127.0.0.1:0",
            silence_logs=logging.CRITICAL,
        ) as cluster,
        distributed.Client(cluster) as client,
        closing(holdfast.open(plain, remember=False)) as registry,
    ):
        executor = client.get_executor()
        first, second = client.run(os.getpid).values()
        killer = Killer(first)
        here = registry.verify(deep=True)
        there = registry.verify(deep=True, executor=executor, progress=killer)
        assert as_json(there) == as_json(here)
        assert killer.steps > 20  # most of the work was done after the kill
        reports = []
        for name, one, progress in (("here", None, None), ("there", executor, Killer(second))):
            with holdfast.init(tmp_path / name) as mirror:
                reports.append(sync(registry, mirror, ["run0"], executor=one, progress=progress))
                assert mirror.verify(deep=True).ok
        assert as_json(reports[0]) == as_json(reports[1])
        assert progress.steps == reports[0].runs[0].packs_copied > 5
        usual, told = (
            invoke("verify", "-r", plain, "--deep", "--json", *more).stdout
            for more in ((), ("--dask", cluster.scheduler_address))
        )
        assert told == usual
    for victim in (first, second):
        with pytest.raises(ProcessLookupError):
            os.kill(victim, 0)
