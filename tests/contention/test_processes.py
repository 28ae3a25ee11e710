"""Many processes write at once: nobody gives up, each commit is there once, and nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

import holdfast
from holdfast.registry.face.registry import Registry
from holdfast.registry.history.actions import ReportMetrics, SetTag
from tests.contention.processes import all_at_once, annotate, begin, save_the_same, train
from tests.support.sameness import assert_same
from tests.support.states import make_state

pytestmark = pytest.mark.xdist_group("forked")

_COMMITS = 4


@pytest.fixture
def emulated(moto_url: Callable[[], str]) -> str:
    """A registry on an emulator whose exclusive create is none."""
    url = moto_url()
    holdfast.init(url, skip_race_probe=True).close()
    return url


def _names(reg: Registry) -> Counter[str]:
    """Return how often each report and tag is in the history."""
    names: Counter[str] = Counter()
    for commit in reg.run("shared").history.commits():
        for action in commit.actions:
            if isinstance(action, ReportMetrics):
                names.update(list(action.metrics))
            elif isinstance(action, SetTag):
                names[action.name] += 1
    return names


def _check_annotations(url: str, processes: int, commits: int = _COMMITS) -> None:
    """Let processes annotate one run, and compare its history with the answers that they got."""
    with holdfast.open(url) as reg:
        reg.create_run("shared", seed=1).save(make_state(1), step=1)
    told = all_at_once(url, annotate, processes, "shared", commits)
    acknowledged = [name for names in told for name in names]
    assert len(acknowledged) == processes * commits
    with holdfast.open(url) as reg:
        assert _names(reg) == Counter(acknowledged)
        numbers = [commit.n for commit in reg.run("shared").history.commits()]
        assert numbers == list(range(2 + len(acknowledged)))
        slots = [info.key for info in reg.handle.store.backend.list("runs/shared/log/")]
        assert [int(key[-20:]) for key in slots] == numbers
        assert reg.verify(deep=True).findings == ()


@pytest.mark.parametrize(
    ("processes", "commits"), [(12, 4), pytest.param(64, 10, marks=pytest.mark.soak)]
)
def test_processes_annotate_one_run_in_a_folder(folder: str, processes: int, commits: int) -> None:
    _check_annotations(folder, processes, commits)


@pytest.mark.radosgw
@pytest.mark.parametrize("processes", [4, pytest.param(8, marks=pytest.mark.soak)])
def test_processes_annotate_one_run_in_a_bucket(bucket: str, processes: int) -> None:
    _check_annotations(bucket, processes)


def test_process_annotates_a_run_on_an_emulator(emulated: str) -> None:
    # One only: two would win the same slot there.
    _check_annotations(emulated, 1)


def _check_trainers(url: str) -> None:
    with holdfast.open(url) as reg:
        reg.create_run("shared", seed=1)
    assert sorted(all_at_once(url, train, 2, "shared")) == ["fenced", "in charge"]
    with holdfast.open(url) as reg:
        run = reg.run("shared")
        saved = {(checkpoint.phase, checkpoint.step) for checkpoint in run.checkpoints()}
        assert {("of0", 1), ("of1", 1)} < saved
        assert len(saved) == len(run.checkpoints()) == 3
        assert reg.verify(deep=True).findings == ()


def test_one_of_two_trainers_is_fenced_in_a_folder(folder: str) -> None:
    _check_trainers(folder)


@pytest.mark.radosgw
def test_one_of_two_trainers_is_fenced_in_a_bucket(bucket: str) -> None:
    _check_trainers(bucket)


def _check_beginners(url: str, processes: int) -> None:
    told = all_at_once(url, begin, processes, "requeued")
    assert len(set(told)) == 1
    with holdfast.open(url) as reg:
        assert reg.run_names() == ["requeued"]
        assert [commit.n for commit in reg.run("requeued").history.commits()] == [0]
        assert reg.run("requeued").config == {"begun by": told[0][1]}


@pytest.mark.parametrize("processes", [2, 8])
def test_processes_that_begin_one_run_share_it_in_a_folder(folder: str, processes: int) -> None:
    _check_beginners(folder, processes)


@pytest.mark.radosgw
def test_processes_that_begin_one_run_share_it_in_a_bucket(bucket: str) -> None:
    _check_beginners(bucket, 4)


def _check_same_content(url: str, processes: int) -> None:
    assert len(set(all_at_once(url, save_the_same, processes, 5))) == 1
    with holdfast.open(url) as reg:
        for number in range(processes):
            assert_same(reg.checkpoint(f"run{number}/latest").load(), make_state(5))
        # The same content has one name, whoever was first.
        packs = list(reg.handle.store.backend.list("packs/"))
        manifests = list(reg.handle.store.backend.list("manifests/"))
        assert (len(packs), len(manifests)) == (2, 1)
        assert reg.verify(deep=True).findings == ()


def test_processes_that_save_the_same_store_it_once_in_a_folder(folder: str) -> None:
    _check_same_content(folder, 8)


@pytest.mark.radosgw
def test_processes_that_save_the_same_store_it_once_in_a_bucket(bucket: str) -> None:
    _check_same_content(bucket, 4)
