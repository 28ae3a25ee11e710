"""Archived packs of a bucket: nothing relies on them, nothing fails on them, they come back."""

from __future__ import annotations

import numpy as np
import pytest

import holdfast
from holdfast import Storing, sync
from holdfast.registry.errors import Archived, InvalidInput
from holdfast.registry.face.factory import open_on
from holdfast.registry.writing.object_writer import ObjectWriter
from tests.support.stores import new_backend


def state(step: int) -> dict[str, dict[str, np.ndarray]]:
    """A model that changes with each step beside a base that never does."""
    random = np.random.default_rng(step)
    base = np.random.default_rng(0).random(50_000)
    return {"model": {"w": random.random(50_000)}, "base": {"w": base}}


@pytest.fixture
def reg(s3_url):
    """A bucket with a completed run of three saves."""
    with holdfast.init(s3_url(), skip_race_probe=True) as made:
        run = made.create_run("old", seed=1)
        for step in (1, 2, 3):
            run.save(state(step), step=step)
        run.status = "completed"
        yield made


FIRST = "old/main/step1"


def same(stored: holdfast.Checkpoint, step: int) -> bool:
    loaded = stored.load()
    return all(np.array_equal(loaded[k]["w"], v["w"]) for k, v in state(step).items())


def test_archived_state_waits_and_all_others_go_on(reg):
    report = reg.tier([FIRST], "GLACIER")
    # The base is stored once, and steps 2 and 3 need it.
    assert (report.packs, report.kept_packs) == (1, 1)
    with pytest.raises(Archived, match=r"an archive.*restore_days"):
        reg.checkpoint(FIRST).load()
    assert same(reg.checkpoint("old/main/step2"), 2)
    assert np.array_equal(
        reg.checkpoint(FIRST).load(only="base")["base"]["w"], state(0)["base"]["w"]
    )
    verified = reg.verify(deep=True)
    assert verified.ok
    assert verified.data.packs_archived == 1
    usage = reg.usage()
    assert usage.total_bytes == sum(one.size_bytes for one in reg.handle.store.backend.list())
    assert usage.runs[0].states[0].own_bytes >= 400_000  # still its own
    assert usage.dead_bytes == 0
    with pytest.raises(Archived):
        reg.repack()
    with pytest.raises(Archived):
        reg.fork(FIRST, "new").save(state(9), step=9)


def test_restored_state_is_read_and_moved_back(reg):
    reg.tier([FIRST], "GLACIER")
    with pytest.raises(Archived):
        reg.tier([FIRST], "STANDARD")
    assert reg.tier([FIRST], restore_days=2, dry_run=True).packs == 1
    with pytest.raises(Archived):
        reg.checkpoint(FIRST).load()
    assert reg.tier(["old"], restore_days=2).packs == 1
    assert same(reg.checkpoint(FIRST), 1)
    assert reg.tier([FIRST], "STANDARD").packs == 2
    assert reg.tier([FIRST], restore_days=2).packs == 0


@pytest.mark.parametrize("looks", [True, False])
def test_content_in_an_archive_is_stored_again(reg, looks, monkeypatch):
    reg.tier(["old"], "GLACIER")
    if not looks:  # the put itself finds it
        monkeypatch.setattr(ObjectWriter, "verified", lambda *_: None)
    again = reg.create_run("again", seed=2)
    again.save(state(1), step=1)
    assert same(reg.checkpoint("again/latest"), 1)
    assert same(reg.checkpoint(FIRST), 1)  # under the same key, so it is back
    with pytest.raises(Archived):
        reg.checkpoint("old/main/step2").load()


def test_run_in_training_keeps_its_newest_and_a_collection_frees_archives(reg):
    run = reg.create_run("new", seed=3)
    for step in (11, 12):
        run.save(state(step), step=step)
    report = reg.tier(["new", "old"], "DEEP_ARCHIVE")
    assert (report.packs, report.kept_packs) == (4, 1)
    assert same(run.latest(), 12)
    run.save(state(13), step=13)
    assert same(run.latest(), 13)
    before = reg.usage().total_bytes
    reg.run("old").retention.drop("over", now=True)
    reg.gc(grace_s=0)
    assert before - reg.usage().total_bytes > 2.9 * 400_000
    assert reg.verify().ok


def test_no_save_waits_for_an_archive(reg):
    """Neither for the older entries of a stream, nor for the version that a delta would have."""
    run = reg.create_run("new", seed=3)
    saved = np.zeros(50_000)
    for step in (1, 2):
        saved[step] = step
        run.log({"loss": 1.0}, step=step)
        run.save({"w": saved}, step=step, storing=Storing(keyframe_every=4))
    run.status = "interrupted"
    reg.tier(["new"], "GLACIER")
    run = reg.run("new")
    run.streams["log"].append({"step": 3, "loss": 0.5})
    saved[3] = 3
    run.exchange.push({"w": saved}, step=3, storing=Storing(keyframe_every=4))
    assert np.array_equal(run.latest().load()["w"], saved)
    assert run.streams["log"].read(3) == [{"step": 3, "loss": 0.5}]


def test_a_sync_copies_the_other_runs_first(reg, tmp_path):
    reg.create_run("new", seed=3).save(state(9), step=9)
    reg.tier(["old"], "GLACIER")
    with holdfast.init(tmp_path / "mirror") as mirror:
        with pytest.raises(Archived, match="Copied or up to date: new"):
            sync(reg, mirror)
        assert same(mirror.checkpoint("new/latest"), 9)


def test_a_pack_that_was_collected_meanwhile_is_passed_over(reg, monkeypatch):
    backend, move = reg.handle.store.backend, reg.handle.store.backend.move_to_class

    def collected_first(key: str, storage_class: str) -> None:
        backend.delete(key)
        move(key, storage_class)

    monkeypatch.setattr(backend, "move_to_class", collected_first)
    assert reg.tier([FIRST], "GLACIER").packs == 0


def test_a_pack_that_was_collected_before_it_is_looked_at_is_passed_over(reg, monkeypatch):
    reg.tier(["old"], "GLACIER")
    backend, stat = reg.handle.store.backend, reg.handle.store.backend.stat
    gone = []

    def collected_first(key: str):
        if not gone:
            gone.append(key)
            backend.delete(key)
        return stat(key)

    monkeypatch.setattr(backend, "stat", collected_first)
    report = reg.tier([FIRST], restore_days=2)
    assert len(gone) == 1
    assert report.packs == 1, "the other one"


def test_refusals_say_what_there_is(reg):
    for given in ({}, {"storage_class": "GLACIER", "restore_days": 2}, {"restore_days": 0}):
        with pytest.raises(InvalidInput):
            reg.tier(["old"], **given)
    with pytest.raises(InvalidInput, match=r"GLACIER_IR.*found ICE"):
        reg.tier(["old"], "ICE")
    with open_on(new_backend()) as folder:
        folder.create_run("run")
        with pytest.raises(InvalidInput, match="a bucket on S3"):
            folder.tier(["run"], "GLACIER")


def test_packs_are_put_in_the_class_and_with_the_tags_of_the_options(s3_url):
    """Nothing else is: other objects are small, or deleted soon, which such classes charge for."""
    url = s3_url()
    added = {"StorageClass": "STANDARD_IA", "Tagging": "team=vision&kind=weights"}
    with holdfast.init(
        url, skip_race_probe=True, storage_options={"s3_additional_kwargs": added}
    ) as made:
        made.create_run("old", seed=1).save(state(1), step=1)
        backend = made.handle.store.backend
        while hasattr(backend, "inner"):
            backend = backend.inner
        client = backend._client()
        for info in backend.list():
            named = backend._object(info.key)
            is_pack = info.key.startswith("packs/")
            found = client.head_object(**named).get("StorageClass", "STANDARD")
            assert found == ("STANDARD_IA" if is_pack else "STANDARD"), info.key
            tags = client.get_object_tagging(**named)["TagSet"]
            assert {one["Key"]: one["Value"] for one in tags} == (
                {"team": "vision", "kind": "weights"} if is_pack else {}
            )
        assert same(made.checkpoint("old/latest"), 1)
