"""Shards of collections and verifications: parts of the keys, that together are a registry."""

from __future__ import annotations

import pytest

import holdfast
from holdfast import Retention
from holdfast.backends.wrappers import Metered
from holdfast.registry.errors import InvalidInput, Malformed
from holdfast.registry.face.factory import open_on
from holdfast.registry.history.actions import Mark
from holdfast.registry.history.log import RunLog
from holdfast.registry.objects.keys import RUNS, ObjectKey
from holdfast.registry.upkeep.gc import collect
from holdfast.registry.upkeep.shards import Shard
from holdfast.registry.upkeep.verify_notes import last_verify
from tests.support.commands import invoke
from tests.support.faults import flip
from tests.support.states import same, save_small, small_state
from tests.support.stores import contents, needed, objects

COUNT = 3
SHARDS = [f"{number}/{COUNT}" for number in range(1, COUNT + 1)]


def of_shard(keys, shard: str) -> set[str]:
    part = Shard.parse(shard)
    return {key for key in keys if part.has(ObjectKey.parse(key))}


@pytest.fixture
def littered(reg):
    """Two runs with most of their checkpoints evicted."""
    for name in ("a", "b"):
        save_small(reg.create_run(name), *range(1 if name == "a" else 10, 13))
        reg.run(name).retention.prune(Retention(last=1))
    return reg


def marks(reg, run_id: str) -> list[int]:
    slots = RunLog(reg.handle.store, run_id).slots()
    return [line.epoch for slot in slots for _, line in slot.lines if isinstance(line, Mark)]


@pytest.mark.parametrize(
    "text", ["0/4", "5/4", "x", "1", "1/0", "1/257", "-1/4", "1/4/4", "", " 1/4", "١/4"]
)
def test_what_is_no_shard_is_refused_before_anything_is_read(littered, backend, text):
    before = contents(backend)
    for act in (littered.gc, littered.verify):
        with pytest.raises(InvalidInput, match=r"not a shard; expected I/N.*256") as caught:
            act(shard=text)
        assert "1/4, 2/4, 3/4 and 4/4" in str(caught.value)
    with pytest.raises(InvalidInput, match="not a shard"):
        littered.gc(shard=(1, 4))
    assert contents(backend) == before


def test_the_command_says_what_a_shard_is(tmp_path):
    invoke("init", tmp_path / "reg", "--skip-race-probe")
    for name in ("gc", "verify"):
        done = invoke(name, "-r", tmp_path / "reg", "--shard", "5/4")
        assert done.exit_code == InvalidInput.exit_code
        assert "not a shard" in done.stderr
    assert "shard      2/4\n" in invoke("gc", "-r", tmp_path / "reg", "--shard", "2/4").stdout
    shown = invoke("verify", "-r", tmp_path / "reg", "--shard", "2/4").stdout
    assert "only shard 2/4 was checked" in shown


@pytest.mark.parametrize("count", [1, 2, 3, 7, 16, 100, 256])
def test_each_key_is_in_one_shard(count):
    firsts = [
        [part for part in range(256) if Shard(one, count)._has(part)] for one in range(1, count + 1)
    ]
    assert sorted(first for one in firsts for first in one) == list(range(256))
    assert max(map(len, firsts)) - min(map(len, firsts)) <= 1


def test_each_shard_deletes_its_part_and_all_of_them_everything(littered, backend, open_registry):
    for shard in SHARDS:
        before, wanted = objects(backend), needed(littered)
        garbage = of_shard(before - wanted, shard)
        assert garbage
        dry = littered.gc(grace_s=0, shard=shard, dry_run=True)
        report = open_registry(backend).gc(grace_s=0, shard=shard)
        assert before - objects(backend) == garbage
        assert report.deleted.objects == dry.condemned.objects == len(garbage)
        assert report.objects.objects == len(of_shard(before, shard))
        assert report.runs == 2
    assert objects(backend) == needed(littered)
    for name in ("a", "b"):
        assert same(open_registry(backend).checkpoint(f"{name}/latest").load(), small_state(12))
        assert marks(littered, name) == [1, 2, 3]
    assert littered.gc(grace_s=0).deleted.objects == 0


def test_what_another_run_began_to_use_is_spared(littered, backend, open_registry):
    """A shard reads and marks all runs, whatever the keys in them."""
    evicted = small_state(2)
    again = open_registry(backend).create_run("c")
    again.save(evicted, step=1)
    for shard in SHARDS:
        littered.gc(grace_s=0, shard=shard)
    assert same(open_registry(backend).checkpoint("c/latest").load(), evicted)
    assert open_registry(backend).verify(deep=True).findings == ()


def test_a_shard_lists_only_its_folders(littered, backend):
    calls = []
    with open_on(Metered(backend, calls)) as opened:
        collect(opened.handle.store, grace_s=0, shard="2/3")
    listed = {call.key for call in calls if call.method == "list"}
    folders = {key for key in listed if key.startswith(("packs/", "manifests/", "placements/"))}
    assert folders >= {"packs/", "manifests/", "placements/"}
    deep = {key for key in folders if key.count("/") == 2}
    assert deep
    assert all(85 < int(key.split("/")[1], 16) <= 170 for key in deep)


def test_a_second_shard_reads_only_what_is_new(littered, backend):
    littered.gc(grace_s=0, shard="1/3")
    calls = []
    with open_on(Metered(backend, calls)) as opened:
        for shard in SHARDS:  # its placement is in one of them
            collect(opened.handle.store, grace_s=0, shard=shard)
    got = [call.key for call in calls if call.method == "get"]
    assert not [key for key in got if key.startswith("placements/")]
    assert {key.split("/")[1] for key in got if key.startswith(RUNS)} == {"a", "b"}


def test_a_name_that_is_no_object_stops_the_shards_that_see_it(littered, backend):
    backend.put("packs/zz/what", b"?")
    for shard in SHARDS:
        with pytest.raises(Malformed, match="packs/zz/what"):
            littered.gc(grace_s=0, shard=shard)
    backend.delete("packs/zz/what")
    backend.put("packs/00/what", b"?")
    with pytest.raises(Malformed, match="packs/00/what"):
        littered.gc(grace_s=0, shard="1/3")
    littered.gc(grace_s=0, shard="3/3")


# Verification


def test_the_shards_of_a_verification_read_everything_once(littered, backend, open_registry):
    whole = littered.verify(deep=True)
    parts = [open_registry(backend).verify(deep=True, shard=shard) for shard in SHARDS]
    assert all(one.ok and one.findings == () for one in parts)
    assert (
        sum(one.data.packs for one in parts)
        == sum(one.data.packs_read for one in parts)
        == whole.data.packs
    )
    assert sum(one.data.bytes_read for one in parts) == whole.data.bytes_read
    calls = []
    with open_on(Metered(backend, calls)) as opened:
        for shard in SHARDS:
            opened.verify(deep=True, shard=shard)
    got = [call.key for call in calls if call.method == "get" and call.byte_range is None]
    read = [key for key in got if key.startswith(("packs/", "manifests/", "placements/"))]
    assert sorted(read) == sorted(objects(backend))


def test_damage_is_found_by_its_shard_with_all_that_it_affects(littered, backend, open_registry):
    place = littered.run("b").latest().handle.reader
    pack = str(place.placement.packs[0].key)
    flip(backend, pack)
    refs = littered.verify(deep=True).findings[0].affects
    for shard in SHARDS:
        found = list(open_registry(backend).verify(deep=True, shard=shard).findings)
        if of_shard([pack], shard):
            assert [(one.where, one.severity, one.affects) for one in found] == [
                (pack, "error", refs)
            ]
        else:
            assert found == []


def test_what_is_missing_is_found_by_the_shard_of_its_manifest(littered, backend, open_registry):
    place = littered.run("b").latest().handle.reader
    pack, manifest = str(place.placement.packs[0].key), str(place.place.manifest_key)
    backend.delete(pack)
    for shard in SHARDS:
        found = open_registry(backend).verify(shard=shard).findings
        assert [one.where for one in found] == [pack] * bool(of_shard([manifest], shard))


def test_a_shard_says_nothing_of_damage_elsewhere(tmp_path):
    with holdfast.init(tmp_path / "reg", skip_race_probe=True) as reg:
        run = reg.create_run("a")
        save_small(run, 1, 2, 3)
        pack = run.latest().handle.reader.placement.packs[0].key
        flip(reg.handle.store.backend, str(pack))
        assert not reg.verify(deep=True).ok
        whole = last_verify(reg.handle.store)
        for shard in SHARDS:
            report = reg.verify(shard=shard)
            assert [one.where for one in report.standing] == [str(pack)]
            part = last_verify(reg.handle.store)
            assert part.depths == whole.depths
        others = [shard for shard in SHARDS if not Shard.parse(shard).has(pack)]
        assert reg.verify(deep=True, shard=others[0]).standing
        assert last_verify(reg.handle.store).depth == "sample"
        reg.handle.store.backend.delete(str(pack))
        for shard in SHARDS:  # those that do not check its state know no better
            found = reg.verify(deep=True, shard=shard)
            assert {one.where for one in (*found.findings, *found.standing)} == {str(pack)}
        assert [one.kind for one in reg.verify().findings] == ["missing"]
        for shard in SHARDS:
            found = reg.verify(shard=shard)
            assert {one.where for one in (*found.findings, *found.standing)} == {str(pack)}
