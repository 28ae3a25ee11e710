"""The registry-wide log: what was condemned, and who may write."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.backends.wrappers import Wrapper
from holdfast.registry.errors import Damaged, IntegrityError, Malformed, UnsupportedFormat
from holdfast.registry.face.factory import open_on
from holdfast.registry.history.epochs import (
    CondemnedShard,
    EpochHeader,
    Epochs,
    encode_sweep,
    encode_upgrade,
)
from holdfast.registry.objects.framing import join_lines, split_lines
from holdfast.registry.objects.keys import ObjectKey, epoch_key
from holdfast.registry.values import canonical
from holdfast.registry.values.digest import Digest
from tests.support.faults import flip
from tests.support.strategies import object_keys, quick


def _key(i: int, generation: int = 0) -> ObjectKey:
    return ObjectKey("packs", Digest.of(b"%d" % i), generation)


@pytest.fixture
def epochs(reg):
    return Epochs(reg.handle.store)


def _sweep(backend, epoch, *keys):
    backend.put(epoch_key(epoch), encode_sweep(epoch, keys))


def test_before_the_first_entry_the_epoch_is_0(epochs):
    assert epochs.observe() == 0
    assert epochs.condemned([_key(1)], 0) == set()


def test_the_observed_epoch_is_the_highest_dense_one(epochs, backend):
    for epoch in range(1, 4):
        _sweep(backend, epoch)
    assert epochs.observe() == 3


@pytest.mark.parametrize("present", [[2], [1, 3], [1, 2, 4]])
def test_a_gap_is_refused(epochs, backend, present):
    for epoch in present:
        _sweep(backend, epoch)
    with pytest.raises(Malformed, match="epochs has a gap"):
        epochs.observe()


def test_a_listing_that_others_overtake_is_no_gap(backend):
    for epoch in (1, 2, 3):
        _sweep(backend, epoch)

    class Overtaken(Wrapper):
        def list(self, prefix="", **more):
            for info in super().list(prefix, **more):
                if info.key != epoch_key(2):
                    yield info

    with open_on(Overtaken(backend)) as reg:
        assert Epochs(reg.handle.store).observe() == 3


@quick
@given(st.sets(object_keys, max_size=20))
def test_a_sweep_comes_back_sharded_by_the_first_byte(keys):
    first, *rest = split_lines(encode_sweep(3, keys), where="x")
    assert EpochHeader.decode(first, where="x") == EpochHeader(epoch=3, entry="sweep")
    shards = [CondemnedShard.decode(line, where="x") for line in rest]
    assert len({shard.shard for shard in shards}) == len(shards)
    found = [ObjectKey.parse(key) for shard in shards for key in shard.keys]
    assert len(found) == len(keys)
    assert set(found) == keys
    for shard in shards:
        assert {ObjectKey.parse(key).digest[:1].hex() for key in shard.keys} == {shard.shard}


def test_a_sweep_condemns_its_keys_and_no_other_generation(epochs, backend):
    _sweep(backend, 1, _key(1), _key(2))
    assert epochs.condemned([_key(1), _key(3), _key(1, 1)], 1) == {_key(1)}
    assert epochs.condemned([_key(1)], 0) == set()


def test_every_sweep_up_to_the_observed_one_counts(epochs, backend):
    _sweep(backend, 1, _key(1))
    backend.put(epoch_key(2), encode_upgrade(2, 1))
    _sweep(backend, 3, _key(2), _key(3, 2))
    keys = [_key(1), _key(2), _key(3, 2)]
    assert epochs.condemned(keys, 3) == set(keys)
    assert epochs.condemned(keys, 2) == {_key(1)}


def test_only_sweeps_after_a_keys_generation_are_read(epochs, backend):
    _sweep(backend, 1)
    _sweep(backend, 2, _key(1, 1))
    flip(backend, epoch_key(1))
    assert epochs.condemned([_key(1, 1)], 2) == {_key(1, 1)}


def test_an_upgrade_refuses_an_older_writer(epochs, backend):
    backend.put(epoch_key(1), encode_upgrade(1, 99))
    with pytest.raises(
        UnsupportedFormat, match=r"epochs/0+1.*expected writer version 99.*version 4"
    ):
        epochs.observe()
    with pytest.raises(UnsupportedFormat):
        epochs.require(1)


def test_an_upgrade_to_this_version_is_welcome(epochs, backend):
    backend.put(epoch_key(1), encode_upgrade(1, 1))
    assert epochs.observe() == 1


def test_a_damaged_entry_is_an_error(epochs, backend):
    _sweep(backend, 1, _key(1))
    flip(backend, epoch_key(1))
    with pytest.raises(Damaged):
        epochs.observe()
    with pytest.raises(Damaged):
        epochs.condemned([_key(5)], 1)


def test_an_absent_entry_is_an_error(epochs):
    with pytest.raises(Malformed, match="a marked epoch is absent"):
        epochs.condemned([_key(1)], 1)


def test_the_entry_of_another_epoch_is_an_error(epochs, backend):
    backend.put(epoch_key(1), encode_sweep(2, []))
    with pytest.raises(Malformed, match="another epoch's entry; expected 1; found 2"):
        epochs.observe()


HEADER = {"format": "holdfast.epoch/1", "epoch": 1, "entry": "sweep", "min_writer": 1}
SHARD = {"shard": "00", "keys": []}


@pytest.mark.parametrize(
    "lines",
    [
        [HEADER | {"format": "holdfast.epoch/2"}],
        [HEADER | {"entry": "amnesty"}],
        [HEADER | {"min_writer": 0}],
        [HEADER | {"more": 1}],
        [SHARD],
        [HEADER, SHARD | {"shard": "0"}],
        [HEADER, SHARD | {"keys": ["packs/x"]}],
        [HEADER, HEADER],
    ],
)
def test_each_rule_of_an_entry_has_its_error(epochs, backend, lines):
    backend.put(epoch_key(1), join_lines([canonical.encode(line) for line in lines]))
    with pytest.raises((IntegrityError, UnsupportedFormat)):
        epochs.observe()
