"""Hydra's league: versions that only grow, ratings, anchors, and draws that anybody can repeat."""

from __future__ import annotations

from collections import Counter

import pytest

from holdfast import Run
from holdfast.registry.curation.pool.matches import PoolEvent, pool_events
from holdfast.registry.curation.pool.ratings import DEFAULT, Rating, rate
from holdfast.registry.errors import NotFound
from holdfast.registry.history.actions import AddCheckpoint, EvictEntries, Promote, RateMatch
from tests.support.sameness import assert_same
from tests.systems import hydra_life as acts
from tests.systems.hydra import SEED
from tests.systems.hydra_life import Hydra, Reader
from tests.systems.life import Life
from tests.systems.places import in_a_folder

pytestmark = pytest.mark.xdist_group("hydra")

KIB = 1024
SIZE, ANCHORS = 20, 2
#: Every save of phase 3, and a promotion by hand.
PROMOTED = acts.PLAYED + 1
#: A third of the uncertainty of a player of whom nothing is known.
THIRD = DEFAULT.sigma / 3


def test_versions_are_dense_and_every_save_promotes(read_hydra: Reader) -> None:
    run = read_hydra(acts.aftermath)
    entries = run.pool.entries()
    assert [one.version for one in entries] == [*range(1, ANCHORS + PROMOTED + 1)]
    assert [one.gate for one in entries[:ANCHORS]] == ["distill_best", "bc_best"]
    with_saves = 0
    for commit in run.history.commits():
        added = [a for a in commit.actions if isinstance(a, AddCheckpoint) and a.phase == "3"]
        promoted = [a for a in commit.actions if isinstance(a, Promote) and not a.frozen]
        with_saves += len(added)
        if added:
            assert [one.step for one in promoted] == [added[0].step]
    assert with_saves == acts.PLAYED > 30


def test_pool_keeps_20_beside_the_anchors(read_hydra: Reader) -> None:
    run = read_hydra(acts.aftermath)
    versions = [one.version for one in run.pool.roster()]
    last = ANCHORS + PROMOTED
    assert versions == [1, 2, *range(last - SIZE + 1, last + 1)]
    playing = 0
    for commit in run.history.commits():
        for action in commit.actions:
            playing += isinstance(action, Promote) and not action.frozen
            if isinstance(action, EvictEntries):
                assert any(isinstance(other, Promote) for other in commit.actions)
                playing -= len(action.versions)
        assert playing <= SIZE


@in_a_folder
def test_versions_are_not_used_again_after_reopening(
    hydra: Life[Hydra], read_hydra: Reader
) -> None:
    run_id = read_hydra(acts.aftermath).id
    with hydra.story.copies["phase 3"].open() as reg:
        run = reg.run(run_id)
        assert [one.version for one in run.pool.entries()] == [*range(1, ANCHORS + PROMOTED + 1)]
        entry = run.pool.promote(run.checkpoints(2)[7])
        assert entry.version == ANCHORS + PROMOTED + 1
        gone = run.pool.evictions()[0].version
        with pytest.raises(NotFound, match="oldest of more than 20"):
            run.pool.entry(gone)


def histories(run: Run) -> dict[int, list[PoolEvent]]:
    """Return what `run.pool.history` does, for all versions by one reading of the log."""
    found: dict[int, list[PoolEvent]] = {}
    for event in pool_events(run.history.commits()):
        found.setdefault(event.version, []).append(event)
    return found


def test_eviction_log_has_the_whole_rating_history(read_hydra: Reader) -> None:
    run = read_hydra(acts.aftermath)
    evictions, told = run.pool.evictions(), histories(run)
    assert [one.version for one in evictions] == [*range(3, 3 + PROMOTED - SIZE)]
    assert run.pool.history(3) == told[3]
    for evicted in evictions:
        history = told[evicted.version]
        assert [history[0].event, history[-1].event] == ["promoted", "evicted"]
        rated = history[1:-1]
        assert {one.event for one in rated} == {"rated"}
        assert len(rated) == evicted.games > 0
        assert [one.games for one in rated] == [*range(1, evicted.games + 1)]
        assert (rated[-1].mu, rated[-1].sigma) == (evicted.mu, evicted.sigma)
        assert evicted.wins == rated[-1].wins
        assert evicted.reason


def test_promotion_inherits_mu_and_widens_sigma(read_hydra: Reader) -> None:
    run = read_hydra(acts.aftermath)
    promoted = [events[0] for events in histories(run).values()]
    first, *_, last, by_hand = promoted[ANCHORS:]
    # Nothing is rated in phase 3 yet: the newest rating is that of phase 2.
    assert first.mu == acts.rating(acts.DISTILLED, acts.BEST_DISTILLED)["mu"]
    # At the last save the newest that has a rating is LAG + 1 saves older.
    newest = acts.rating(acts.PLAYED - acts.LAG - 1, acts.BEST_PLAYED)
    assert (last.mu, last.sigma) == (newest["mu"], max(newest["sigma"], THIRD))
    assert (by_hand.mu, by_hand.sigma) == (30.0, THIRD)
    # The training model was surer than that for a while, so that the widening was needed.
    assert min(acts.rating(n, acts.BEST_PLAYED)["sigma"] for n in range(1, 30)) < THIRD
    assert min(one.sigma for one in promoted) == THIRD


def test_entries_tell_what_their_sidecar_would(read_hydra: Reader) -> None:
    run = read_hydra(acts.aftermath)
    entry = run.pool.roster()[5]
    source = run.history.checkpoint(entry.checkpoint)
    number = (source.step - acts.first_step(run, 3)) // acts.PPO_EVERY + 1
    assert (entry.version, entry.step, entry.phase) == (ANCHORS + number, source.step, 3)
    assert entry.win_rate == entry.wins / entry.games
    assert entry.promoted.utcoffset().total_seconds() == 0
    assert entry.conservative == entry.mu - 3 * entry.sigma


def test_entries_are_weights_alone_and_store_none(hydra: Life[Hydra], read_hydra: Reader) -> None:
    run = read_hydra(acts.aftermath)
    entry = run.pool.roster()[-2]
    source = run.history.checkpoint(entry.checkpoint)
    assert list(entry.components) == ["model_record"]
    assert entry.components["model_record"] == source.components["model_record"]
    assert_same(entry.load()["model_record"], source.load(only="model_record")["model_record"])
    assert source.size_bytes > 4.5 * entry.size_bytes > 4.5 * 64 * KIB
    assert hydra.story.added["promotion"] < 64 * KIB


@in_a_folder
def test_entries_outlive_their_checkpoints(hydra: Life[Hydra], read_hydra: Reader) -> None:
    run_id = read_hydra(acts.aftermath).id
    with hydra.story.copies["phase 3"].copy().open() as reg:
        run = reg.run(run_id)
        entry = next(one for one in run.pool.roster() if not one.frozen)
        checkpoint = run.history.checkpoint(entry.checkpoint)
        weights = checkpoint.load(only="model_record")
        run.retention.evict(checkpoint, "its entry stays")
        assert reg.gc(grace_s=0).deleted
        assert_same(run.pool.entry(entry.version).load(), weights)
    with hydra.story.copies["phase 3"].open() as reg:
        for entry in reg.run(run_id).pool.roster():
            assert list(entry.load()) == ["model_record"]


def test_matches_are_rated_by_plackett_luce_and_once(read_hydra: Reader) -> None:
    run = read_hydra(acts.aftermath)
    before: dict[int, Rating] = {}
    matches = set()
    for commit in run.history.commits():
        for action in commit.actions:
            if isinstance(action, Promote):
                before[action.version] = Rating(action.mu, action.sigma)
            if isinstance(action, RateMatch):
                assert action.match not in matches
                matches.add(action.match)
                seats = [one.version for one in action.ratings]
                fixed = [seat for seat, one in enumerate(seats) if one <= ANCHORS]
                after = rate([before[one] for one in seats], range(len(seats)), fixed)
                assert [(one.mu, one.sigma) for one in action.ratings] == [
                    (one.mu, one.sigma) for one in after
                ]
                before.update(zip(seats, after, strict=True))
    assert len(matches) == acts.PLAYED - 1


def test_anchors_are_played_and_never_rated(read_hydra: Reader) -> None:
    run = read_hydra(acts.aftermath)
    events = histories(run)
    for anchor in run.pool.roster()[:ANCHORS]:
        assert anchor.frozen
        assert anchor.games > 0
        assert {(one.mu, one.sigma) for one in events[anchor.version]} == {(25.0, 25 / 3)}
        assert (
            anchor.components["model_record"]
            == run.pins.gates.get(anchor.gate).components["model_record"]
        )


@in_a_folder
def test_a_match_told_twice_counts_once(hydra: Life[Hydra], read_hydra: Reader) -> None:
    run_id = read_hydra(acts.aftermath).id
    with hydra.story.copies["phase 3"].open() as reg:
        run = reg.run(run_id)
        one, other = [entry.version for entry in run.pool.roster()[-2:]]

        def told() -> list[tuple[float, int]]:
            entries = run.pool.record_match([one, other], [2, 1], match="told twice")
            return [(e.mu, e.games) for e in entries]  # an entry follows the log: read it now

        assert told() == told()


def test_composition_is_50_30_20(read_hydra: Reader) -> None:
    run = read_hydra(acts.aftermath)
    games = 4000
    drawn = run.pool.draws(0, games)
    kinds = Counter(one.kind for one in drawn)
    for kind, share in (("self", 0.5), ("roster", 0.3), ("frozen", 0.2)):
        assert abs(kinds[kind] / games - share) < 0.03  # four standard deviations
    baseline = {one.version for one in drawn if one.kind == "frozen"}
    assert baseline == {one.version for one in run.pool.roster() if one.gate == "distill_best"}
    roster = Counter(one.version for one in drawn if one.kind == "roster")
    assert set(roster) == {one.version for one in run.pool.roster() if not one.frozen}
    assert max(roster.values()) < 2 * games * 0.3 / SIZE


def test_matchups_are_the_same_after_a_restart_elsewhere(
    hydra: Life[Hydra], read_hydra: Reader
) -> None:
    run, drawn = read_hydra(acts.aftermath), hydra.story.drawn
    with hydra.story.mirror.open() as reg:
        there = reg.run(run.id)
        assert there.pool.draws(0, 500) == drawn
        assert [there.pool.draw(game) for game in (400, 3)] == [drawn[400], drawn[3]]
        assert there.latest(3).digest == run.latest(3).digest
        assert_same(
            there.pool.load(there.pool.roster()[0].version)["model_record"],
            there.pins.gates.get("distill_best").load()["model_record"],
        )
        assert there.restore().checkpoint.step == run.latest(3).step
        assert reg.verify(deep=True).ok


@in_a_folder
def test_matchups_follow_the_pool_and_the_seed(hydra: Life[Hydra], read_hydra: Reader) -> None:
    run: Run = read_hydra(acts.aftermath)
    drawn = run.pool.draws(0, 200)
    assert run.manifest.created.seed == f"{SEED:016x}"
    with hydra.story.copies["phase 3"].copy().open() as reg:
        later = reg.run(run.id)
        later.pool.promote(later.checkpoints(2)[9])
        newer = later.pool.draws(0, 200)
        # A promotion moves the roster; who plays itself or the baseline stays.
        assert [one.kind for one in newer] == [one.kind for one in drawn]
        rosters = [[e.version for e in r.pool.roster() if not e.frozen] for r in (run, later)]
        places = [
            [roster.index(one.version) for one in matchups if one.kind == "roster"]
            for roster, matchups in zip(rosters, (drawn, newer), strict=True)
        ]
        assert places[0] == places[1]
        assert rosters[0] != rosters[1]


def test_five_models_stay_loaded(read_hydra: Reader) -> None:
    run = read_hydra(acts.aftermath)
    built: list[int] = []

    def load(version: int) -> None:
        def build(state: dict) -> dict:
            built.append(version)
            return state

        run.pool.load(version, build=build)

    versions = [one.version for one in run.pool.roster()]
    for version in (*versions[:5], versions[0], versions[5], versions[0], versions[1]):
        load(version)
    # The sixth replaced the second, which is loaded again; the first was used meanwhile.
    assert built == [*versions[:6], versions[1]]
