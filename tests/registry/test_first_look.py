"""The first look of a machine at a registry: sealed runs are shown as their notes tell them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from threading import Event
from typing import Any

import pytest

from holdfast import Monitor, Retention
from holdfast.backends.wrappers import Call, Metered, Wrapper
from holdfast.registry.cli.history_listing import newest_commits
from holdfast.registry.cli.listing import Listing
from holdfast.registry.cli.run_listing import FORM, summary
from holdfast.registry.errors import StoreUnavailable
from holdfast.registry.face.factory import open_on
from holdfast.registry.history.log import RunLog
from holdfast.registry.history.seals import NotedLog, Seals
from holdfast.registry.ui.pages.names import read_names
from holdfast.registry.ui.pages.runs import list_runs
from holdfast.registry.ui.source import Source
from tests.registry.ui.sources import source_of
from tests.support.states import small_state
from tests.support.stores import Scratch, kind_of, new_backend, opened

SEALED = ("bare", "dropped", "failed", "fork", "long", "plain", "pruned")
#: They commit behind their seals, or were never sealed.
ACTIVE = ("moved", "new")


@pytest.fixture(autouse=True)
def _no_first_commits_are_read_for_the_ages_of_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.registry.ui.pages.runs.BIRTHS_UNASKED", 0)


@pytest.fixture(scope="module")
def collected() -> Scratch:
    backend = new_backend()
    loss = Monitor(metric="loss", mode="min")
    with opened(backend) as reg:
        reg.upgrade()
        for name in ("bare", "dropped", "failed", "long", "moved", "plain", "pruned"):
            run = reg.create_run(name, config={"lr": len(name)}, monitor=loss, owner=_owner(name))
            for step in range(1, {"bare": 1, "long": 25}.get(name, 4)):
                run.save(small_state(step), step=step, metrics={"loss": 1 / step, name: step})
        long, pruned = reg.run("long"), reg.run("pruned")
        long.pins.tags.set("prod", long.checkpoints()[3])
        long.releases.publish("1.0.0", long.checkpoints()[5])
        long.history.set_labels(["paper"])
        long.history.set_note('a "note"],"commits":', long.checkpoints()[1])
        pruned.restore()
        pruned.save({"x": 1}, step=9, streams={"s": [{"step": 9}]})
        pruned.retention.prune(Retention(last=1))
        reg.run("failed").status = "failed"
        reg.run("plain").status = "completed"
        reg.fork("long/latest", "fork", config={"places": [], "pool": "],"})
        reg.run("dropped").retention.drop("no use", now=True)  # a hidden run would not be sealed
        reg.gc(grace_s=0)
        reg.run("moved").streams["s"].append([{"step": 1}])
        reg.create_run("new").save(small_state(), step=1)
    return backend


def _owner(name: str) -> str | None:
    return "ada" if name == "plain" else None


class Look:
    """What a machine that knows nothing shows of a registry, and its requests."""

    def __init__(self, backend: Scratch) -> None:
        self.calls: list[Call] = []
        meter = Metered(backend, self.calls)
        self.registry = open_on(meter)
        self.source = Source(self.registry, meter)
        self.calls.clear()

    def check_requests(self, *more: str) -> None:
        """Check that only active runs were read, besides listings and the one table."""
        runs = {call.key.split("/")[1] for call in self.calls if kind_of(call.key) in _OF_RUNS}
        assert runs - {*more} == {*ACTIVE}
        others = (call for call in self.calls if kind_of(call.key) not in _OF_RUNS)
        asked = Counter(f"{call.method} {kind_of(call.key)}" for call in others)
        assert asked == {"list runs": 1, "list active": 1, "list notes": 1, "get notes": 1}
        self.calls.clear()


_OF_RUNS = ("log", "snapshots")


@contextmanager
def look(backend: Scratch) -> Iterator[Look]:
    found = Look(backend)
    try:
        yield found
    finally:
        found.source.close()


def _rows(look: Look) -> dict[str, Any]:
    return dict(Listing(look.registry).summaries(summary, FORM))


def _fields(look: Look) -> dict[str, Any]:
    return look.registry.runs_table().to_pylist()


_SHOWN: dict[str, tuple[Callable[[Look], Any], tuple[str, ...]]] = {
    "run ls": (_rows, ()),
    "runs_table": (_fields, ()),
    "view Runs": (lambda look: list_runs(look.source), ()),
    "view Names": (lambda look: read_names(look.source), ("long",)),  # it has names
}


@pytest.mark.parametrize("kind", _SHOWN)
def test_what_notes_tell_is_shown_as_if_each_run_had_been_opened(
    collected: Scratch, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    show, named = _SHOWN[kind]
    with look(collected) as fresh:
        found = show(fresh)
        fresh.check_requests(*named)
    monkeypatch.setattr(Seals, "noted", lambda *_: {})
    with look(collected) as fresh:
        assert found == show(fresh)
        runs = {call.key.split("/")[1] for call in fresh.calls if kind_of(call.key) in _OF_RUNS}
        assert runs == {*SEALED, *ACTIVE}


def test_a_page_of_one_run_reads_its_log_and_a_later_look_finds_what_changed(
    collected: Scratch,
) -> None:
    backend = collected.copy()
    with look(backend) as fresh:
        first = {row.name: row for row in list_runs(fresh.source).rows}
        fresh.check_requests()
        assert isinstance(fresh.source.runs(SEALED).runs["long"].handle.log, NotedLog)
        opened_run = fresh.source.run("long")
        assert not isinstance(opened_run.handle.log, NotedLog)
        with opened(backend) as reg:
            reg.run("plain").pins.tags.set("late", reg.run("plain").checkpoints()[0])
        fresh.calls.clear()
        rows = {row.name: row for row in list_runs(fresh.source).rows}
        asked = {call.key.split("/")[1] for call in fresh.calls if kind_of(call.key) in _OF_RUNS}
        assert asked == {*ACTIVE, "plain"}
        assert {name for name in rows if rows[name] != first[name]} == {"plain"}
        assert rows["plain"].words == (*first["plain"].words, "tags/late")


def test_the_newest_commits_of_runs_that_notes_tell(collected: Scratch) -> None:
    with look(collected) as fresh:
        answer = newest_commits(fresh.registry, None, 0.0, lambda _: True, 1000)
        assert {row["run"] for row in answer.document()} == {*SEALED, *ACTIVE}  # type: ignore[attr-defined]


def test_a_look_shows_no_run_as_it_was_when_another_look_began(
    collected: Scratch, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, read = collected.copy(), Seals.noted
    has_read, may_end = Event(), Event()

    def slow(seals: Seals, names: Collection[str], make: Callable[[NotedLog], Any]) -> Any:
        found = read(seals, names, make)
        has_read.set()
        assert may_end.wait(60)
        return found

    with look(backend) as fresh, ThreadPoolExecutor() as pool:
        monkeypatch.setattr(Seals, "noted", slow)
        early = pool.submit(fresh.source.runs, SEALED)
        assert has_read.wait(60)
        with opened(backend) as reg:
            reg.run("plain").pins.tags.set("late", reg.run("plain").checkpoints()[0])
        late = pool.submit(fresh.source.runs, SEALED)
        wait([late], timeout=0.2)  # until it waits for the other
        may_end.set()
        assert "late" not in early.result().runs["plain"].manifest.tags
        assert "late" in late.result().runs["plain"].manifest.tags


def test_announced_runs_are_opened_while_notes_are_read(collected: Scratch) -> None:
    is_open, early = Event(), list[bool]()

    class Slow(Wrapper):
        """Answers for notes only when an announced run was asked for, or after a while."""

        def get(self, key: str, *rest: Any, **how: Any) -> bytes:
            if key.startswith(f"runs/{ACTIVE[0]}/"):
                is_open.set()
            if kind_of(key) == "notes":
                early.append(is_open.wait(10))
            return self.inner.get(key, *rest, **how)

    with source_of(Slow(collected)) as source:
        assert set(source.runs([*SEALED, *ACTIVE]).runs) == {*SEALED, *ACTIVE}
    assert early == [True]


def test_the_run_of_a_note_is_the_run_of_its_log(collected: Scratch) -> None:
    with look(collected) as fresh, opened(collected) as reg:
        for name, noted in fresh.source.runs(SEALED).runs.items():
            assert isinstance(noted.handle.log, NotedLog)
            run, there = noted.manifest, reg.run(name).manifest
            for told in ("has_checkpoints", "count", "superseded_count", "evicted_count"):
                assert getattr(run, told) == getattr(there, told), (name, told)
            assert run.latest() == there.latest()
            # Only marks and the seal follow.
            moved = {key: getattr(there, key) for key in ("next_slot", "sealed_at", "epoch")}
            assert run.whole().changed(**moved) == there.whole()


@pytest.mark.parametrize("act", ["refresh", "look", "commit", "history"])
def test_what_goes_on_from_a_note_reads_the_log_first(collected: Scratch, act: str) -> None:
    backend = collected.copy()
    with look(backend) as fresh:
        run = fresh.source.runs(SEALED).runs["long"]
        log = run.handle.log
        assert isinstance(log, NotedLog)
        with opened(backend) as reg:
            reg.run("long").history.set_labels(["later"])
            there = reg.run("long").manifest
        if act == "commit":
            run.history.set_labels(["mine"])
            assert run.manifest.commits == there.commits + 1
        elif act == "look":
            log.look().check.result()
            assert log.run == there
        elif act == "refresh":
            assert run.refresh().manifest == there
        else:
            assert run.history.manifest().commits == there.commits - 1
        assert open_on(backend).verify(deep=True).ok


def test_a_log_that_could_not_be_read_stays_noted(
    collected: Scratch, monkeypatch: pytest.MonkeyPatch
) -> None:
    with look(collected.copy()) as fresh:
        run = fresh.source.runs(SEALED).runs["long"]

        def away(*_: object, **__: object) -> None:
            raise StoreUnavailable("away")

        with monkeypatch.context() as patch:
            patch.setattr(RunLog, "open", away)
            for _ in range(2):
                with pytest.raises(StoreUnavailable):
                    run.refresh()
        assert run.handle.log.end(None) is not None
        assert run.refresh().manifest == fresh.registry.run("long").manifest
