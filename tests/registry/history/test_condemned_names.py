"""Tables of condemned names: exact answers, from a few blocks, whatever is damaged."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable

import pytest

from holdfast.backends.wrappers import Metered
from holdfast.registry.errors import Damaged, InvalidInput, Malformed, UnsupportedFormat
from holdfast.registry.face.factory import open_on
from holdfast.registry.history import condemned_names
from holdfast.registry.history.condemned_names import CondemnedNames, SweepTable, due
from holdfast.registry.history.epochs import (
    Epochs,
    encode_forget,
    encode_sweep,
    encode_upgrade,
)
from holdfast.registry.objects.framing import join_lines
from holdfast.registry.objects.keys import KINDS, ObjectKey, epoch_key, part_key
from holdfast.registry.values.digest import Digest
from tests.support.faults import flip
from tests.support.stores import new_backend


def _key(i: int, generation: int = 0, kind="packs") -> ObjectKey:
    return ObjectKey(kind, Digest.of(b"%d" % i), generation)


def _in_order(keys: Iterable[ObjectKey]) -> list[ObjectKey]:
    return sorted(keys, key=lambda key: key.record)


def _random_keys(count: int, generation: int = 0) -> list[ObjectKey]:
    return [ObjectKey("packs", Digest(os.urandom(32)), generation) for _ in range(count)]


@pytest.fixture
def small_parts(monkeypatch):
    """Parts so small that a few keys make many."""
    monkeypatch.setattr(condemned_names, "_BLOCK_RECORDS", 3)
    monkeypatch.setattr(condemned_names, "_SHARD_RECORDS", 12)


@pytest.fixture
def upgraded(backend):
    backend.put(epoch_key(1), encode_upgrade(1, 3))
    return backend


def _sweep(epochs: Epochs, *keys: ObjectKey, joins: bool = True) -> int:
    newest = epochs.observe()
    assert epochs.put_sweep(newest + 1, _in_order(keys), joins=joins)
    return newest + 1


def _tables(epochs: Epochs) -> list[int]:
    header = epochs.header(epochs.observe())
    return [table.sweeps for table in header.tables]


@pytest.mark.parametrize("single", [0, 32], ids=["shards whole", "single blocks"])
def test_a_table_has_its_keys_and_no_other(reg, small_parts, monkeypatch, single):
    monkeypatch.setattr(condemned_names, "_SINGLE_BLOCKS", single)
    shuffled = random.Random(5)
    there = {_key(i, i % 3, kind) for i in range(90) for kind in KINDS if (i + len(kind)) % 2}
    # More generations of one digest than a block and a shard hold.
    there |= {_key(1_000, generation) for generation in range(40)}
    names = CondemnedNames(reg.handle.store)
    with pytest.raises(InvalidInput, match="order"):
        names.put(shuffled.sample(sorted(there), len(there)), epoch=50)
    table = names.put(_in_order(there), epoch=50)
    assert (table.keys, table.last, table.sweeps) == (len(there), 50, 1)
    absent = {_key(i, 7, kind) for i in range(200) for kind in KINDS} | {_key(1_000, 40)}
    assert names.among(table, there | absent) == there
    assert all(names.among(table, [key]) == {key} for key in there)
    assert not any(names.among(table, [key]) for key in absent)


def test_every_sweep_since_the_upgrade_and_before_counts(reg, small_parts):
    backend = reg.handle.store.backend
    backend.put(epoch_key(1), encode_sweep(1, [_key(1), _key(2)]))
    backend.put(epoch_key(2), encode_forget(2, {"gone": 4}, Epochs(reg.handle.store).header(1)))
    epochs = Epochs(reg.handle.store)
    backend.put(epoch_key(3), encode_upgrade(3, 3, epochs.header(2)))
    assert epochs.condemned([_key(1), _key(3)], 3) == {_key(1)}
    # Without joins the sweep from before is still read by itself.
    assert _sweep(epochs, _key(3), _key(4, 3), joins=False) == 4
    keys = [_key(1), _key(2), _key(3), _key(4, 3), _key(5)]
    assert epochs.condemned(keys, 4) == set(keys[:4])
    for i in range(5, 30):
        _sweep(epochs, _key(i))
    backend.delete(epoch_key(1))  # its names are in a table by now
    fresh = Epochs(reg.handle.store)
    assert fresh.condemned([*keys, _key(29), _key(4, 4), _key(30)], 29) == {*keys, _key(29)}
    # Of the sweeps up to an older epoch only those count.
    assert fresh.condemned([_key(28), _key(29)], 28) == {_key(28)}
    assert fresh.condemned_by(28, [_key(27), _key(28)]) == {_key(28)}
    assert fresh.header(29).forgotten == {"gone": 4}


def test_an_entry_without_names_repeats_the_tables(upgraded, reg):
    epochs = Epochs(reg.handle.store)
    _sweep(epochs, _key(1))
    reg.handle.store.backend.put(epoch_key(3), encode_forget(3, {"gone": 4}, epochs.header(2)))
    assert epochs.condemned([_key(1)], 3) == {_key(1)}
    assert epochs.condemned_by(3, [_key(1)]) == set()
    assert _sweep(epochs, _key(2)) == 4
    assert epochs.condemned([_key(1), _key(2)], 4) == {_key(1), _key(2)}


def test_at_most_one_table_of_each_size_stays(upgraded, reg):
    epochs = Epochs(reg.handle.store)
    most = 0
    for i in range(80):
        _sweep(epochs, _key(i))
        most = max(most, len(_tables(epochs)))
    assert most == 3
    assert sum(_tables(epochs)) == 80
    tables = [
        SweepTable(table=Digest.of(b""), sweeps=n, last=1, shards=1, keys=1) for n in (9, 8, 1)
    ]
    assert due(tables) == 3
    assert due(tables[:2]) == 1


@pytest.mark.parametrize("harm", ["absent", "damaged", "cut off"])
def test_a_lost_part_condemns_for_a_writer_and_stops_a_collector(upgraded, reg, harm):
    _sweep(Epochs(reg.handle.store), _key(1))
    backend = reg.handle.store.backend
    for info in list(backend.list("sweeps/")):
        whole = backend.get(info.key)
        if harm == "absent":
            backend.delete(info.key)
        elif harm == "damaged":
            flip(backend, info.key)
        else:
            backend.put(info.key, whole[:-1])
        epochs = Epochs(reg.handle.store)
        assert epochs.condemned([_key(1), _key(2), _key(3, 2)], 2) == {_key(1), _key(2)}
        with pytest.raises(Malformed if harm == "absent" else Damaged, match="sweeps/"):
            epochs.condemned_by(2, [_key(2)])
        backend.put(info.key, whole)
    assert Epochs(reg.handle.store).condemned([_key(1), _key(2)], 2) == {_key(1)}


def test_the_header_is_small_and_of_a_format_that_older_programs_refuse(upgraded, reg):
    epochs = Epochs(reg.handle.store)
    for i in range(80):
        _sweep(epochs, _key(i))
    assert len(reg.handle.store.backend.get(epoch_key(81))) < 4096
    header = epochs.header(81)
    assert header.format == "holdfast.epoch/2"
    for wrong in (
        [header.changed(format="holdfast.epoch/1").encode()],
        [header.changed(tables=None).encode()],
        [header.encode(), b'{"keys":[],"shard":"00"}'],
    ):
        reg.handle.store.backend.put(epoch_key(81), join_lines(wrong))
        with pytest.raises(Malformed):
            Epochs(reg.handle.store).header(81)


def test_programs_of_an_older_version_are_refused(upgraded, reg, monkeypatch):
    monkeypatch.setattr("holdfast.registry.store.store.WRITER_VERSION", 2)
    with pytest.raises(UnsupportedFormat, match=r"expected writer version 3.*version 2"):
        Epochs(reg.handle.store).observe()


@pytest.mark.parametrize("count", [100_000, pytest.param(1_000_000, marks=pytest.mark.soak)])
def test_one_answer_takes_100_kb_however_many_names_a_sweep_has(count):
    metered = Metered(new_backend())
    with open_on(metered) as reg:
        metered.put(epoch_key(1), encode_upgrade(1, 3))
        keys = _random_keys(count)
        _sweep(Epochs(reg.handle.store), *keys)
        epochs, before = Epochs(reg.handle.store), metered.snapshot()
        u = epochs.observe()
        assert metered.snapshot().since(before).read_bytes < 4096
        assert epochs.condemned([keys[0]], u) == {keys[0]}
        assert not epochs.condemned(_random_keys(1), u)
        used = metered.snapshot().since(before)
        print(f"{count} keys: {used}")
        assert used.read_bytes < 100_000
        assert epochs.condemned(keys[:200], u) == set(keys[:200])
        assert epochs.names.kept_bytes <= 2**20


@pytest.mark.parametrize("size", [50, pytest.param(5_000, marks=pytest.mark.soak)])
def test_30_packs_of_200_sweeps_ago_take_200_requests(size):
    metered = Metered(new_backend())
    with open_on(metered) as reg:
        metered.put(epoch_key(1), encode_upgrade(1, 3))
        epochs = Epochs(reg.handle.store)
        for epoch in range(2, 202):
            assert epochs.put_sweep(epoch, _in_order(_random_keys(size, epoch - 1)), joins=True)
        fresh, before = Epochs(reg.handle.store), metered.snapshot()
        assert not fresh.condemned(_random_keys(30), fresh.observe())
        used = metered.snapshot().since(before)
        print(f"200 sweeps of {size} keys: {used}")
        assert used.requests <= 200
        assert used.read_bytes <= 4_000_000


def test_a_part_has_one_name(reg, upgraded):
    """Two collectors that condemn the same put the same files."""
    first, second = Epochs(reg.handle.store), Epochs(reg.handle.store)
    first.observe(), second.observe()
    assert first.put_sweep(2, [_key(1)], joins=True)
    assert not second.put_sweep(2, [_key(1)], joins=True)
    parts = [info.key for info in reg.handle.store.backend.list("sweeps/")]
    assert len(parts) == 2
    assert part_key(first.header(2).tables[0].table) in parts
