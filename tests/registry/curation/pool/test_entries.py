"""Entries by their versions, and what the package loads for them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from holdfast.registry.curation.pool.entries import (
    find_record,
    name_of,
    require_playing,
    require_record,
)
from holdfast.registry.errors import NotFound
from tests.registry.curation.pool.league import entry, state


def test_an_entry_is_found_among_gaps():
    versions = (2, 3, 7, 40)
    run = state(pool=tuple(entry(version) for version in versions), next_version=41)
    for version in range(45):
        found = find_record(run, version)
        assert (found.version if found else None) == (version if version in versions else None)


def test_what_is_not_there_is_told_with_what_is():
    run = state(pool=(entry(1, evicted="why it went"), entry(2), entry(3)), next_version=4)
    with pytest.raises(NotFound) as caught:
        require_record(run, 4)
    assert (caught.value.where, caught.value.expected) == ("run/pool/v0004", "1 to 3")
    assert caught.value.hint == "Playing now: 2, 3."
    assert require_record(run, 1).evicted == "why it went"
    with pytest.raises(NotFound) as caught:
        require_playing(run, 1)
    assert caught.value.found == "why it went"
    assert require_playing(run, 2).version == 2
    with pytest.raises(NotFound, match="the pool is empty"):
        require_record(state(), 1)


def test_versions_are_written_with_four_digits_and_more():
    assert [name_of(v) for v in (1, 42, 12345)] == ["pool/v0001", "pool/v0042", "pool/v12345"]


def test_a_record_tells_what_the_log_tells_now(run, save):
    held = run.pool.promote(save(1))
    before = held.record
    run.pool.record_match([None, 1], [2, 1])
    assert (before.games, held.games, held.wins, held.win_rate) == (0, 1, 1, 1.0)
    assert held.conservative == held.mu - 3 * held.sigma
    for step in (2, 3, 4):
        run.pool.promote(save(step))
    assert held.evicted == "oldest of more than 3"
    assert repr(held).startswith("<PoolEntry run/pool/v0001 ")


def test_a_pool_loads_neither_numpy_nor_openskill_before_they_are_needed():
    code = (
        "import sys, holdfast.registry.face.run;"
        "loaded = {'numpy', 'openskill', 'torch'} & set(sys.modules);"
        "assert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
