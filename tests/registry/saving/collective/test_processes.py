"""Real ranks: every layout gives one id, and an unchanged state stores nothing."""

from __future__ import annotations

import os
import random
import secrets
import signal
import time
from collections import Counter
from pathlib import Path
from threading import Event, Thread, local
from typing import Any

import pytest
from torch.distributed import TCPStore

import holdfast
from holdfast import Registry
from holdfast.distributed import TorchGroup
from tests.registry.saving.collective import acts
from tests.registry.saving.collective.fleet import Fleet, keeps_a_store, saves_twice
from tests.support.processes import servers, start_process, start_telling

pytestmark = pytest.mark.xdist_group("forked")

LAYOUTS = [("plain", 2), ("fsdp", 3), ("tp", 2), ("fsdp-tp", 4), ("hsdp", 4), ("fsdp", 1)]


@pytest.fixture
def reg(tmp_path: Path) -> Registry:
    return holdfast.init(tmp_path / secrets.token_hex(4))  # ranks remember registries by place


def packs(reg: Registry) -> set[Path]:
    return set((Path(reg.url.removeprefix("file://")) / "packs").rglob("*.*"))


def test_every_layout_has_the_id_of_the_plain_state_and_stores_it_once(
    reg: Registry, fleet: Fleet
) -> None:
    alone = reg.run("alone", create=True).save(acts.plain(), step=0).digest
    kept: set[Path] = set()
    for step, (kind, size) in enumerate(LAYOUTS):
        found = fleet.run(size, acts.saved, reg.url, "together", kind, step)
        assert found == [str(alone)] * size, kind
        if kept:
            assert packs(reg) == kept, f"{kind} on {size} ranks stored an unchanged state"
        kept = packs(reg)
        # And back, into the layout of the next save.
        into, ranks = LAYOUTS[(step + 1) % len(LAYOUTS)]
        assert fleet.run(ranks, acts.loaded, reg.url, "together/latest", into) == [[]] * ranks
    assert not reg.verify(deep=True).findings


def test_placements_that_divide_nothing_evenly_give_one_id(reg: Registry, fleet: Fleet) -> None:
    alone = reg.run("alone", create=True).save(acts.table(), step=0)
    found = fleet.run(4, acts.saved_placements, reg.url)
    assert found == [[str(alone.digest)] * len(acts.PLACEMENTS)] * 4


def test_what_is_remembered_of_a_layout_is_used_only_while_it_is_true(fleet: Fleet) -> None:
    assert fleet.run(4, acts.flattened_again) == [[]] * 4


def test_layouts_that_are_no_boxes_are_refused_by_name(reg: Registry, fleet: Fleet) -> None:
    for said in fleet.run(2, acts.refused_placements, reg.url):
        assert len(said) == 2
        assert "state['model']['w']" in said[0]
        assert "Partial" in said[0]
        assert "_StridedShard" in said[1]
    assert not reg.run("refused").checkpoints()


def test_a_sharded_training_resumes_bit_for_bit(reg: Registry, fleet: Fleet) -> None:
    straight = fleet.run(2, acts.trained, reg.url, "straight", 4)
    assert straight[0] == straight[1]
    first = fleet.run(2, acts.trained, reg.url, "resumed", 2)
    rest = fleet.run(2, acts.trained, reg.url, "resumed", 4)
    assert first[0] + rest[0] == straight[0]
    assert len(set(straight[0])) == 4


@pytest.mark.parametrize(("at", "what"), [(-6, "dies"), (6, "is late")])
def test_a_rank_in_trouble_breaks_nothing_and_the_retry_works(
    reg: Registry, fleet: Fleet, at: int, what: str
) -> None:
    """The sixth call is the first exchange: the others wait for bytes of that rank."""
    fleet.begin(3, acts.saved_in_trouble, reg.url, 1, 1, at, 3.0)
    found = fleet.end(3)
    assert (found[1] is None) == (what == "dies")
    left = [one for one in found if one is not None]
    assert [one[:2] for one in left] == [("RankFailed", 1)] * len(left)
    assert left[-1][2] == (2.0 if what == "dies" else 3.0), "the training's own group is broken"
    assert not reg.run("run").checkpoints()
    again = fleet.run(3, acts.saved, reg.url, "run", "fsdp", 1)
    assert len(set(again)) == 1


def test_an_inner_rank_that_is_killed_at_any_exchange_is_named_by_all(
    reg: Registry, fleet: Fleet
) -> None:
    """Rank 1 has a child in the tree, and rank 0 hears of rank 3 through rank 1 alone."""
    act, size = acts.saved_while_one_dies, 4
    whole = fleet.run(size, act, reg.url, 0, 1, 0, 40.0)
    exchanges = whole[0][1]
    assert whole == [("saved", exchanges)] * size
    assert exchanges > 1
    for victim, at in [(3, 1), (3, -1), *((1, at) for at in range(1, exchanges + 1))]:
        fleet.begin(size, act, reg.url, 1, victim, at, 3.0)
        found = fleet.end(size)
        assert found.pop(victim) is None
        assert found == [("RankFailed", victim)] * (size - 1), (victim, at)
    assert [one.step for one in reg.run("run").checkpoints()] == [0]
    assert fleet.run(size, act, reg.url, 1, 1, 0, 40.0) == whole


class Gone:
    """A store that ends between a wait and the next call, with the rank that has it."""

    def wait(self, keys: object, timeout: object) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("Connection reset by peer")


def alone(store: Any = None) -> TorchGroup:
    """Return the group of rank 0 of a job with some store."""
    group = object.__new__(TorchGroup)
    group.rank, group.deadline_s, group._place, group._own = 0, 60.0, "place", local()
    group._training, group._unanswered = store, None
    return group


def test_a_store_that_is_gone_is_silence() -> None:
    group = alone()
    group._own.store = Gone()
    group.send([0], "name", b"")
    group.forget("name")
    assert group.receive("name", [0], 1.0) == {}


class Stopped:
    """A store whose host is stopped until `goes_on`."""

    def __init__(self) -> None:
        self.goes_on, self.said = Event(), dict[str, bytes]()

    def set(self, key: str, data: bytes) -> None:
        assert self.goes_on.wait(300)
        self.said[key] = data


def test_a_store_that_was_silent_is_asked_again_once_it_answers() -> None:
    group, store = alone(), Stopped()
    group._own.store, group.deadline_s = store, 0.01
    group.send([0], "one", b"")
    assert group.receive("two", [0], 0.0) == {}  # it is not asked: `Stopped` cannot wait
    store.goes_on.set()
    assert group._unanswered is not None
    group._unanswered.result(60.0)
    group.deadline_s = 60.0
    group.send([0], "three", b"")
    assert [*store.said] == ["one/0", "three/0"]


def test_each_thread_has_its_own_connection_to_the_messages() -> None:
    """A wait holds up all other calls of its connection: a save in the background, a load."""
    group = alone(TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
    found: list[Any] = []
    group.send([0], "word", b"said")
    mine = group._own.store

    def receive() -> None:
        found.append(group.receive("word", [0], 60.0))
        found.append(group._own.store)

    other = Thread(target=receive)
    other.start()
    other.join()
    assert found[0] == {0: b"said"}
    assert found[1] is not mine
    assert group.receive("word", [0], 60.0) == {0: b"said"}
    assert group._own.store is mine


@pytest.mark.parametrize(
    "how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.soak)]
)
def test_ranks_leave_when_the_process_with_their_store_is_lost(
    reg: Registry, how: signal.Signals
) -> None:
    agent, hearing = start_telling(keeps_a_store)
    try:
        port = hearing.recv()
        ranks = []
        for rank in range(2):
            mine, theirs = servers().Pipe()
            ranks.append((start_process(saves_twice, rank, port, reg.url, theirs), mine))
            theirs.close()
        assert [pipe.recv() for _, pipe in ranks] == ["saved"] * 2
        os.kill(agent.pid, how)
        for _, pipe in ranks:
            pipe.send("go on")
        for process, pipe in ranks:
            assert pipe.poll(60)  # the store's own limit is longer
            assert pipe.recv() == "RankFailed"
            process.join(300)
            assert process.exitcode == 0
    finally:
        agent.kill()
    assert [one.step for one in reg.run("run").checkpoints()] == [1]


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_late_at_any_call(reg: Registry, fleet: Fleet, victim: int) -> None:
    """The others do not wait longer than the deadline, and the grace for rank 0."""
    right = fleet.run(2, acts.saved, reg.url, "run", "fsdp", 0)
    ends = Counter[str]()
    for step in range(1, 16):
        fleet.begin(2, acts.saved_in_trouble, reg.url, step, victim, step, 3.0)
        found = fleet.end(2)
        assert [one[2] for one in found] == [1.0, 1.0], "the training's own group is broken"
        kept = [one.step for one in reg.run("run").checkpoints()]
        named = [one[:2] for one in found]
        if named == [(right[0], -1)] * 2:
            ends["saved"] += 1
            assert step in kept
        else:
            ends["failed"] += 1
            assert named[1 - victim] == ("RankFailed", victim), (step, found)
            assert {one[0] for one in found} <= {"RankFailed", right[0]}
        assert fleet.run(2, acts.saved, reg.url, "run", "fsdp", step) == right
    print(ends)
    assert ends["failed"] > 5
    assert ends["saved"]  # the last calls are more than a save makes
    assert not reg.verify(deep=True).findings


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_kills_at_random_moments(reg: Registry, fleet: Fleet) -> None:
    dice = random.Random(0)
    right = fleet.run(4, acts.saved, reg.url, "run", "fsdp", 0)
    began = time.monotonic()
    fleet.run(4, acts.saved, reg.url, "run", "fsdp", 1)
    usual_s = time.monotonic() - began
    ends = Counter[str]()
    for step in range(2, 52):
        victim = dice.randrange(4)
        fleet.begin(4, acts.saved_in_trouble, reg.url, step, victim, -acts.NEVER, 10.0)
        time.sleep(dice.uniform(0, usual_s))  # the moment is random, nothing waits for it
        fleet.kill(victim)
        left = [one for n, one in enumerate(fleet.end(4)) if n != victim]
        kept = [one.step for one in reg.run("run").checkpoints()]
        if all(one[0] == right[0] for one in left):
            ends["saved"] += 1
            assert step in kept
        else:
            ends["failed"] += 1
            assert all(one[:2] == ("RankFailed", victim) for one in left), (victim, left)
        assert fleet.run(4, acts.saved, reg.url, "run", "fsdp", step) == right
    assert not reg.verify(deep=True).findings
    print(f"{ends}, a save takes {usual_s:.1f} s")
