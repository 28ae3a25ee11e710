"""Collective saves, interleaved call by call: with deaths, late ranks, evictions, collections.

After every step each checkpoint is whole. In the end every rank that is left has the checkpoint, or
an error that names the rank in trouble; none says that nothing was committed while something is;
and a retry succeeds, and puts nothing that is there already.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from holdfast.registry.saving.collective.talk import Talk
from holdfast.registry.writing.object_writer import ObjectWriter
from tests.registry.saving.collective.rows import shard_rows
from tests.schedules.broken_collective import BROKEN, without
from tests.schedules.collective import COLLECTIVE
from tests.schedules.explore import Explorer
from tests.schedules.scenario import Stage
from tests.schedules.soundness import Violation
from tests.schedules.store import Fate

GONE = "holds what needs .* is gone"
#: In every run of the tests: the preemptions, and schedules below which something is not
#: interleaved any more. The others by a soak.
QUICK = {
    "a rank dies or is late": (2, 1_000),
    "one of three dies or is late": (2, 400_000),
    "rank 0 misses a save": (2, 100),
    "rank 1 misses two saves": (2, 40),
}
#: The rare places that some plays are for.
_DEATH = (
    "a rank finds no commit of a lost rank 0",
    "a rank finds the commit of a lost rank 0",
    "a rank looks into the log for the outcome",
    "a rank loses its connections",
    "a rank says nothing",
    "only connections are lost",
    "rank 0 loses its connections",
    "rank 0 says nothing",
)
PLACES = {
    "a rank dies or is late": _DEATH,
    "one of three dies or is late": _DEATH,
    "rank 0 misses a save": ("the ranks are out of step",),
    "rank 1 misses two saves": (
        "a rank has missed a call and makes the next",
        "the ranks are out of step",
    ),
}
#: Plays with a collection: one preemption in a soak, and every fate of deletes; the others three.
SWEPT = {name for name, make in COLLECTIVE.items() if "gc" in make().programs}
#: Where each rule is found broken: the play, preemptions, what becomes of deletes, what is told.
FOUND: dict[str, tuple[str, int, Fate, str]] = {
    "marks_ignored": ("a collection", 1, "now", GONE),
    "only_own_names_checked": ("something alike", 1, "now", GONE),
    "sweeps_after_the_ranks": ("copies and a collection", 1, "now", GONE),
    "epoch_observed_early": ("a new run and a collection", 1, "late", GONE),
    "rechecked_once": ("a collection", 1, "now", GONE),
    "old_replay_believed": ("the run of the evicted", 1, "now", GONE),
    "reported_before_it_is_put": ("a rank dies or is late", 1, "now", GONE),
    "generations_ignored": ("a collection", 0, "twice", GONE),
    "attempts_mixed": ("two attempts", 1, "now", "something else than was saved"),
    "failed_because_absent": ("a rank dies or is late", 1, "now", "that nothing was committed"),
    "puts_deleted_after_a_failure": ("another run adopts a pack", 1, "now", GONE),
}


@pytest.fixture(autouse=True)
def _rows(monkeypatch: pytest.MonkeyPatch) -> None:
    shard_rows(monkeypatch)


def _at_places(names: Iterable[str]) -> list[Any]:
    """Return plays for a test, which is to be at their places."""
    return [pytest.param(one, marks=pytest.mark.sometimes(*PLACES.get(one, ()))) for one in names]


@pytest.mark.parametrize("name", _at_places(QUICK))
def test_all_schedules_with_few_preemptions(name: str) -> None:
    preemptions, least = QUICK[name]
    tally = Explorer(Stage(COLLECTIVE[name]())).exhaust(preemptions)
    print(f"{name}: at most {preemptions} preemptions: {tally}")
    assert tally.schedules > least


#: They take long to find, or are found like others.
SLOW = {"epoch_observed_early", "old_replay_believed", "generations_ignored", "rechecked_once"}


@pytest.mark.parametrize(
    "rule", [pytest.param(one, marks=[pytest.mark.soak] if one in SLOW else []) for one in BROKEN]
)
def test_a_broken_rule_is_caught(rule: str) -> None:
    name, preemptions, fate, message = FOUND[rule]
    stages = [Stage(COLLECTIVE[name]()) for _ in range(2)]
    with without(rule):
        with pytest.raises(Violation, match=message) as caught:
            Explorer(stages[0]).exhaust(preemptions, fate)
        # The schedule that is told leads there again, in an explorer that remembers nothing.
        with pytest.raises(Violation, match=message):
            Explorer(stages[1]).replay(caught.value.moves)
    print(f"{rule}: {caught.value}")


def test_a_retry_that_sends_packs_again_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    explorer = Explorer(Stage(COLLECTIVE["a rank dies or is late"]()))
    monkeypatch.setattr(ObjectWriter, "usable", lambda *_: None)
    with pytest.raises(Violation, match="the retry has sent packs that were there"):
        explorer.exhaust(0)


def test_ranks_that_wait_for_what_never_comes_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    explorers = [Explorer(Stage(COLLECTIVE["copies and a collection"]())) for _ in range(2)]
    order = Talk.order

    def order_all_but_the_end(self: Talk, header: dict[str, Any], *columns: bytes) -> None:
        if header.get("kind") != "outcome":
            order(self, header, *columns)

    monkeypatch.setattr(Talk, "order", order_all_but_the_end)
    with pytest.raises(Violation, match="rank1 waits for a rank that has ended"):
        explorers[0].exhaust(0)
    monkeypatch.setattr(Talk, "report", lambda *_: None)
    with pytest.raises(Violation, match="all ranks wait for each other"):
        explorers[1].exhaust(0)


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize("name", _at_places(COLLECTIVE))
def test_soak_all_schedules_with_few_preemptions(name: str) -> None:
    explorer = Explorer(Stage(COLLECTIVE[name]()))
    fates: tuple[Fate, ...] = ("now", "late", "twice") if name in SWEPT else ("now",)
    for fate in fates:
        tally = explorer.exhaust(1 if name in SWEPT else 3, fate)
        print(f"{name}, deletes {fate}: {tally}", flush=True)


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize("name", COLLECTIVE)
def test_soak_schedules_at_random(name: str) -> None:
    explorer = Explorer(Stage(COLLECTIVE[name]()))
    lengths = [len(explorer.wander(seed).moves) for seed in range(2_000)]
    print(f"{name}: {len(lengths)} schedules at random, of {max(lengths)} steps at most")
    assert max(lengths) > 35  # a rank may die at once, and then the others end soon
