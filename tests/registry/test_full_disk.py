"""A full disk: it can be helped by `prune` and `gc`, and a save that cannot fit says so first."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import holdfast
from holdfast import Retention, Storing
from holdfast.backends.local import reserve
from holdfast.registry.errors import StoreFull
from holdfast.registry.face.registry import Registry
from holdfast.registry.objects.keys import snapshot_key
from holdfast.registry.upkeep import gc
from tests.support.states import save_small, small_state
from tests.support.stores import packs_of

MOUNT_BYTES = 8 * 2**20
#: Enough for what the tests make, and for a reserve.
MOUNT_FILES = 600


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Return the folder of a small file system of its own."""
    place = tmp_path / "disk"
    place.mkdir()
    options = f"size={MOUNT_BYTES},nr_inodes={MOUNT_FILES},mode=700"
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)]
    if shutil.which("mount") is None or subprocess.run(command, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


@pytest.fixture
def reg(disk: Path) -> Iterator[Registry]:
    with holdfast.init(disk / "r", skip_race_probe=True) as opened:
        yield opened


def until_full() -> pytest.RaisesExc[OSError]:
    return pytest.raises(OSError, check=lambda error: error.errno == errno.ENOSPC)


def fill_bytes(disk: Path) -> None:
    """Write until not one more byte fits."""
    with (disk / "ballast").open("ab", buffering=0) as file:
        for size in (2**16, 4096, 1):
            with until_full():
                while True:
                    file.write(bytes(size))


def fill_files(disk: Path) -> None:
    """Make files until the file system has no more."""
    (disk / "many").mkdir(exist_ok=True)
    with until_full():
        while True:
            (disk / "many" / secrets.token_hex(8)).touch()


both_fills = pytest.mark.parametrize("fill", [fill_bytes, fill_files])


def state_of(kib: int, seed: int) -> dict:
    return {"model": {"w": np.random.default_rng(seed).integers(0, 256, kib * 1024, np.uint8)}}


def set_aside(disk: Path) -> int:
    folder = disk / "r" / reserve.RESERVE
    return sum(path.stat().st_blocks * 512 for path in folder.iterdir()) if folder.is_dir() else 0


def free_bytes(disk: Path) -> int:
    return reserve.free_bytes(str(disk))


@both_fills
@pytest.mark.parametrize("grace_s", [0, 1e-9])
def test_a_full_disk_is_helped(
    disk: Path, reg: Registry, fill: Callable[[Path], None], grace_s: float
) -> None:
    """A grace of next to nothing asks for the store's time, which takes a file."""
    runs = [reg.create_run(f"run{number}", seed=number) for number in range(12)]
    for number, run in enumerate(runs):
        run.save(small_state(number), step=1)
    for step in range(2, 14):
        runs[0].save(state_of(128, step), step=step)
    fill(disk)
    with pytest.raises(StoreFull):
        runs[1].save(state_of(64, 99), step=2)
    runs[0].retention.prune(Retention(last=1))
    fill(disk)
    report = reg.gc(grace_s=grace_s)
    assert report.epoch == 1
    assert report.deleted.size_bytes >= 11 * 128 * 1024
    assert {reg.run(run.id).manifest.epoch for run in runs} == {1}
    assert free_bytes(disk) > 128 * 1024
    assert set_aside(disk) > 0
    with holdfast.open(disk / "r") as again:
        again.run("run1").save(small_state(98), step=3)
        assert again.verify(deep=True).findings == ()


@pytest.mark.sometimes("a full store condemns what its reserve has space for")
def test_what_the_reserve_has_no_space_for_is_condemned_next(
    disk: Path, reg: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gc, "_CONDEMNED_WHEN_FULL", 3)
    run = reg.create_run("run", seed=1)
    for step in range(1, 6):
        run.save(state_of(200, step), step=step)
    fill_bytes(disk)
    run.retention.prune(Retention(last=1))
    fill_bytes(disk)
    told: list[int] = []
    report = reg.gc(grace_s=0, progress=told.append)
    assert (report.epoch, report.condemned.objects, report.deleted.objects) == (2, 12, 12)
    assert told == sorted(told)
    assert told[-1] == report.freed_bytes
    assert reg.gc(grace_s=0).condemned.objects == 0


def leave_unfinished(root: Path) -> Path:
    path = root / ".tmp" / f"1-{'a' * 16}"
    path.write_bytes(bytes(200_000))
    os.utime(path, (0, 0))
    return path


def leave_snapshots(root: Path) -> Path:
    """Leave two more snapshots than stay; return the older one."""
    paths = [root / snapshot_key("run", slot) for slot in range(4)]
    for path in paths:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(100_000))
    return paths[0]


@pytest.mark.parametrize("leave", [leave_unfinished, leave_snapshots])
def test_what_takes_no_space_to_delete_goes_first(
    disk: Path, reg: Registry, leave: Callable[[Path], Path]
) -> None:
    """So a registry that has no reserve yet can be helped as well."""
    run = reg.create_run("run", seed=1)
    save_small(run, 1, 2, 3)
    run.retention.prune(Retention(last=1))
    shutil.rmtree(disk / "r" / reserve.RESERVE)
    left = leave(disk / "r")
    fill_bytes(disk)
    report = reg.gc(grace_s=0)
    assert not left.exists()
    assert report.epoch == 1
    assert report.stale.size_bytes + report.unfinished_bytes == 200_000
    assert report.deleted.objects > 0


def test_a_drop_uses_the_reserve_too(disk: Path, reg: Registry) -> None:
    run = reg.create_run("run", seed=1)
    run.save(state_of(256, 1), step=1)
    fill_bytes(disk)
    run.retention.drop("the disk is full", now=True)
    assert reg.gc(grace_s=0).deleted.size_bytes > 256 * 1024


def test_the_reserve_takes_no_more_than_half_of_what_is_free(disk: Path) -> None:
    with holdfast.init(disk / "r", skip_race_probe=True) as reg:
        (disk / "ballast").write_bytes(bytes(free_bytes(disk) - 300_000))
        reg.create_run("run", seed=1)
        assert 100_000 < set_aside(disk) <= 150_000
        (disk / "ballast").unlink()
        reg.gc()
    assert set_aside(disk) == reserve.FILE_BYTES * (reserve.BASE_FILES + 1)


def test_the_reserve_is_restored_and_grows_with_the_runs(disk: Path, reg: Registry) -> None:
    for number in range(4):
        reg.create_run(f"run{number}", seed=number)
    assert set_aside(disk) == reserve.FILE_BYTES * reserve.BASE_FILES
    reg.gc()
    assert set_aside(disk) == reserve.FILE_BYTES * (reserve.BASE_FILES + 4)
    assert reg.handle.store.backend.give_up_reserve(3) == 3
    assert reg.handle.store.backend.give_up_reserve() == reserve.BASE_FILES + 1
    assert set_aside(disk) == 0
    with holdfast.open(disk / "r") as again:
        assert again.run("run0").manifest.checkpoints == ()
        assert set_aside(disk) == 0, "reading writes nothing"
        again.run("run0").save(small_state(), step=1)
    assert set_aside(disk) == reserve.FILE_BYTES * (reserve.BASE_FILES + 4)


# A save that cannot fit


def objects(disk: Path) -> set[str]:
    return {p.name for kind in ("packs", "manifests") for p in (disk / "r" / kind).rglob("*.*")}


def test_a_save_that_cannot_fit_says_so_before_it_writes(disk: Path, reg: Registry) -> None:
    run = reg.create_run("run", seed=1)
    run.save(state_of(1024, 1), step=1)
    before = objects(disk)
    big = {f"part{n}": state_of(2048, 10 + n)["model"] for n in range(5)}
    with pytest.raises(StoreFull, match="not enough free space") as caught:
        run.save(big, step=2)
    needed, found = (
        int(str(text).split()[0]) for text in (caught.value.expected, caught.value.found)
    )
    assert found == free_bytes(disk) < needed <= 5 * 2**21 + 2**16
    assert objects(disk) == before
    assert run.latest().step == 1
    assert set_aside(disk) > 0, "a save never uses the reserve"


def test_what_is_stored_already_takes_no_space(disk: Path, reg: Registry) -> None:
    """States larger than the free space: one repeats chunks, one packs of another run."""
    run = reg.create_run("run", seed=1)
    state = state_of(4500, 1)
    first = run.save(state, step=1)
    assert free_bytes(disk) < 4500 * 1024
    again = run.save({**state, "head": state_of(16, 2)["model"]}, step=2)
    assert packs_of(first)[0] in packs_of(again)
    twice = {"one": state_of(2000, 3)["model"], "two": state_of(2000, 3)["model"]}
    assert free_bytes(disk) < 4000 * 1024
    run.save(twice, step=3)
    other = reg.create_run("other", seed=2)
    assert packs_of(other.save(state, step=1)) == packs_of(first)


def test_a_compressed_save_is_refused_by_the_pack(disk: Path, reg: Registry) -> None:
    run = reg.create_run("run", seed=1)
    zeros = {"model": {"w": np.zeros(9 * 2**20, np.uint8)}}
    run.save(zeros, step=1, storing=Storing(compression="zstd"))
    before = objects(disk)
    with pytest.raises(StoreFull, match="not enough free space"):
        run.save(state_of(9 * 1024, 1), step=2, storing=Storing(compression="zstd"))
    assert objects(disk) == before
