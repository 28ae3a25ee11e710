"""What each view asks of the store. A number here is a promise to whoever waits for a bucket."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from holdfast.backends.wrappers import Call, Metered, Wrapper
from holdfast.registry.face.factory import open_on
from holdfast.registry.objects.keys import slot_key
from holdfast.registry.spec import Retention
from holdfast.registry.ui.pages.checkpoint import state_view
from holdfast.registry.ui.pages.health import health_view
from holdfast.registry.ui.pages.lineage import read_lineage
from holdfast.registry.ui.pages.names import read_names
from holdfast.registry.ui.pages.run import show_run
from holdfast.registry.ui.pages.runs import BIRTHS_UNASKED, PAGE, list_runs
from holdfast.registry.ui.pages.side_by_side import compare_runs
from holdfast.registry.ui.pages.storage import storage_view
from holdfast.registry.ui.source import Source
from tests.registry.ui.sources import source_of
from tests.support.stores import Scratch, kind_of, new_backend, opened

_LOSS = {"loss": 0.5}


class Asking:
    """A source that tells what it asks for."""

    def __init__(self, backend: Scratch) -> None:
        self.calls: list[Call] = []
        meter = Metered(backend, self.calls)
        self.source = Source(open_on(meter), meter)
        self.calls.clear()

    def asked(self) -> Counter[str]:
        """Return the methods and kinds of keys since the last time."""
        told = Counter(f"{call.method} {kind_of(call.key)}" for call in self.calls)
        self.calls.clear()
        return told

    def runs(self) -> set[str]:
        """Return the runs of which anything was read since the last time."""
        keys = (call.key.split("/") for call in self.calls)
        found = {key[1] for key in keys if key[0] == "runs" and len(key) > 2}
        self.calls.clear()
        return found


def _name(number: int) -> str:
    return f"20260101_{number // 3600:02d}{number // 60 % 60:02d}{number % 60:02d}_0000000a"


@pytest.fixture(scope="module")
def filled() -> Scratch:
    """Three runs of four checkpoints, one of them a fork."""
    backend = new_backend()
    with opened(backend) as registry:
        for name in ("one", "two"):
            run = registry.create_run(name, seed=1, config={"lr": len(name)})
            for step in range(1, 5):
                run.save({"w": np.full(4, step)}, step=step, metrics=_LOSS)
        registry.fork("one/latest", "three", config={"lr": 9})
    return backend


@pytest.fixture
def asking(filled: Scratch) -> Iterator[Asking]:
    found = Asking(filled)
    yield found
    found.source.close()


# A run: the names of its snapshots, those of its slots, and the slots; here it has no snapshot.
_SLOTS = {"one": 5, "two": 5, "three": 2}
_OPENING = {name: Counter({"list snapshots": 1, "list log": 1, "get log": slots})
            for name, slots in _SLOTS.items()}  # fmt: skip


def test_runs_of_a_thousand_opens_only_the_rows_of_its_table() -> None:
    backend = new_backend()
    with opened(backend) as registry:
        for number in range(940, 1000):
            registry.create_run(_name(number), seed=1)
    for number in range(940):
        # These would be damage, if anything read them.
        backend.put(slot_key(_name(number), 0), b"not a slot\n")
    asking = Asking(backend)
    page = list_runs(asking.source)
    assert [row.name for row in page.rows] == [_name(number) for number in range(999, 949, -1)]
    assert (page.total, page.matching, page.undated) == (1000, 1000, 0)
    assert len(asking.calls) == 3 + 3 * PAGE
    assert asking.runs() == {row.name for row in page.rows}
    # The second look asks for the names, the notes of seals, and each run for its next slot.
    list_runs(asking.source)
    assert asking.asked() == Counter({"list runs": 1, "list notes": 1, "get log": PAGE})
    # More rows open only those.
    assert len(list_runs(asking.source, count=PAGE + 5).rows) == PAGE + 5
    assert len(asking.calls) == 3 + PAGE + 3 * 5
    asking.source.close()


def test_sealed_runs_are_not_asked_again(request: pytest.FixtureRequest) -> None:
    backend, names = new_backend(), [_name(number) for number in range(5)]
    with opened(backend) as registry:
        registry.upgrade()
        for name in names:
            registry.create_run(name).save({"w": np.zeros(4)}, step=1)
        registry.gc(grace_s=0)
        asking = Asking(backend)
        request.addfinalizer(asking.source.close)
        list_runs(asking.source)
        asking.calls.clear()
        for where in ("", "status=running"):
            rows = list_runs(asking.source, where=where).rows
            assert [row.name for row in rows if not row.is_pending] == names[::-1]
            assert asking.asked() == Counter({"list runs": 1, "list active": 1, "list notes": 1})
        run = registry.run(names[2])
        run.streams["s"].append([{"step": 1}])
        for _ in range(2):  # as it is announced, and as it is sealed again
            shown = {row.name: row.commits for row in list_runs(asking.source).rows}
            assert asking.runs() == {names[2]}
            assert shown[names[2]] == run.manifest.commits == 3
            registry.gc(grace_s=0)


def test_runs_of_other_names_are_dated_by_their_first_commits_once(asking: Asking) -> None:
    page = list_runs(asking.source, count=1)
    assert [row.name for row in page.rows] == ["three"]
    assert page.undated == 0
    opening = Counter({"list runs": 1, "get log": len(_SLOTS)}) + _OPENING["three"]
    assert asking.asked() == opening
    list_runs(asking.source, count=1)
    assert asking.asked() == Counter({"list runs": 1, "get log": 1})


def test_too_many_undated_runs_are_not_read_unasked() -> None:
    backend = new_backend()
    names = [f"r{number:04d}" for number in range(BIRTHS_UNASKED + 1)]
    for name in names:
        backend.put(slot_key(name, 0), b"not a slot\n")
    asking = Asking(backend)
    page = list_runs(asking.source, count=1)
    assert page.undated == len(names)
    assert asking.runs() == {names[-1]}
    page = list_runs(asking.source, count=1, reads_births=True)
    assert page.undated == 0
    assert asking.runs() == set(names)
    asking.source.close()


def test_run_reads_its_log_once_and_then_its_next_slot(asking: Asking) -> None:
    shown = show_run(asking.source, "one")
    assert len(shown.checkpoints) == 4
    assert [fork.run for fork in shown.forks] == ["three"]
    births = Counter({"list runs": 1, "get log": len(_SLOTS) - 1})  # its own is known
    assert asking.asked() == _OPENING["one"] + Counter({"get log": _SLOTS["one"]}) + births
    show_run(asking.source, "one")
    assert asking.asked() == Counter({"get log": 1})


def test_side_by_side_reads_the_logs_of_its_runs_alone(asking: Asking) -> None:
    found = compare_runs(asking.source, ["one", "three"])
    assert found.names == ("one", "three")
    assert asking.runs() == {"one", "three"}
    compare_runs(asking.source, ["one", "three"])
    assert asking.asked() == Counter({"get log": 2})


def test_lineage_reads_first_commits_and_opens_the_family(
    asking: Asking, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.registry.ui.pages.lineage.MOST_RUNS", 2)
    found = read_lineage(asking.source, ["three"])
    assert set(found.runs) == {"one", "three"}
    opening = _OPENING["one"] + _OPENING["three"]
    # Runs that are open tell their beginnings.
    assert asking.asked() == opening + Counter({"list runs": 1, "get log": len(_SLOTS) - 1})


def test_lineage_of_a_run_opens_few_others_to_find_merges(asking: Asking) -> None:
    found = read_lineage(asking.source, ["three"])
    assert (set(found.runs), found.others) == ({"one", "three"}, 0)
    assert asking.asked() == sum(_OPENING.values(), Counter({"list runs": 1}))


@pytest.fixture(scope="module")
def lengths() -> dict[int, Scratch]:
    """Registries of a run that is trained and one that has ended, with few or many checkpoints."""
    made = {}
    for checkpoints in (22, 118):  # as many slots after the newest snapshot
        made[checkpoints] = new_backend()
        with opened(made[checkpoints]) as registry:
            for name in ("trained", "ended"):
                run = registry.create_run(name, seed=1, retention=_RETENTION.get(name))
                for step in range(1, checkpoints + 1):
                    run.save({"w": np.zeros(4)}, step=step, metrics=_LOSS)
            with run:  # the one that ended
                pass
    return made


_RETENTION = {"ended": Retention(last=20)}
#: The requests of a first look: one listing of the runs, and opening both; one has a snapshot of
#: its newest slot, the other one has seven slots after it.
_BOTH = 1 + 4 + (4 + 7)
_VIEWS: dict[str, tuple[Callable[[Source], object], int]] = {
    "runs": (list_runs, _BOTH + 2),
    "health": (health_view, _BOTH + 2 + 1),
    "names, without any": (read_names, _BOTH),
    "lineage": (read_lineage, _BOTH + 2),
    "side by side, nothing evicted": (lambda source: compare_runs(source, ["trained"]), 4 + 7),
    "checkpoint": (lambda source: state_view(source, "ended/latest"), 4 + 1),
    "storage": (storage_view, 3),
}


@pytest.mark.parametrize("view", _VIEWS)
@pytest.mark.parametrize("checkpoints", [22, 118])
def test_requests_do_not_grow_with_the_checkpoints(
    view: str, checkpoints: int, lengths: dict[int, Scratch]
) -> None:
    ask, requests = _VIEWS[view]
    asking = Asking(lengths[checkpoints])
    ask(asking.source)
    assert len(asking.calls) == requests, asking.asked()
    asking.source.close()


def test_a_run_shows_what_it_keeps_while_its_log_is_read() -> None:
    backend = new_backend()
    with opened(backend) as registry:
        run = registry.create_run("long", seed=1, retention=Retention(last=2))
        for step in range(1, 101):
            run.save({"w": np.zeros(4)}, step=step, metrics=_LOSS)
    older = {slot_key("long", number) for number in range(101 - 64)}
    reached, held = threading.Event(), threading.Event()

    class Held(Wrapper):
        """Answers for the older slots only when it may."""

        def get(self, key: str, *rest: Any, **how: Any) -> bytes:
            if key in older:
                reached.set()
                held.wait(300)
            return self.inner.get(key, *rest, **how)

    with source_of(Held(backend)) as source:
        try:
            source.run("long")
            source.begin_chronicle("long")
            reached.wait(300)
            shown = show_run(source, "long", within_s=0)
        finally:
            held.set()
        assert (shown.pending, len(shown.checkpoints)) == (101 - 64, 64)
        assert [row.saved.step for row in shown.checkpoints[:2]] == [100, 99]
        with opened(backend) as registry:  # the run grows while nobody looks
            registry.run("long").pins.tags.set("late", registry.run("long").checkpoints()[0])
        shown = show_run(source, "long")
        assert (shown.pending, len(shown.checkpoints)) == (0, 100)
        assert shown.events[0].subject == "late"
        with source.meter.measure() as used:
            show_run(source, "long")
        assert used.requests == 1


def test_what_was_read_for_a_part_of_a_table_is_not_read_again_for_the_rest(
    filled: Scratch,
) -> None:
    reached, held = threading.Event(), threading.Event()
    calls: list[Call] = []

    class Held(Wrapper):
        """Answers for the slots of one run only when it may."""

        def get(self, key: str, *rest: Any, **how: Any) -> bytes:
            if key == slot_key("two", 2):
                reached.set()
                held.wait(300)
            return self.inner.get(key, *rest, **how)

    with source_of(Metered(Held(filled), calls)) as source:
        try:
            source.runs(["one"])
            part = source.runs(["one", "two"], within_s=0)
            while part.pending != ("two",):
                part = source.runs(["one", "two"], within_s=0.01)
            reached.wait(300)
            calls.clear()
            assert source.runs(["one", "two"], within_s=0).pending == ("two",)
            assert calls == []
        finally:
            held.set()
        assert set(source.runs(["one", "two"]).runs) == {"one", "two"}
        assert not any("one" in call.key for call in calls)
        source.runs(["one", "two"])
        assert sum("one" in call.key for call in calls) == 1
