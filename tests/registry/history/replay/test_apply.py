"""Replay of the life of a run: evictions, pins, pool, streams, phases, followers, the end."""

from __future__ import annotations

import pytest

from holdfast.registry.errors import Malformed
from holdfast.registry.history.actions import (
    AddCheckpoint,
    AppendStream,
    AppliedRow,
    ArchiveStream,
    Claim,
    DropRun,
    EnterPhase,
    EvictEntries,
    HideRun,
    PointRelease,
    Promote,
    Rated,
    RateMatch,
    RemoveHold,
    SetHold,
    SetPin,
    SetStatus,
    Thin,
    Thinning,
)
from holdfast.registry.history.replay import RunManifest, advance
from holdfast.registry.history.replay.apply import MATCHES_KEPT
from holdfast.registry.spec import Phase, RunSpec
from holdfast.registry.spec.policies import Monitor
from tests.support.lives import DAY_MS, Life, digest

LOSS = Monitor(metric="loss", mode="min")


# Evictions


def test_an_evicted_checkpoint_is_known_and_nothing_else():
    life = Life().save(1).save(2).save(3).evict(3, reason="for room")
    run = life.manifest
    assert (run.by_n[3].evicted, run.by_n[3].is_live) == ("for room", False)
    assert [ck.n for ck in run.live()] == [1, 2]
    assert run.latest().n == 2
    assert run.by_n[3].manifest not in run.held


def test_a_recovered_one_is_what_it_was_and_stays_marked():
    run = Life().save(1).save(2).evict(1).recover(1).manifest
    assert (run.by_n[1].evicted, run.by_n[1].recovered, run.by_n[1].is_live) == (
        None,
        True,
        True,
    )
    assert Life().save(1).save(2).evict(1).recover(1).evict(1).manifest.by_n[1].recovered is False


def test_best_is_never_an_evicted_or_a_held_back_one():
    life = Life(RunSpec(monitors=(LOSS,)))
    life.save(1, metrics={"loss": 3.0}).save(2, metrics={"loss": 1.0})
    life.save(3, metrics={"loss": 0.5}, held_back=True)
    assert life.manifest.best(LOSS).n == 2
    assert life.evict(2).manifest.best(LOSS).n == 1


def test_where_phases_are_declared_best_is_of_the_one_that_training_is_in():
    life = Life(RunSpec(phases=(Phase(name="1"), Phase(name="2"))))
    life.save(1, "1", metrics={"loss": 1.0}).save(2, "2", metrics={"loss": 5.0})
    assert (life.manifest.best(LOSS).n, life.manifest.best(LOSS, "1").n) == (2, 1)
    assert Life().save(1, "1", metrics={"loss": 1.0}).save(2, "2").manifest.best(LOSS).n == 1


# Pins


def pin(kind: str, name: str, of: object, **fields) -> SetPin:
    return SetPin(kind=kind, name=name, manifest=digest(of), **fields)


def test_pins_hold_what_they_name_and_their_cards():
    life = Life().save(1).then(pin("artifact", "seeds", "a"))
    life.then(pin("release", "1.0.0", "r", card=digest("card"), checkpoint=1)).evict(1)
    held = life.manifest.holders()
    assert held == {
        digest("a"): ("artifacts/seeds",),
        digest("r"): ("releases/1.0.0",),
        digest("card"): ("releases/1.0.0/card",),
    }


def hold(n: int | None, until_ms: int = 5) -> SetHold:
    return SetHold(checkpoint=n, until_ms=until_ms, reason="an audit")


def thin(n: int) -> Thin:
    return Thin(thinnings=(Thinning(checkpoint=n, keep=("model",), reason="r"),))


def test_a_hold_stays_until_it_is_removed_also_when_its_checkpoint_is_superseded():
    life = Life().save(1).save(2).then(hold(2)).then(hold(None)).then(hold(2, 7))
    assert [(one.checkpoint, one.until_ms) for one in life.manifest.holds] == [(None, 5), (2, 7)]
    assert life.rewind(1).manifest.by_n[2].superseded
    assert life.manifest.hold(2).until_ms == 7
    assert life.then(RemoveHold()).then(RemoveHold(checkpoint=2)).manifest.holds is None
    assert life.evict(2).manifest.by_n[2].evicted


def test_the_latest_release_is_the_last_or_the_one_pointed_at():
    life = Life().then(pin("release", "1.0.0", 1)).then(pin("release", "1.1.0", 2))
    assert life.manifest.release == "1.1.0"
    assert life.then(PointRelease(version="1.0.0", reason="worse")).manifest.release == "1.0.0"


def test_a_gate_may_replace_the_damaged_one_that_it_names():
    life = Life().save(1).save(2).gate(1)
    life.then(pin("gate", "g", 2, checkpoint=2, replaces=digest(1)))
    found = life.manifest.pin("gate", "g")
    assert (found.checkpoint, found.replaced) == (2, (digest(1),))


# Pool


def promote(version: int, **fields) -> Promote:
    base = {"manifest": digest(f"v{version}"), "phase": "2", "step": 1, "mu": 25.0, "sigma": 8.0}
    return Promote(version=version, **(base | fields))


def test_entries_play_until_they_go_and_their_numbers_never_come_back():
    life = Life().then(promote(1), promote(2)).then(EvictEntries(versions=(1,), reason="oldest"))
    assert [entry.version for entry in life.manifest.roster()] == [2]
    assert (life.manifest.pool[0].evicted, life.manifest.next_version) == ("oldest", 3)
    assert set(life.manifest.held) == {digest("v2")}


def test_a_match_adds_games_and_moves_ratings():
    life = (
        Life()
        .then(promote(1))
        .then(
            RateMatch(match="a", ratings=(Rated(version=1, mu=26.0, sigma=7.0, games=4, wins=3),))
        )
    )
    life.then(
        RateMatch(match="b", ratings=(Rated(version=1, mu=27.0, sigma=6.0, games=1, wins=0),))
    )
    (entry,) = life.manifest.pool
    assert (entry.mu, entry.sigma, entry.games, entry.wins) == (27.0, 6.0, 5, 3)
    assert life.manifest.matches == ("a", "b")


def test_the_newest_matches_are_remembered():
    life = Life().then(promote(1))
    one = Rated(version=1, mu=25.0, sigma=8.0, games=1, wins=0)
    life.then(*(RateMatch(match=f"m{i}", ratings=(one,)) for i in range(MATCHES_KEPT + 3)))
    assert life.manifest.matches == tuple(f"m{i}" for i in range(3, MATCHES_KEPT + 3))


def test_a_frozen_entry_plays_and_is_not_rated():
    life = Life().then(promote(1, frozen=True))
    life.then(
        RateMatch(match="a", ratings=(Rated(version=1, mu=25.0, sigma=8.0, games=1, wins=1),))
    )
    assert life.manifest.pool[0].wins == 1


# Streams


def append(start: int, count: int, name: str = "s", lifetime: str = "resettable") -> AppendStream:
    return AppendStream(
        stream=name,
        lifetime=lifetime,
        manifest=digest((name, start, count)),
        start=start,
        count=count,
        first_step=start,
        last_step=start + count - 1,
    )


def spans(run: RunManifest, name: str = "s") -> list[tuple[int, int]]:
    return [(segment.start, segment.count) for segment in run.stream(name).segments]


def test_segments_follow_or_replace_what_stood_from_their_start_on():
    life = Life().then(append(0, 4)).then(append(4, 1))
    assert (spans(life.manifest), life.manifest.stream("s").count) == ([(0, 4), (4, 1)], 5)
    assert spans(life.then(append(4, 3)).manifest) == [(0, 4), (4, 3)]
    assert spans(life.then(append(2, 6)).manifest) == [(0, 2), (2, 6)]


def test_a_rewind_takes_streams_back_to_their_length_at_the_checkpoint():
    life = Life().then(append(0, 4)).save(1).then(append(4, 2)).save(2).rewind(3 - 1)
    assert spans(life.manifest) == [(0, 4)]
    assert spans(life.then(append(4, 1)).manifest) == [(0, 4), (4, 1)]
    assert spans(life.rewind(None).manifest) == []


def test_an_archive_keeps_what_was_there_and_holds_it():
    life = Life().then(append(0, 4)).then(ArchiveStream(stream="s", label="before"))
    assert (spans(life.manifest), digest(("s", 0, 4)) in life.manifest.held) == ([], True)
    assert life.then(append(0, 2)).manifest.stream("s").count == 2
    archive = life.manifest.stream("s").archive("before")
    assert [segment.count for segment in archive.segments] == [4]


# Phases


def enter(to: str = "2", **fields) -> EnterPhase:
    base = {"from_phase": "1", "to_phase": to, "source": "gates/g", "manifest": digest(1)}
    return EnterPhase(**(base | fields))


def test_a_phase_that_was_entered_holds_its_companions_until_training_goes_back():
    rows = (AppliedRow(part="model", change="freeze"),)
    life = Life().save(1, "1").then(enter(companions={"ref": digest("c")}, rows=rows))
    run = life.manifest
    assert (run.phase, run.entered("2").rows, run.entered("1")) == ("2", rows, None)
    assert digest("c") in run.held
    back = life.rewind(1).manifest
    assert (back.phase, back.entered("2"), digest("c") in back.held) == ("1", None, False)


# Followers


def test_a_claim_is_taken_over_and_ends_with_the_work():
    life = Life().save(1).save(2).claim(1, 9 * DAY_MS).claim(2, 9 * DAY_MS)
    life.then(Claim(group="evals", checkpoint=1, follower="other", until_ms=10 * DAY_MS))
    group = life.manifest.group("evals")
    assert [(c.checkpoint, c.follower) for c in group.claims] == [(2, "f"), (1, "other")]
    group = life.acknowledge(1).manifest.group("evals")
    assert (group.done, [c.checkpoint for c in group.claims]) == ((1,), [2])
    assert life.manifest.group("nobody").done == ()


# The end


def test_a_dropped_run_holds_and_finds_nothing():
    life = Life().save(1).gate(1).then(append(0, 1)).then(DropRun(reason="over"))
    run = life.manifest
    assert (run.dropped, run.held, run.holders()) == ("over", frozenset(), {})
    assert (run.latest(), run.live()) == (None, [])


# What makes a history illegal

ILLEGAL = {
    "evicted twice": (
        lambda: Life().save(1).save(2).evict(1).evict(1),
        "checkpoint 1 is evicted twice",
    ),
    "evicted twice at once": (lambda: Life().save(1).evict(1, 1), "checkpoint 1 is evicted twice"),
    "a gate evicted": (lambda: Life().save(1).gate(1).evict(1), "checkpoint 1 is evicted, a pin"),
    "a tagged one evicted": (
        lambda: Life().save(1).tag(1).evict(1),
        "checkpoint 1 is evicted, a pin",
    ),
    "nothing evicted": (
        lambda: Life().save(1).evict(7),
        "checkpoint of commit 7, which added none",
    ),
    "recovered and not evicted": (lambda: Life().save(1).recover(1), "checkpoint 1 is not evicted"),
    "a tag on what is gone": (
        lambda: Life().save(1).evict(1).tag(1),
        "a tag names checkpoint 1, evicted",
    ),
    "a gate set twice": (lambda: Life().save(1).save(2).gate(1).gate(2), "gates/g is set twice"),
    "a gate that replaces another one": (
        lambda: (
            Life()
            .save(1)
            .save(2)
            .gate(1)
            .then(pin("gate", "g", 2, checkpoint=2, replaces=digest(2)))
        ),
        "gates/g is set twice",
    ),
    "a gate that is no checkpoint": (
        lambda: Life().save(1).then(pin("gate", "g", 1)),
        "gate g is no checkpoint",
    ),
    "a gate of another state": (
        lambda: Life().save(1).then(pin("gate", "g", 9, checkpoint=1)),
        "gate g is no checkpoint",
    ),
    "an artifact twice": (
        lambda: Life().then(pin("artifact", "a", 1)).then(pin("artifact", "a", 1)),
        "artifacts/a is set twice",
    ),
    "an artifact replaced": (
        lambda: (
            Life().then(pin("artifact", "a", 1)).then(pin("artifact", "a", 2, replaces=digest(1)))
        ),
        "artifacts/a is set twice",
    ),
    "a release of no checkpoint": (
        lambda: Life().then(pin("release", "1.0.0", 1, checkpoint=5)),
        "checkpoint of commit 5, which added none",
    ),
    "a rollback to nothing": (
        lambda: Life().then(PointRelease(version="1.0.0")),
        "no release 1.0.0",
    ),
    "a held checkpoint evicted": (
        lambda: Life().save(1).then(hold(1)).evict(1),
        "checkpoint 1 is evicted, held",
    ),
    "a checkpoint of a held run thinned": (
        lambda: Life().save(1).then(hold(None)).then(thin(1)),
        "checkpoint 1 is thinned, held",
    ),
    "a run dropped while a checkpoint is held": (
        lambda: Life().save(1).then(hold(1)).then(HideRun(reason="r")),
        "the run is dropped, held",
    ),
    "a run dropped for good while it is held": (
        lambda: Life().then(hold(None)).then(DropRun(reason="r")),
        "the run is dropped, held",
    ),
    "an entry of a held run evicted": (
        lambda: Life().then(hold(None), promote(1), EvictEntries(versions=(1,), reason="r")),
        "an entry of the pool is evicted, the run held",
    ),
    "a hold on what is evicted": (
        lambda: Life().save(1).evict(1).then(hold(1)),
        "checkpoint 1 is held, evicted",
    ),
    "a hold on nothing": (
        lambda: Life().then(hold(1)),
        "checkpoint of commit 1, which added none",
    ),
    "a hold made shorter": (
        lambda: Life().save(1).then(hold(1, 5)).then(hold(1, 4)),
        "a hold is made shorter",
    ),
    "the end of no hold": (
        lambda: Life().save(1).then(hold(1)).then(RemoveHold()),
        "there is no such hold to remove",
    ),
    "a version again": (lambda: Life().then(promote(2)).then(promote(2)), "pool version 2 again"),
    "an older version": (lambda: Life().then(promote(2)).then(promote(1)), "pool version 1 again"),
    "a match twice": (
        lambda: Life().then(
            promote(1),
            *[RateMatch(match="a", ratings=(Rated(version=1, mu=1.0, sigma=1.0, games=1, wins=0),))]
            * 2,
        ),
        "match a is recorded twice",
    ),
    "a rating of nothing": (
        lambda: Life().then(
            RateMatch(match="a", ratings=(Rated(version=1, mu=1.0, sigma=1.0, games=1, wins=0),))
        ),
        "pool version 1 does not exist",
    ),
    "a frozen entry rated": (
        lambda: (
            Life()
            .then(promote(1, frozen=True))
            .then(
                RateMatch(
                    match="a", ratings=(Rated(version=1, mu=1.0, sigma=8.0, games=1, wins=0),)
                )
            )
        ),
        "pool version 1 is frozen",
    ),
    "a frozen entry evicted": (
        lambda: Life().then(promote(1, frozen=True)).then(EvictEntries(versions=(1,), reason="")),
        "pool version 1 is frozen",
    ),
    "an entry evicted twice": (
        lambda: Life().then(promote(1), *[EvictEntries(versions=(1,), reason="")] * 2),
        "pool version 1 is evicted twice",
    ),
    "a segment behind the end": (
        lambda: Life().then(append(0, 2)).then(append(3, 1)),
        "entries 3 to 4",
    ),
    "a segment that takes entries away": (
        lambda: Life().then(append(0, 5)).then(append(1, 2)),
        "entries 1 to 3 of stream s, which has 5",
    ),
    "another lifetime": (
        lambda: Life().then(append(0, 1)).then(append(1, 1, lifetime="forever")),
        "stream s is resettable already",
    ),
    "what is kept for ever archived": (
        lambda: (
            Life().then(append(0, 1, lifetime="forever")).then(ArchiveStream(stream="s", label="a"))
        ),
        "stream s is kept for ever",
    ),
    "an archive twice": (
        lambda: Life().then(append(0, 1), *[ArchiveStream(stream="s", label="a")] * 2),
        "archive a exists already",
    ),
    "an archive of nothing": (
        lambda: Life().then(ArchiveStream(stream="s", label="a")),
        "no stream s",
    ),
    "a claim on nothing": (lambda: Life().claim(3, 1), "checkpoint of commit 3, which added none"),
    "work done on nothing": (lambda: Life().acknowledge(3), "checkpoint of commit 3"),
    "a word after the end": (
        lambda: Life().then(DropRun(reason="over")).then(SetStatus(status="failed")),
        "a commit after the run was dropped",
    ),
}


@pytest.mark.parametrize(("live", "rule"), ILLEGAL.values(), ids=ILLEGAL.keys())
def test_each_rule_of_a_life_is_checked(live, rule):
    with pytest.raises(Malformed, match=rf"r: slot \d.*the history is not legal.*{rule}"):
        live()


# However it is read


def whole_life() -> Life:
    life = Life(RunSpec(monitors=(LOSS,))).then(append(0, 3)).save(1, metrics={"loss": 1.0})
    life.gate(2, "done").tag(2).then(pin("artifact", "a", "a")).then(pin("release", "1.0.0", "r"))
    life.then(promote(1), promote(2, frozen=True)).then(EvictEntries(versions=(1,), reason="old"))
    life.save(2, companions={"c": digest("c")}).then(append(3, 2)).save(3).evict(9).recover(9)
    life.then(ArchiveStream(stream="s", label="x")).claim(9, 1).acknowledge(9).then(enter())
    return (
        life.rewind(9)
        .then(RateMatch(match="m", ratings=(Rated(version=1, mu=1.0, sigma=1.0, games=1, wins=0),)))
        .then(DropRun(reason="over"))
    )


@pytest.mark.parametrize("cut", range(0, 20, 3))
def test_at_once_or_by_a_snapshot_it_is_the_same(cut):
    life = whole_life()
    begun = advance(RunManifest(run_id="r"), life.slots[:cut])
    snapshot = RunManifest.decode(begun.encode(), where="x")
    assert snapshot == begun
    assert advance(snapshot, life.slots[cut:]) == life.manifest
    assert advance(snapshot, life.slots[cut:]).encode() == life.manifest.encode()


def test_a_checkpoint_is_added_with_all_that_is_said_of_it():
    action = AddCheckpoint(
        manifest=digest("m"),
        phase="p",
        step=7,
        size_bytes=1,
        tier="t",
        companions={"c": digest("c")},
        nonfinite=("w",),
        held_back=True,
    )
    record = Life().then(append(0, 3)).then(action).manifest.by_n[2]
    assert (record.tier, record.companions, record.nonfinite, record.held_back) == (
        "t",
        {"c": digest("c")},
        ("w",),
        True,
    )
    assert record.streams["s"].count == 3
