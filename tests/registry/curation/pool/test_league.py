"""The opponent pool as its users hold it: who enters, leaves, is found, drawn and loaded."""

from __future__ import annotations

import threading
import uuid
from datetime import UTC, datetime

import numpy as np
import pytest
import torch

from holdfast import Retention, sync
from holdfast.backends.wrappers import Metered
from holdfast.registry.curation.pool.matches import PoolEvent
from holdfast.registry.errors import (
    Conflict,
    Damaged,
    IncompatibleState,
    InvalidInput,
    NotFound,
)
from holdfast.registry.spec import Pool, RunSpec
from tests.registry.curation.pool.league import LEAGUE, LEAST, MU, SIGMA, league, player, playing
from tests.support.faults import Hooked, flip
from tests.support.states import same
from tests.support.stores import contents, new_backend, objects

# Letting models in


def test_an_entry_is_the_model_alone_under_the_next_version(run, reg, save):
    first, second = save(1), save(2)
    entries = [run.pool.promote(first), run.pool.promote(second)]
    assert [entry.version for entry in entries] == [1, 2]
    assert [entry.ref for entry in entries] == ["run/pool/v0001", "run/pool/v0002"]
    assert same(entries[1].load(), {"model": player(2)["model"]})
    assert entries[1].components == {"model": second.components["model"]}
    assert (entries[1].phase, entries[1].step) == (3, 2)
    assert entries[1].checkpoint == second.handle.n
    assert abs((entries[1].promoted - datetime.now(UTC)).total_seconds()) < 600
    assert reg.verify(deep=True).findings == ()


def test_a_promotion_stores_no_weights_again(backend, open_registry):
    metered = Metered(backend, calls := [])
    run = open_registry(metered).create_run("run", preset=LEAGUE)
    weights = np.random.default_rng(1).random(2**20).astype(np.float32)
    run.save({"model": {"w": weights}, "optimizer": {"m": weights * 2}}, step=1, phase=3)
    checkpoint = run.latest()
    calls.clear()
    with metered.measure() as usage:
        entry = run.pool.promote(checkpoint)
    assert usage.written_bytes < 65536
    assert not [call for call in calls if call.key.startswith("packs/")]
    assert entry.size_bytes == weights.nbytes
    assert entry.load()["model"]["w"].tobytes() == weights.tobytes()


def test_without_a_specification_the_whole_state_plays_and_only_a_slot_is_written(
    backend, open_registry
):
    metered = Metered(backend, calls := [])
    run = open_registry(metered).create_run("run")
    checkpoint = run.save(player(1), step=1)
    calls.clear()
    entry = run.pool.promote(checkpoint)
    assert entry.digest == checkpoint.digest
    puts = [call.key for call in calls if call.method.startswith("put")]
    assert puts == ["runs/run/log/00000000000000000002"]


def test_a_checkpoint_that_plays_is_returned_as_it_is(run, save, backend):
    checkpoint = save(1)
    first = run.pool.promote(checkpoint, mu=30.0, sigma=5.0)
    before = contents(backend)
    again = run.pool.promote(checkpoint, mu=10.0, sigma=1.0)
    assert (again.version, again.mu, again.sigma) == (first.version, 30.0, 5.0)
    assert contents(backend) == before


def test_a_promotion_repeated_after_its_checkpoint_was_evicted_finds_the_entry(run, save):
    checkpoint = save(1)
    entry = run.pool.promote(checkpoint)
    save(2)
    run.retention.prune(Retention(last=1))
    assert checkpoint.handle.newest_record().evicted
    assert run.pool.promote(checkpoint).version == entry.version


def test_the_same_model_saved_again_after_going_back_enters_once(run, save):
    save(1)
    entry = run.pool.promote(save(2))
    run.restore(at=run.checkpoints()[0])
    again = save(2)
    assert again.handle.n != entry.checkpoint
    assert run.pool.promote(again).version == entry.version
    assert playing(run) == [1]


def test_an_evicted_checkpoint_does_not_enter_and_nothing_is_written(run, save, backend):
    checkpoint = save(1)
    save(2)
    run.retention.prune(Retention(last=1))
    before = contents(backend)
    with pytest.raises(Conflict, match="checkpoint was evicted"):
        run.pool.promote(checkpoint)
    assert contents(backend) == before


def test_a_dropped_run_has_a_closed_pool(run, save):
    checkpoint = save(1)
    run.pool.promote(checkpoint)
    run.retention.drop("gone")
    with pytest.raises(Conflict, match="dropped"):
        run.pool.promote(checkpoint, frozen=True)
    with pytest.raises(Conflict, match="dropped"):
        run.pool.record_match([None, 1], [1, 2])


def test_weights_that_are_not_finite_do_not_play_unless_they_were_let_through(reg):
    spec = LEAGUE.changed(finite=("model/*",))
    run = reg.create_run("run", preset=spec)
    state = {"model": {"w": np.array([1.0, np.nan], dtype=np.float32)}}
    with pytest.raises(InvalidInput, match="NaN"):
        run.pool.promote(run.save(state, step=1, phase=3))
    allowed = run.save({**state, "x": 1}, step=2, phase=3, allow_nonfinite=True)
    assert run.pool.promote(allowed).version == 1


def test_a_state_without_what_inference_needs_does_not_play(run, backend):
    checkpoint = run.save({"optimizer": {"lr": 0.1}}, step=1, phase=3)
    before = contents(backend)
    with pytest.raises(IncompatibleState, match=r"model \| net"):
        run.pool.promote(checkpoint)
    assert contents(backend) == before


def test_the_first_alternative_that_is_there_is_cut(run):
    entry = run.pool.promote(run.save({"net": {"w": 1}, "x": 2}, step=1, phase=3))
    assert entry.load() == {"net": {"w": 1}}


def test_only_checkpoints_of_this_very_run_enter(run, reg, save, open_registry):
    save(1)
    elsewhere = open_registry(new_backend()).create_run("run", preset=LEAGUE)
    for step in (1, 2, 3):
        elsewhere.save(player(step + 100), step=step, phase=3)
    strangers = [
        reg.create_run("other", preset=LEAGUE).save(player(1), step=1, phase=3),
        *elsewhere.checkpoints(),
        run.pool.promote(run.latest()),
        "run/latest",
    ]
    for stranger in strangers:
        with pytest.raises(InvalidInput, match="own run"):
            run.pool.promote(stranger)
    assert playing(run) == [1]


def test_numbers_that_are_no_rating_are_refused_before_anything_is_asked(run, save):
    checkpoint = save(1)
    for wrong in ({"mu": float("nan")}, {"sigma": 0.0}, {"sigma": -1.0}, {"mu": "x"}):
        with pytest.raises(InvalidInput):
            run.pool.promote(checkpoint, **wrong)
        with pytest.raises(InvalidInput):
            run.pool.promote_gate("first", **wrong)
    assert playing(run) == []


def test_an_entry_inherits_the_rating_with_its_uncertainty_raised(run, save):
    rated = save(1, metrics={"mu": 31.0, "sigma": 1.5})
    unrated = save(2)
    assert (run.pool.promote(rated).mu, run.pool.promote(rated).sigma) == (31.0, LEAST)
    entry = run.pool.promote(unrated)
    assert (entry.mu, entry.sigma) == (31.0, LEAST)
    assert entry.conservative == 31.0 - 3 * LEAST
    third = save(3)
    assert (run.pool.promote(third, mu=12.0).mu, run.pool.entry(3).sigma) == (12.0, LEAST)
    assert run.pool.promote(save(4), sigma=7.5).sigma == 7.5


def test_before_any_rating_an_entry_has_the_default_and_no_win_rate(run, save):
    entry = run.pool.promote(save(1))
    assert (entry.mu, entry.sigma) == (MU, SIGMA)
    assert (entry.games, entry.wins, entry.win_rate) == (0, 0, None)


def test_a_frozen_entry_keeps_the_uncertainty_of_its_own_rating(run, save):
    rated = save(1, phase=1, metrics={"mu": 28.0, "sigma": 0.9})
    newer = save(2, metrics={"mu": 40.0, "sigma": 1.0})
    anchor = run.pool.promote(rated, frozen=True)
    assert (anchor.mu, anchor.sigma, anchor.frozen, anchor.gate) == (28.0, 0.9, True, None)
    assert run.pool.promote(newer, frozen=True, mu=1.0, sigma=0.5).sigma == 0.5


def test_a_frozen_entry_without_a_rating_of_its_own_does_not_take_the_trainers(run, save):
    old = save(1, phase=1)
    save(2, metrics={"mu": 40.0, "sigma": 1.0})
    assert run.pool.promote(old, frozen=True).mu == MU
    assert run.pool.promote(old).mu == 40.0


# Gates


def test_a_gate_enters_frozen_under_its_name(run, save):
    run.pins.gates.set("first", save(1, phase=1))
    run.pins.gates.set("second", save(2, phase=2))
    entries = [
        run.pool.promote_gate("second"),
        run.pool.promote(run.pins.gates.get("first"), frozen=True),
    ]
    assert [(entry.gate, entry.frozen, entry.step) for entry in entries] == [
        ("second", True, 2),
        ("first", True, 1),
    ]
    assert run.pool.promote_gate("first").version == 2
    assert run.pool.promote(run.pins.gates.get("second"), frozen=True).version == 1


def test_a_gate_that_is_promoted_as_any_checkpoint_is_no_anchor(run, save):
    run.pins.gates.set("first", save(1, phase=1))
    entry = run.pool.promote(run.pins.gates.get("first"))
    assert (entry.gate, entry.frozen) == (None, False)
    assert run.pool.promote_gate("first").version == 2


def test_a_gate_that_is_not_set_is_told_with_near_names(run, save):
    run.pins.gates.set("second", save(1, phase=2))
    with pytest.raises(NotFound, match="second"):
        run.pool.promote_gate("secnd")


def test_a_gate_that_was_replaced_enters_anew_and_is_the_one_that_is_drawn(
    run, save, backend, open_registry
):
    bad, good = save(1, phase=2), save(2, phase=2)
    run.pins.gates.set("second", bad)
    run.pool.promote_gate("second")
    pack = next(str(p.key) for p in run.pool.entry(1).handle.reader.placement.packs)
    flip(backend, pack)
    run.pins.gates.set("second", good)
    assert run.pool.promote_gate("second").version == 2
    assert {m.version for m in run.pool.draws(0, 100) if m.kind == "frozen"} == {2}


# First in, first out


def test_the_oldest_that_is_not_frozen_leaves_in_the_promotions_own_commit(run, save):
    run.pins.gates.set("first", save(1, phase=1))
    run.pool.promote_gate("first")
    for step in (2, 3, 4):
        run.pool.promote(save(step))
    assert playing(run) == [1, 2, 3, 4]
    run.pool.promote(save(5))
    assert playing(run) == [1, 3, 4, 5]
    *_, last = run.history.commits()
    assert [action.action for action in last.actions] == ["pool.promote", "pool.evict"]
    run.pool.promote(save(6))
    assert playing(run) == [1, 4, 5, 6]


def test_a_frozen_entry_makes_nobody_leave(run, save):
    run.pins.gates.set("first", save(1, phase=1))
    for step in (2, 3, 4):
        run.pool.promote(save(step))
    run.pool.promote_gate("first")
    assert playing(run) == [1, 2, 3, 4]


def test_a_version_is_never_given_again(run, save, backend, open_registry):
    for step in range(1, 6):
        run.pool.promote(save(step))
    assert playing(run) == [3, 4, 5]
    again = open_registry(backend).run("run")
    entry = again.pool.promote(again.history.checkpoint(run.checkpoints()[0].handle.n))
    assert entry.version == 6
    assert [entry.version for entry in again.pool.entries()] == [1, 2, 3, 4, 5, 6]


def test_saves_of_a_phase_that_promotes_enter_by_themselves(reg):
    run = reg.create_run("run", preset=league(promote_on_save=True))
    for step in range(1, 6):
        saved = run.save(player(step), step=step, phase=3, metrics={"mu": 20.0 + step, "sigma": 3})
    assert [(entry.version, entry.mu) for entry in run.pool.roster()] == [
        *((3, 23.0), (4, 24.0), (5, 25.0))
    ]
    assert run.pool.promote(saved).version == 5


# Finding


def test_an_entry_is_found_by_version_and_by_ref(run, reg, save):
    entry = run.pool.promote(save(1))
    assert run.pool.entry(1).digest == entry.digest
    assert reg.stored("run/pool/v0001").digest == entry.digest
    assert reg.stored("run/pool/v1").ref == "run/pool/v0001"


def test_an_entry_that_left_is_not_found_and_the_message_says_why(run, reg, save):
    for step in range(1, 5):
        run.pool.promote(save(step))
    for find in (lambda: run.pool.entry(1), lambda: reg.stored("run/pool/v0001")):
        with pytest.raises(NotFound) as caught:
            find()
        assert "left the pool" in str(caught.value)
        assert "oldest of more than 3" in str(caught.value)
        assert "history(1)" in (caught.value.hint or "")
    gone = run.pool.entries()[0]
    assert (gone.version, gone.evicted) == (1, "oldest of more than 3")


def test_a_version_that_never_was_is_not_found(run, save):
    with pytest.raises(NotFound, match="empty"):
        run.pool.entry(1)
    run.pool.promote(save(1))
    for find in (run.pool.entry, run.pool.history, run.pool.load):
        with pytest.raises(NotFound, match="1 to 1"):
            find(2)
        for wrong in (0, -1, True, 1.0, "1", None):
            with pytest.raises(InvalidInput):
                find(wrong)


def test_others_see_what_was_promoted(run, save, backend, open_registry):
    other = open_registry(backend).run("run")
    held = run.pool.promote(save(1))
    assert playing(other) == [1]
    other.pool.record_match([None, 1], [1, 2])
    assert held.games == 0
    run.pool.entry(1)
    assert held.games == 1


# Matches


def test_a_match_between_entries_is_rated(run, save):
    for step in (1, 2):
        run.pool.promote(save(step))
    second, first = run.pool.record_match([2, 1], [1, 2])
    # What openskill 6.2 gives for two unknown players.
    assert (second.version, first.version) == (2, 1)
    assert second.mu == pytest.approx(27.635389493140497, abs=1e-9)
    assert first.mu == pytest.approx(22.364610506859503, abs=1e-9)
    assert second.sigma == first.sigma == pytest.approx(8.06590141354368, abs=1e-9)
    assert [(e.games, e.wins, e.win_rate) for e in (second, first)] == [(1, 1, 1.0), (1, 0, 0.0)]


def test_a_match_that_is_recorded_again_changes_nothing(run, save, backend, open_registry):
    for step in (1, 2):
        run.pool.promote(save(step))
    run.pool.record_match([1, 2], [1, 2], match="m1")
    before = contents(backend)
    other = open_registry(backend).run("run")
    first, _ = other.pool.record_match([1, 2], [1, 2], match="m1")
    assert first.games == 1
    assert contents(backend) == before
    assert run.pool.record_match([1, 2], [1, 2], match="m2")[0].games == 2
    assert run.pool.record_match([1, 2], [1, 2])[0].games == 3
    assert run.pool.record_match([1, 2], [1, 2])[0].games == 4


def test_a_frozen_entry_counts_its_games_and_keeps_its_rating(run, save):
    run.pins.gates.set("first", save(1, phase=1))
    run.pool.promote_gate("first")
    run.pool.promote(save(2))
    anchor, other = run.pool.record_match([1, 2], [1, 2])
    assert (anchor.mu, anchor.sigma, anchor.games, anchor.wins) == (MU, SIGMA, 1, 1)
    assert other.mu < MU


def test_an_entry_that_left_during_its_match_is_rated(run, save):
    for step in range(1, 5):
        run.pool.promote(save(step))
    gone, _ = run.pool.record_match([1, 4], [1, 2])
    assert (gone.evicted is not None, gone.games, gone.wins) == (True, 1, 1)


def test_a_match_with_an_unknown_version_is_refused(run, save, backend):
    run.pool.promote(save(1))
    before = contents(backend)
    with pytest.raises(NotFound, match="v0007"):
        run.pool.record_match([1, 7], [1, 2])
    assert contents(backend) == before


def test_a_match_sees_versions_that_others_promoted(run, save, backend, open_registry):
    other = open_registry(backend).run("run")
    for step in (1, 2):
        run.pool.promote(save(step))
    assert [entry.version for entry in other.pool.record_match([2, 1], [1, 2])] == [2, 1]


# The log


def test_the_history_of_an_entry_outlives_it(run, save):
    entry = run.pool.promote(save(1, metrics={"mu": 30.0, "sigma": 2.0}))
    run.pool.promote(save(2))
    run.pool.record_match([1, 2], [1, 2], match="m1")
    rated = (entry.mu, entry.sigma)
    for step in (3, 4):
        run.pool.promote(save(step))
    promoted, match, evicted = run.pool.history(1)
    assert (promoted.event, promoted.mu, promoted.sigma) == ("promoted", 30.0, LEAST)
    assert (match.event, match.match, match.games, match.wins) == ("rated", "m1", 1, 1)
    assert (match.mu, match.sigma) == rated
    assert (evicted.event, evicted.reason) == ("evicted", "oldest of more than 3")
    assert (evicted.mu, evicted.sigma, evicted.games, evicted.wins) == (*rated, 1, 1)
    assert promoted.n < match.n < evicted.n
    assert [type(event) for event in run.pool.evictions()] == [PoolEvent]
    assert run.pool.evictions() == [evicted]


# Drawing

# Of master seed 42, phase 3, child 4, as `test_selection` has them: the categories of the first ten
# games, and what a roster of five gives.
_DRAWN = [*["self"] * 3, "frozen", *["self"] * 3, "roster", "self", "roster"]


def test_opponents_are_drawn_by_the_runs_seed_phase_and_child(reg):
    run = reg.create_run("run", seed=42, preset=league(size=5))
    run.pins.gates.set("second", run.save(player(1), step=1, phase=2))
    run.pool.promote_gate("second")
    for step in range(2, 8):
        run.pool.promote(run.save(player(step), step=step, phase=3))
    assert playing(run) == [1, 3, 4, 5, 6, 7]
    drawn = run.pool.draws(0, 10)
    assert [matchup.kind for matchup in drawn] == _DRAWN
    assert [drawn[game].version for game in (3, 7, 9)] == [1, 4, 5]
    assert run.pool.draw(2**32).version == 3
    assert [run.pool.draw(game) for game in range(10)] == drawn
    assert run.pool.draws(7, 3) == drawn[7:]
    assert run.pool.draws(0, 10, phase=3) == drawn
    assert run.pool.draws(0, 10, phase="3") == drawn
    assert [m.kind for m in run.pool.draws(0, 10, phase=2)] != _DRAWN


def test_an_empty_pool_gives_every_game_to_the_model_in_training(run):
    assert {matchup.kind for matchup in run.pool.draws(0, 50)} == {"self"}


def test_phases_with_names_are_numbered_by_their_place(reg):
    def spec(*names: str) -> RunSpec:
        phases = tuple(LEAGUE.phases[0].changed(name=name) for name in names)
        pool = league().pool.changed(phase=names[-1], draws=league().pool.draws[:2])
        return RunSpec(phases=phases, pool=pool)

    drawn = []
    for names in (("a", "b", "play"), ("1", "2", "3")):
        run = reg.create_run(preset=spec(*names), seed=42)
        run.pool.promote(run.save(player(1), step=1, phase=names[-1]))
        drawn.append([run.pool.draws(0, 50, phase=name) for name in names])
    assert drawn[0] == drawn[1]
    assert drawn[0][0] != drawn[0][1]


def test_without_declared_opponents_nothing_is_drawn(reg, run):
    for undeclared in (reg.create_run(), reg.create_run(preset=league(draws=()))):
        with pytest.raises(InvalidInput, match="declares no opponents"):
            undeclared.pool.draw(0)
    with pytest.raises(InvalidInput, match="no such phase"):
        run.pool.draw(0, phase=4)
    for wrong in (-1, 2**64, 1.5, True):
        with pytest.raises(InvalidInput):
            run.pool.draw(wrong)


def test_a_synced_copy_draws_and_loads_the_same(open_registry):
    here, there = (new_backend(uuid.uuid4().hex) for _ in range(2))
    run = open_registry(here).create_run("run", seed=7, preset=LEAGUE)
    run.pins.gates.set("second", run.save(player(1), step=1, phase=2))
    run.pool.promote_gate("second")
    for step in range(2, 7):
        run.pool.promote(run.save(player(step), step=step, phase=3))
    run.pool.record_match([5, 6], [1, 2])
    sync(open_registry(here), open_registry(there))
    copy = open_registry(there).run("run")
    assert copy.pool.draws(0, 300) == run.pool.draws(0, 300)
    assert {m.version for m in copy.pool.draws(0, 300)} == {None, 1, 4, 5, 6}
    for ours, theirs in zip(run.pool.roster(), copy.pool.roster(), strict=True):
        assert ours.record == theirs.record
        assert same(ours.load(), theirs.load())
    assert copy.pool.history(2) == run.pool.history(2)
    assert copy.pool.promote(copy.latest()).version == 6
    assert open_registry(there).verify(deep=True).findings == ()


def test_drawing_asks_the_store_for_nothing(backend, open_registry):
    metered = Metered(backend)
    run = open_registry(metered).create_run("run", preset=LEAGUE)
    run.pool.promote(run.save(player(1), step=1, phase=3))
    with metered.measure() as usage:
        run.pool.draws(0, 20)
    assert usage.requests == 0


# Loading


def test_the_newest_models_stay_in_memory(run, save):
    for step in (1, 2, 3):
        run.pool.promote(save(step))
    built = []

    def build(state):
        built.append(state["model"]["w"][0])
        return built[-1]

    assert [run.pool.load(version, build=build) for version in (1, 2, 1, 3, 1)] == [1, 2, 1, 3, 1]
    assert built == [1, 2, 3]
    run.pool.load(2, build=build)
    assert built == [1, 2, 3, 2]


def test_a_model_in_memory_is_not_read_again(backend, open_registry):
    metered = Metered(backend)
    run = open_registry(metered).create_run("run", preset=LEAGUE)
    run.pool.promote(run.save(player(1), step=1, phase=3))
    state = run.pool.load(1)
    assert same(state, {"model": player(1)["model"]})
    with metered.measure() as usage:
        assert run.pool.load(1) is state
    assert usage.requests == 0


def test_a_state_does_not_pass_for_a_model_nor_one_device_for_another(run):
    tensors = {"model": {"w": torch.arange(40.0)}}
    run.pool.promote(run.save(tensors, step=1, phase=3))
    assert run.pool.load(1, build=lambda state: "a model") == "a model"
    assert torch.equal(run.pool.load(1)["model"]["w"], torch.arange(40.0))
    assert run.pool.load(1, map_location="meta")["model"]["w"].is_meta
    assert not run.pool.load(1)["model"]["w"].is_meta


def test_an_entry_that_left_plays_from_memory_alone(run, save):
    run.pool.promote(save(1))
    state = run.pool.load(1)
    for step in (2, 3, 4, 5):
        run.pool.promote(save(step))
    assert run.pool.load(1) is state
    with pytest.raises(NotFound, match="left the pool"):
        run.pool.load(2)


def test_a_damaged_entry_is_never_handed_out(run, save, backend):
    entry = run.pool.promote(save(1))
    for pack in entry.handle.reader.placement.packs:
        flip(backend, str(pack.key))
    for _ in range(2):
        with pytest.raises(Damaged):
            run.pool.load(1)


# Beside training


def test_a_promotion_waits_for_a_save_in_the_background_and_both_land(backend, open_registry):
    hooked = Hooked(backend)
    reg = open_registry(hooked)
    run = reg.create_run("run", preset=LEAGUE)
    first = run.save(player(1), step=1, phase=3)
    writing, promoting = threading.Event(), threading.Event()

    def before(method: str, key: str) -> None:
        if method == "put_if_absent" and key.startswith("packs/"):
            writing.set()
            assert promoting.wait(300)
        elif method == "get" and "/log/" in key and writing.is_set():
            promoting.set()

    hooked.before = before
    pending = run.save_async(player(2), step=2, phase=3)
    assert writing.wait(300)
    assert not pending.done()
    entry = run.pool.promote(first)
    assert (pending.wait().step, entry.version) == (2, 1)
    assert same(entry.load(), {"model": player(1)["model"]})
    assert same(run.latest().load(), player(2))
    assert reg.verify(deep=True).findings == ()


def test_who_promotes_and_rates_takes_nothing_over(run, save, backend, open_registry):
    for step in (1, 2):
        save(step)
    other = open_registry(backend).run("run")
    for checkpoint in other.checkpoints():
        other.pool.promote(checkpoint)
    other.pool.record_match([1, 2], [1, 2])
    assert save(3).step == 3


def test_a_fork_has_the_pool_and_goes_on_from_its_versions(run, reg, save):
    run.pins.gates.set("second", save(1, phase=2))
    run.pool.promote_gate("second")
    for step in (2, 3, 4):
        run.pool.promote(save(step))
    last = save(5)
    fork = reg.fork(last, "fork")
    assert playing(fork) == [1, 2, 3, 4]
    assert fork.pool.promote_gate("second").version == 1
    assert fork.pool.promote(fork.latest()).version == 5
    assert playing(fork) == [1, 3, 4, 5]
    assert playing(run) == [1, 2, 3, 4]


def test_a_pool_is_only_a_few_objects(run, save, backend):
    checkpoint = save(1)
    before = objects(backend)
    run.pool.promote(checkpoint)
    assert len(objects(backend) - before) == 2


def test_the_size_that_a_run_without_a_specification_has(reg):
    run = reg.create_run()
    assert run.manifest.spec.pool is None
    for step in range(22):
        run.pool.promote(run.save({"model": {"w": step}}, step=step))
    assert playing(run) == list(range(3, 23))
    assert Pool(phase="3", size=1).cache == 5
