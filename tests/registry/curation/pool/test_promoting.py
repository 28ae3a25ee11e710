"""A promotion while others write: it is made again on the new state of the run, or refused."""

from __future__ import annotations

import pytest

from holdfast import Retention
from holdfast.backends.errors import StoreUnavailable
from holdfast.registry.curation.pool.promoting import ModelSource, PromotionCommit, Terms
from holdfast.registry.curation.pool.ratings import Rating
from holdfast.registry.errors import Conflict, InvalidInput
from holdfast.registry.history import log, slots
from holdfast.registry.history.actions import Mark
from holdfast.registry.history.epochs import encode_sweep
from holdfast.registry.objects.keys import ObjectKey, epoch_key
from holdfast.registry.writing.change import Stale
from tests.registry.curation.pool.league import league, player, playing
from tests.support.faults import Hooked, Once, flip
from tests.support.states import same

_SLOTS = "runs/run/log/"


@pytest.fixture
def hooked(backend) -> Hooked:
    return Hooked(backend)


@pytest.fixture
def make(hooked, open_registry):
    """Makes a run behind a store that can be interrupted; returns it and its registry."""

    def make(**changes):
        reg = open_registry(hooked)
        return reg.create_run("run", seed=1, preset=league(**changes)), reg

    return make


@pytest.fixture
def other(backend, open_registry):
    """Opens the same run past the interruptions."""
    return lambda: open_registry(backend).run("run")


def save(run, *steps, phase=3):
    return [run.save(player(step), step=step, phase=phase) for step in steps]


def between(hooked: Hooked, action) -> Once:
    """Let something happen right before the next slot is put."""
    hooked.before = Once(_SLOTS, action, "put")
    return hooked.before


def test_an_evicted_checkpoint_is_refused_while_another_thread_reads_on(make, monkeypatch):
    run, _ = make()
    first, _ = save(run, 1, 2)
    run.retention.prune(Retention(last=1))
    recall, reads = log.RunLog.recall, iter([run.refresh])

    def recalled(self):
        recall(self)
        for read in reads:  # once, right after
            read()

    monkeypatch.setattr(log.RunLog, "recall", recalled)
    with pytest.raises(Conflict, match="checkpoint was evicted"):
        run.pool.promote(first)


def test_the_loser_of_a_race_gets_the_next_version(make, hooked, other):
    run, reg = make()
    first, second = save(run, 1, 2)
    rival = other()
    once = between(hooked, lambda: rival.pool.promote(rival.history.checkpoint(second.handle.n)))
    entry = run.pool.promote(first)
    assert once.done
    assert (entry.version, entry.step) == (2, 1)
    assert [(one.version, one.step) for one in run.pool.entries()] == [(1, 2), (2, 1)]
    assert reg.verify(deep=True).findings == ()


def test_who_loses_against_the_same_promotion_finds_the_entry(make, hooked, other):
    run, _ = make()
    (checkpoint,) = save(run, 1)
    rival = other()
    once = between(hooked, lambda: rival.pool.promote(rival.latest(), mu=40.0))
    entry = run.pool.promote(checkpoint)
    assert once.done
    assert (entry.version, entry.mu) == (1, 40.0)
    assert playing(run) == [1]


def test_evictions_are_computed_anew(make, hooked, other):
    run, _ = make(size=2)
    checkpoints = save(run, 1, 2, 3, 4)
    run.pool.promote(checkpoints[0])
    run.pool.promote(checkpoints[1])
    rival = other()
    between(hooked, lambda: rival.pool.promote(rival.history.checkpoint(checkpoints[2].handle.n)))
    run.pool.promote(checkpoints[3])
    assert playing(run) == [3, 4]
    assert [event.version for event in run.pool.evictions()] == [1, 2]


def test_a_model_that_nobody_holds_any_more_is_cut_anew(make, hooked, other):
    run, reg = make(size=1)
    first, third = save(run, 1, 3)
    twin = run.save({**player(1), "optimizer": {"m": 5}}, step=4, phase=3)
    entry = run.pool.promote(first)
    rival = other()
    once = between(hooked, lambda: rival.pool.promote(rival.history.checkpoint(third.handle.n)))
    put: list[str] = []
    hooked.after = lambda method, key: put.append(key) if method.startswith("put") else None
    again = run.pool.promote(twin)
    assert once.done
    assert again.digest == entry.digest
    # Not needed at first, because an entry held it; put again once that entry had left.
    kinds = [key.split("/")[0] for key in put]
    assert (kinds[0], sorted(kinds[1:3]), kinds[3]) == ("runs", ["manifests", "placements"], "runs")
    assert (again.version, playing(run)) == (3, [3])
    assert reg.verify(deep=True).findings == ()


def test_a_model_that_only_an_earlier_attempt_wrote_is_cut_anew(make, other):
    """The attempt in between wrote nothing, because a rival's entry played; that entry has left."""
    run, _ = make(size=1)
    first, second = save(run, 1, 2)
    rival = other()
    commit = PromotionCommit(
        run.handle.committer.writer,
        lambda manifest: ModelSource(manifest.by_n[first.handle.n]),
        Terms(),
    )
    assert len(commit.write_states()) == 1
    rival.pool.promote(rival.history.checkpoint(first.handle.n))
    run.refresh()
    assert len(commit.write_states()) == 0
    rival.pool.promote(rival.history.checkpoint(second.handle.n))
    run.refresh()
    with pytest.raises(Stale):
        commit.actions(run.manifest)
    assert len(commit.write_states()) == 1
    assert commit.actions(run.manifest)


def test_a_sweep_between_cutting_and_committing_asks_for_a_new_cut(make, hooked, backend, other):
    run, reg = make()
    (checkpoint,) = save(run, 1)
    condemned: list[ObjectKey] = []

    def sweep() -> None:
        held = {
            str(checkpoint.handle.reader.place.manifest_key),
            str(checkpoint.handle.reader.place.placement_key),
        }
        names = [info.key for info in backend.list("manifests/")]
        names += [info.key for info in backend.list("placements/")]
        condemned.extend(ObjectKey.parse(name) for name in names if name not in held)
        backend.put_if_absent(epoch_key(1), encode_sweep(1, condemned))
        log_ = other().handle.log
        log_.append(lambda state: [Mark(epoch=1)])
        for key in condemned:
            backend.delete(str(key))

    once = between(hooked, sweep)
    entry = run.pool.promote(checkpoint)
    assert once.done
    assert len(condemned) == 2
    assert (
        entry.handle.reader.place.manifest_generation,
        entry.handle.reader.place.placement_generation,
    ) == (
        1,
        1,
    )
    assert same(entry.load(), {"model": player(1)["model"]})
    assert reg.verify(deep=True).ok


def test_a_checkpoint_that_is_evicted_meanwhile_does_not_enter(make, hooked, other):
    run, _ = make()
    first, _ = save(run, 1, 2)
    rival = other()
    between(hooked, lambda: rival.retention.prune(Retention(last=1)))
    with pytest.raises(Conflict, match="checkpoint was evicted"):
        run.pool.promote(first)
    assert playing(run) == []


def test_a_gate_that_is_replaced_meanwhile_enters_as_it_is_now(make, hooked, backend, other):
    run, _ = make()
    bad, good = save(run, 1, 2, phase=2)
    run.pins.gates.set("second", bad)
    for pack in bad.handle.reader.placement.packs:
        flip(backend, str(pack.key))
    rival = other()
    once = between(
        hooked, lambda: rival.pins.gates.set("second", rival.history.checkpoint(good.handle.n))
    )
    entry = run.pool.promote_gate("second")
    assert once.done
    assert (entry.step, entry.checkpoint) == (2, good.handle.n)
    assert same(entry.load(), {"model": player(2)["model"]})


def test_a_promotion_whose_answer_was_lost_can_be_repeated(make, hooked, monkeypatch):
    run, _ = make()
    (checkpoint,) = save(run, 1)

    def lose(method: str, key: str) -> None:
        if method == "put_if_absent" and key.startswith(_SLOTS):
            raise StoreUnavailable("no answer")

    monkeypatch.setattr(slots.time, "sleep", lambda seconds: None)
    hooked.after = lose
    with pytest.raises(StoreUnavailable):
        run.pool.promote(checkpoint)
    hooked.after = lambda method, key: None
    assert run.pool.promote(checkpoint).version == 1
    assert playing(run) == [1]


def test_terms_stand_in_place_of_what_is_inherited():
    assert Terms().over(Rating(1.0, 2.0)) == Rating(1.0, 2.0)
    assert Terms(mu=5.0).over(Rating(1.0, 2.0)) == Rating(5.0, 2.0)
    assert Terms(sigma=5.0).over(Rating(1.0, 2.0)) == Rating(1.0, 5.0)
    with pytest.raises(InvalidInput, match="sigma"):
        Terms(sigma=0.0)
