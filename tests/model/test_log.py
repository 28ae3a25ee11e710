"""What a log says at its head, and what a collector can find in it."""

from __future__ import annotations

from tests.model.log import CHECKPOINT, PIN, Logs, Slot, name_bit

A0, A1 = 1, 2


def test_the_last_place_wins_and_outlives_what_it_places() -> None:
    logs = Logs(manifests=1, epochs=1)
    log = logs.append(logs.created, Slot(places=((0, A0),), names=name_bit(0, CHECKPOINT)))
    assert (log.held, log.keys) == (frozenset({0}), A0)
    moved = logs.append(log, Slot(places=((0, A1),)))
    assert moved.keys == A1
    evicted = logs.append(moved, Slot(evicts=name_bit(0, CHECKPOINT)))
    assert (evicted.held, evicted.keys, evicted.placed) == (frozenset(), 0, A1)


def test_a_pin_keeps_what_a_checkpoint_lets_go() -> None:
    logs = Logs(manifests=1, epochs=1)
    both = name_bit(0, CHECKPOINT) | name_bit(0, PIN)
    log = logs.append(logs.created, Slot(places=((0, A0),), names=both))
    assert logs.append(log, Slot(evicts=name_bit(0, CHECKPOINT))).keys == A0
    assert logs.append(log, Slot(drops=True)).keys == 0


def test_a_manifest_without_a_place_is_seen() -> None:
    logs = Logs(manifests=1, epochs=1)
    assert logs.append(logs.created, Slot(names=name_bit(0, CHECKPOINT))).unplaced
    passing = Slot(names=name_bit(0, CHECKPOINT), evicts=name_bit(0, CHECKPOINT))
    assert not logs.append(logs.created, passing).unplaced


def test_a_collector_finds_what_was_unused_at_its_mark_or_since() -> None:
    logs = Logs(manifests=1, epochs=2)
    name = name_bit(0, CHECKPOINT)
    log = logs.append(logs.created, Slot(places=((0, A0),), names=name))
    assert log.unneeded == (0, 0)
    log = logs.append(log, Slot(mark=1))
    assert not log.unneeded[0] & A0
    assert log.unneeded[0] & A1
    evicted = logs.append(log, Slot(evicts=name))
    assert evicted.unneeded[0] & A0
    back = logs.append(evicted, Slot(places=((0, A1),), names=name))
    assert back.unneeded[0] & A0
    assert back.unneeded[0] & A1
    assert back.unneeded[1] == 0
    later = logs.append(back, Slot(mark=2))
    assert not later.unneeded[1] & A1
    assert later.unneeded[1] & A0


def test_a_mark_serves_the_epochs_before_it() -> None:
    logs = Logs(manifests=1, epochs=2)
    log = logs.append(logs.created, Slot(mark=2))
    assert log.mark == 2
    assert log.unneeded[0] & A0
    assert log.unneeded[1] & A0


def test_logs_that_nobody_can_tell_apart_are_one() -> None:
    logs = Logs(manifests=1, epochs=1)
    name = name_bit(0, CHECKPOINT)
    log = logs.append(logs.created, Slot(places=((0, A0),), names=name))
    evicted = logs.append(log, Slot(evicts=name))
    assert logs.append(evicted, Slot(names=name)) is log
    marked = logs.append(evicted, Slot(mark=1))
    assert logs.append(marked, Slot(names=name)) is not logs.append(log, Slot(mark=1))
