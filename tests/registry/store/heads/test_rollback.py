"""A log that is shorter than it was seen, or another one: who refuses it, and who goes on."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import holdfast
from holdfast.backends import parse
from holdfast.backends.wrappers import Metered, Wrapper
from holdfast.registry.errors import Conflict, Damaged, RolledBack
from holdfast.registry.face.factory import open_on
from holdfast.registry.face.registry import Registry
from holdfast.registry.history import log as log_module
from holdfast.registry.history.epochs import Epochs
from holdfast.registry.store.heads import open_heads
from tests.support.faults import Hooked, Once, flip
from tests.support.states import save_small, small_state
from tests.support.stores import new_backend


@pytest.fixture(autouse=True)
def short_snapshots(monkeypatch):
    """Let snapshots skip slots in logs of a few slots."""
    monkeypatch.setattr(log_module, "SNAPSHOT_EVERY", 6)


def save(place: Path, steps: range, *, remember: bool = True, salt: int = 0) -> None:
    with holdfast.open(place, remember=remember) as reg:
        run = reg.run("night", create=True, seed=1)
        run.restore()
        for step in steps:
            run.save(small_state(step + salt), step=step)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A registry that has a run of which this machine has seen five commits."""
    holdfast.init(tmp_path / "reg", skip_race_probe=True).close()
    save(tmp_path / "reg", range(1, 3))
    shutil.copytree(tmp_path / "reg", tmp_path / "older")
    save(tmp_path / "reg", range(3, 5))
    return tmp_path / "reg"


def last_slot(place: Path) -> Path:
    return max((place / "runs/night/log").iterdir())


def put_older(place: Path) -> None:
    shutil.rmtree(place)
    shutil.copytree(place.with_name("older"), place)


def delete_last_slot(place: Path) -> None:
    last_slot(place).unlink()


def delete_run(place: Path) -> None:
    shutil.rmtree(place / "runs/night")


def fork_equal(place: Path) -> None:
    """Another history of the same length: an older copy that others have saved to."""
    put_older(place)
    save(place, range(3, 5), remember=False, salt=100)


def fork_longer(place: Path) -> None:
    """The same, so long that a snapshot skips the head that was seen."""
    put_older(place)
    save(place, range(3, 20), remember=False, salt=100)
    assert len(list((place / "runs/night/snapshots").iterdir())) > 1


HARMS = [put_older, delete_last_slot, delete_run, fork_equal, fork_longer]
harms = pytest.mark.parametrize("harm", HARMS, ids=lambda harm: harm.__name__)


@harms
def test_whoever_reads_by_name_is_refused_until_it_is_trusted(place, harm):
    harm(place)
    before = {p: p.read_bytes() for p in place.rglob("*") if p.is_file()}
    acts: list[Callable[[Registry], object]] = [
        lambda reg: reg.run("night"),
        lambda reg: reg.run("night", create=True, seed=1),
        lambda reg: reg.checkpoint("night"),
        lambda reg: reg.checkpoint("night/main/step00000001"),
        lambda reg: reg.create_run("night", seed=1),
        lambda reg: reg.fork("night", "wide"),
    ]
    for act in acts:
        with holdfast.open(place) as reg, pytest.raises(RolledBack) as caught:
            act(reg)
        assert str(place) in str(caught.value.where)
        assert f"holdfast trust {parse(place).url}" in str(caught.value.hint)
    assert before == {p: p.read_bytes() for p in place.rglob("*") if p.is_file()}
    assert holdfast.trust(place)
    with holdfast.open(place) as reg:
        if harm is not delete_run:
            assert reg.checkpoint("night").load() is not None


@harms
def test_collection_deletes_nothing(place, harm):
    harm(place)
    with holdfast.open(place) as reg, pytest.raises(RolledBack):
        reg.gc(grace_s=0)
    holdfast.trust(place)
    with holdfast.open(place) as reg:
        reg.gc(grace_s=0)


@harms
def test_verify_tells(place, harm):
    with holdfast.open(place) as reg:
        assert reg.verify().ok
    harm(place)
    with holdfast.open(place) as reg:
        (found,) = [one for one in reg.verify().findings if one.kind == "head"]
    assert (found.where, found.severity) == ("night", "error")
    assert "this machine has seen" in found.message
    assert "holdfast trust" in found.advice
    with holdfast.open(place, remember=False) as reg:
        assert not [one for one in reg.verify().findings if one.kind == "head"]


@harms
def test_sync_takes_nothing_from_it_and_gives_it_nothing(place, harm, tmp_path):
    with holdfast.init(tmp_path / "mirror", skip_race_probe=True) as mirror:
        mirror.create_run("other", seed=1).save(small_state(1), step=1)
        holdfast.sync(place, mirror)
        save(place, range(20, 21))
    harm(place)
    with pytest.raises(RolledBack, match="night"):
        holdfast.sync(place, tmp_path / "mirror")
    with pytest.raises(RolledBack, match="Copied or up to date: other") as caught:
        holdfast.sync(tmp_path / "mirror", place)
    assert "Not copied: night" in str(caught.value.hint)


def test_an_id_names_the_same_bytes_however_old_the_log_is(place):
    with holdfast.open(place) as reg:
        ids = [checkpoint.digest.hex() for checkpoint in reg.run("night").checkpoints()]
    put_older(place)
    with holdfast.open(place) as reg:
        for ref in (ids[0], f"night/{ids[0][:12]}"):
            assert reg.checkpoint(ref).load()["optimizer"]["step"] == 1
        with pytest.raises(RolledBack):
            reg.run("night")  # what was read by id is not taken for what was seen


def test_runs_that_are_gone_are_named(place, caplog):
    delete_run(place)
    with holdfast.open(place) as reg:
        assert reg.run_names() == []
    assert "the run night was here and is gone" in caplog.text


def test_a_handle_misses_the_run_that_it_saw_begin(tmp_path, caplog):
    place, mirror = tmp_path / "reg", tmp_path / "mirror"
    holdfast.init(mirror, skip_race_probe=True).close()
    with holdfast.init(place, skip_race_probe=True) as reg:
        reg.create_run("night", seed=1).save(small_state(1), step=1)
        delete_run(place)
        with pytest.raises(RolledBack, match="night"):
            reg.gc(grace_s=0)
        assert [one.where for one in reg.verify().findings if one.kind == "head"] == ["night"]
        with pytest.raises(RolledBack, match="Not copied: night"):
            holdfast.sync(reg, mirror)
        caplog.clear()
        assert reg.run_names() == []
        assert "the run night was here and is gone" in caplog.text
    assert any((place / "packs").rglob("*.0"))


def test_another_registry_at_the_same_place_is_refused(place, monkeypatch):
    shutil.rmtree(place)
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("HOLDFAST_HEADS", "0")
        made = holdfast.init(place, skip_race_probe=True)
        made.close()
    with pytest.raises(Conflict, match="not the registry that this machine") as caught:
        holdfast.open(place)
    assert caught.value.found == made.id
    holdfast.open(place, expect_id=made.id).close()
    holdfast.open(place).close()  # what was expected by its id is the one that counts now


def test_a_registry_that_is_made_here_takes_the_place_of_the_last_one(place):
    shutil.rmtree(place)
    holdfast.init(place, skip_race_probe=True).close()
    save(place, range(1, 2))
    with holdfast.open(place) as reg:
        assert [checkpoint.step for checkpoint in reg.run("night").checkpoints()] == [1]


def test_an_epoch_that_is_lost_stops_whoever_writes(place):
    with holdfast.open(place) as reg:
        reg.run("night").retention.drop("over", now=True)
        assert reg.gc(grace_s=0).epoch == 1
    (place / "epochs/00000000000000000001").unlink()
    with holdfast.open(place) as reg:
        with pytest.raises(RolledBack, match="log of epochs"):
            reg.create_run("other", seed=1)
        with pytest.raises(RolledBack, match="log of epochs"):
            reg.gc(grace_s=0)
        told = [one.message for one in reg.verify().findings if one.kind == "epoch"]
    assert any("this machine has seen epoch 1" in message for message in told)


def remembering(backend) -> Registry:
    """Open a registry in memory with a memory of its own."""
    return open_on(backend, heads=open_heads(parse("s3://bucket/registry")))


def filled(commits: int):
    backend = new_backend()
    with remembering(backend) as reg:
        run = reg.create_run("run", seed=1)
        save_small(run, *range(1, commits))
    return backend


def test_a_head_that_a_snapshot_skips_is_proved_by_one_request():
    backend = filled(4)
    with open_on(backend) as reg:
        for n in range(8):
            reg.run("run").pins.tags.set(f"more{n}", reg.run("run").latest())
    with open_on(Metered(backend, calls := [])) as reg:
        reg.run("run")
    plain = sorted(f"{call.method} {call.key}" for call in calls)
    with remembering(Metered(backend, calls := [])) as reg:
        reg.run("run")
    proved = sorted(f"{call.method} {call.key}" for call in calls)
    slot = "get runs/run/log/00000000000000000003"
    assert slot not in plain
    assert proved == sorted([*plain, slot])
    with remembering(Metered(backend, calls := [])) as reg:
        reg.run("run")
    assert sorted(f"{call.method} {call.key}" for call in calls) == plain


def test_a_head_whose_slot_is_damaged_is_not_proved():
    backend = filled(4)
    with open_on(backend) as reg:
        for n in range(8):
            reg.run("run").pins.tags.set(f"more{n}", reg.run("run").latest())
    flip(backend, "runs/run/log/00000000000000000003")
    with open_on(backend) as reg:
        reg.run("run")  # a snapshot skips it
    with remembering(backend) as reg, pytest.raises(Damaged):
        reg.run("run")


def test_a_head_that_was_seen_by_a_snapshot_alone_is_proved_by_what_came_after():
    """Collectors marked a finished run so often that no commit stands behind its snapshot."""
    from holdfast.registry.history.actions import Mark
    from holdfast.registry.history.epochs import encode_upgrade
    from holdfast.registry.history.log import RunLog
    from holdfast.registry.objects.keys import epoch_key

    def mark(backend, count):
        with open_on(backend) as reg:
            log = RunLog(reg.handle.store, "run")
            log.open()
            for _ in range(count):
                log.append(lambda state: [Mark(epoch=1)])

    backend = filled(3)
    backend.put(epoch_key(1), encode_upgrade(1, 1))
    mark(backend, 13)
    with open_on(backend, heads=(heads := open_heads(parse("s3://bucket/other")))) as reg:
        reg.run("run")
    assert heads.seen("run").slot is None
    mark(backend, 3)
    with open_on(backend) as reg:
        for n in range(8):
            reg.run("run").pins.tags.set(f"more{n}", reg.run("run").latest())
    with open_on(backend, heads=open_heads(parse("s3://bucket/other"))) as reg:
        assert reg.run("run").manifest.commits == 11


def test_a_commit_of_another_thread_meanwhile_is_no_rollback():
    backend = Hooked(filled(4))
    with remembering(backend) as reg:
        run = reg.run("run")
        commit = Once("runs/run/log/", lambda: run.pins.tags.set("meanwhile", run.latest()), "get")
        backend.before = commit
        assert reg.run("run").manifest.commits == 4
        assert commit.done
        backend.before = Once(
            "runs/run/log/00000000000000000001",
            lambda: run.pins.tags.set("again", run.latest()),
            "get",
        )
        reg.gc(grace_s=0)
        assert backend.before.done
        assert reg.run("run").manifest.commits == 6


def test_an_epoch_of_another_collection_meanwhile_is_no_rollback():
    class Late(Wrapper):
        """Lists epochs, and lets another one be seen before it says so."""

        def list(self, prefix="", **options):
            found = list(self.inner.list(prefix, **options))
            if prefix == "epochs/":
                reg.handle.store.heads.check_epoch(3)
            return iter(found)

    with remembering(Late(new_backend())) as reg:
        assert Epochs(reg.handle.store).observe() == 0
        assert reg.handle.store.heads.epoch == 3
        with pytest.raises(RolledBack, match="log of epochs"):
            Epochs(reg.handle.store).observe()


def test_readers_and_a_trainer_of_one_handle_never_raise_an_alarm():
    backend = filled(2)
    with remembering(backend) as reg:
        run = reg.run("run")
        stop, wrong = threading.Event(), []

        def read() -> None:
            while not stop.is_set():
                try:
                    reg.run("run").latest()
                except RolledBack as error:
                    wrong.append(error)
                    return

        readers = [threading.Thread(target=read) for _ in range(3)]
        for reader in readers:
            reader.start()
        for n in range(60):
            run.pins.tags.set(f"more{n}", run.latest())
        stop.set()
        for reader in readers:
            reader.join()
        assert not wrong
