"""The pool of a run: the ladder, the matches, and those that left."""

from __future__ import annotations

import pytest

from holdfast import Registry
from holdfast.registry.ui.pages import pool as query
from holdfast.registry.ui.pages.pool import pool_view
from tests.registry.curation.pool.league import LEAGUE, player
from tests.registry.ui.sources import source_of

pytest.importorskip("openskill")


@pytest.fixture
def played(reg: Registry):
    run = reg.create_run("run", seed=42, preset=LEAGUE)
    run.save(player(1), step=1, phase=1)
    run.pins.gates.set("first", run.latest())
    run.pool.promote_gate("first")
    for step in (2, 3, 4):
        run.pool.promote(run.save(player(step), step=step, phase=3))
    run.pool.record_match([2, 3, 1], [1, 2, 3])
    run.pool.record_match([2, 3], [2, 1])
    run.pool.record_match([3, None], [1, 2])
    run.pool.promote(run.save(player(5), step=5, phase=3))  # 2 has to leave
    return run


def test_a_pool_is_told_from_the_log(played, backend) -> None:
    with source_of(backend) as source:
        found = pool_view(source, "run")
    assert {entry.version for entry in found.ladder} == {1, 3, 4, 5}
    scores = [entry.conservative for entry in found.ladder]
    assert scores == sorted(scores, reverse=True)
    assert [entry.version for entry in found.ladder if entry.frozen] == [1]
    assert next(entry.gate for entry in found.ladder if entry.frozen) == "first"
    assert found.matches.versions == (1, 2, 3)
    assert found.matches.games == ((0, 1, 1), (1, 0, 2), (1, 2, 0))
    assert found.matches.wins == ((0, 0, 0), (1, 0, 1), (0, 1, 0))
    assert found.matches.alone == ((0, 0), (0, 0), (1, 1))
    assert found.matches.count == 3
    (gone,) = found.gone
    entry = next(one for one in played.pool.entries() if one.version == 2)
    assert (gone.version, gone.reason) == (2, entry.evicted)
    assert (gone.mu, gone.sigma) == (entry.mu, entry.sigma)
    assert found.size == 3
    last = {point.version: point.mu for point in found.ratings}
    assert last == {one.version: one.mu for one in played.pool.entries()}


def test_of_a_long_log_the_newest_slots_are_read(played, backend, monkeypatch) -> None:
    monkeypatch.setattr(query, "SLOTS_READ", 3)
    with source_of(backend) as source:
        source.run("run")
        with source.meter.measure() as used:
            found = pool_view(source, "run")
        assert used.calls == {"get": 4}  # three slots, and a look whether there is another
        whole = pool_view(source, "run", everything=True)
    assert (found.slots_read, found.slots) == (3, played.manifest.next_slot)
    assert found.matches.count == 1
    assert found.gone[0].version == 2
    assert found.gone[0].mu is None
    assert whole.matches.count == 3
    assert whole.slots_read == whole.slots


def test_without_a_pool_the_log_is_not_read(reg, backend) -> None:
    reg.create_run("r").save({"a": 1}, step=1)
    with source_of(backend) as source:
        source.run("r")
        with source.meter.measure() as used:
            found = pool_view(source, "r")
    assert used.requests == 1
    assert (found.ladder, found.size, found.matches.versions) == ((), None, ())
