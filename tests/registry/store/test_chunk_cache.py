"""The chunk cache: what was fetched once is not fetched again, and nothing depends on it."""

from __future__ import annotations

import errno
import fcntl
import gc
import hashlib
import logging
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import holdfast
from holdfast import Storing
from holdfast.backends import ByteRange
from holdfast.backends.wrappers import Metered
from holdfast.registry.errors import Damaged, InvalidInput
from holdfast.registry.face.factory import open_on
from holdfast.registry.objects import codecs
from holdfast.registry.objects.keys import ObjectKey
from holdfast.registry.objects.pack import PackEntry, PackTable, trailer
from holdfast.registry.objects.placement import (
    NO_BASE,
    ChunkIndex,
    ChunkRow,
    PackRef,
    Placement,
    Rows,
)
from holdfast.registry.store import cache_folder, chunk_cache, fetching
from holdfast.registry.store.chunk_cache import ChunkCache
from holdfast.registry.values.digest import Digest
from tests.support.faults import Hooked, Once, flip
from tests.support.states import same, small_state
from tests.support.stores import new_backend, packs_of, small_grid

KIB, MIB = 2**10, 2**20


class World:
    """A registry, and handles that meter what they ask of it and share one cache folder."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        self.backend = new_backend()
        self.path = path
        self.calls: list = []
        self._stack = stack

    @property
    def folder(self) -> Path:
        return self.path / "chunks-v1"

    def open(self, cache: ChunkCache | None = None, backend=None):
        """Return a handle that remembers nothing."""
        self.calls.clear()
        metered = Metered(self.backend if backend is None else backend, self.calls)
        cache = ChunkCache(self.path, max_bytes=64 * MIB) if cache is None else cache
        return self._stack.enter_context(open_on(metered, cache=cache))

    def latest(self, **how):
        return self.open(**how).run("run").latest()

    def save(self, state, step=1, **how):
        with open_on(self.backend) as plain:
            return plain.run("run", create=True).save(state, step=step, **how).digest

    def packs_asked(self) -> list:
        return [call for call in self.calls if call.key.startswith("packs/")]

    def files(self) -> dict[str, Path]:
        found = self.folder.iterdir() if self.folder.exists() else ()
        return {path.name: path for path in found if not path.name.startswith(".")}


@pytest.fixture
def world(tmp_path) -> Iterator[World]:
    with ExitStack() as stack:
        yield World(tmp_path / "cache", stack)


def chunk(seed: int, size: int) -> tuple[Digest, memoryview]:
    data = random.Random(seed).randbytes(size)
    return Digest(hashlib.sha256(data).digest()), memoryview(data)


def holds(cache: ChunkCache, digest: Digest, size: int) -> bool:
    return not cache.fill({digest: memoryview(bytearray(size))})


def age(path: Path, seconds: float) -> None:
    os.utime(path, (time.time() - seconds,) * 2)


# What is fetched


def test_a_second_load_asks_for_no_pack(world):
    world.save(small_state())
    assert same(world.latest().load(), small_state())
    assert world.packs_asked()
    assert same(world.latest().load(), small_state())
    assert world.packs_asked() == []


def test_without_a_cache_nothing_is_kept(world):
    world.save(small_state())
    with open_on(world.backend) as plain:
        assert plain.handle.store.cache is None
        plain.run("run").latest().load()
    assert not world.path.exists()


def test_the_next_checkpoint_costs_what_is_new(world):
    world.save(small_state())
    world.latest().load()
    changed = small_state()
    changed["model"] = {"w": changed["model"]["w"] + 1, "b": changed["model"]["b"]}
    world.save(changed, step=2)
    assert same(world.latest().load(), changed)
    (call,) = world.packs_asked()
    assert len(call.byte_range) == changed["model"]["w"].nbytes


def test_another_registry_gains_too_whatever_its_codec(world):
    state = {"model": {"w": np.zeros((2000, 100), np.float32)}}
    world.save(state, storing=Storing(compression="zstd"))
    world.latest().load()
    assert [path.stat().st_size for path in world.files().values()] == [800_000]
    world.backend = new_backend()
    world.save(state)
    assert same(world.latest().load(), state)
    assert world.packs_asked() == []


def test_compressed_chunks_need_neither_pack_nor_table(world):
    state = {"model": {"w": np.arange(300_000, dtype=np.int64), "v": np.ones(5000)}}
    world.save(state, storing=Storing(compression="zstd"))
    world.latest().load()
    assert same(world.latest().load(), state)
    assert world.packs_asked() == []


def test_misses_between_hits_are_still_read_together(world):
    state = {"m": {f"w{i:03}": np.arange(50) + 1000 * i for i in range(60)}}
    world.save(state)
    world.latest().load()
    names = [hashlib.sha256(value.tobytes()).hexdigest() for value in state["m"].values()]
    for name in names[20:40]:
        world.files()[name].unlink()
    assert same(world.latest().load(), state)
    (call,) = world.packs_asked()
    assert len(call.byte_range) == 20 * 400


def test_hits_are_read_in_portions(world, monkeypatch):
    monkeypatch.setattr(fetching, "_JOB_BYTES", 4000)
    portions = []
    fill = ChunkCache.fill

    def noted(self, wanted, **how):
        portions.append(sum(map(len, wanted.values())))
        return fill(self, wanted, **how)

    monkeypatch.setattr(ChunkCache, "fill", noted)
    state = {"m": {f"w{i}": np.arange(50) + 1000 * i for i in range(50)}}
    world.save(state)
    world.latest().load()
    portions.clear()
    assert same(world.latest().load(), state)
    assert portions == [4000] * 5


def test_lazy_tensors_read_single_chunks_through_it(world):
    with small_grid(list_threshold=2**20):
        state = {"model": {"w": np.arange(64 * 100, dtype=np.int32).reshape(100, 64)}}
        world.save(state)
        lazy = world.latest()["model/w"]
        assert np.array_equal(lazy[10:12], state["model"]["w"][10:12])
        assert len(world.files()) == 2
        lazy = world.latest()["model/w"]
        assert np.array_equal(lazy[10:12], state["model"]["w"][10:12])
        assert world.packs_asked() == []
        lazy[10:13]
        assert [len(call.byte_range) for call in world.packs_asked()] == [256]


def test_the_zarr_view_reads_single_chunks_through_it(world):
    pytest.importorskip("zarr")
    with small_grid(list_threshold=2**20):
        state = {"model": {"w": np.arange(64 * 100, dtype=np.int32).reshape(100, 64)}}
        world.save(state)
        for requests in (1, 0):
            array = world.latest().zarr()["model/w"]
            assert np.array_equal(array[10:11], state["model"]["w"][10:11])
            assert len(world.packs_asked()) == requests
    assert len(world.files()) == 1


def test_digest_lists_are_kept_too(world):
    with small_grid():
        state = {"model": {"w": np.arange(64 * 100, dtype=np.int32)}}
        world.save(state)
        world.latest().load()
        assert same(world.latest().load(), state)
        assert world.packs_asked() == []


def _delta(world):
    """Store a delta behind its base; return both, their digests, pack and placement."""
    rng = np.random.default_rng(1)
    base = rng.integers(0, 256, 5000, np.uint8)
    new = base.copy()
    new[:10] += 1
    frame = codecs.encode((base ^ new).tobytes(), 1, codecs.ZSTD)
    names = [Digest.of(base.tobytes()), Digest.of(new.tobytes())]
    entries = (
        PackEntry(names[0], 0, 5000, 5000, codecs.RAW),
        PackEntry(names[1], 5000, len(frame), 5000, codecs.ZSTD, names[0], Digest.of(frame)),
    )
    table = PackTable(entries).encode()
    data = base.tobytes() + frame + table + trailer(table)
    pack = PackRef(ObjectKey("packs", Digest.of(table), 0), len(data))
    world.backend.put(str(pack.key), data)
    rows = (
        ChunkRow(0, 0, 5000, codecs.CODECS.index(codecs.RAW), NO_BASE),
        ChunkRow(0, 5000, len(frame), codecs.CODECS.index(codecs.ZSTD), 0),
    )
    return base, new, names, pack, Placement(Digest.of(b""), (pack,), Rows(rows))


def test_the_base_of_a_delta_comes_from_it_and_goes_into_it(world):
    base, new, names, _, placement = _delta(world)

    def base_was_asked_for() -> bool:
        target = bytearray(5000)
        fetch = fetching.Fetch(world.open().handle.store, placement, ChunkIndex(placement, names))
        fetch.read({names[1]: memoryview(target)})
        assert target == new.tobytes()
        return ByteRange(0, 5000) in [call.byte_range for call in world.packs_asked()]

    assert base_was_asked_for()
    assert sorted(world.files()) == sorted(name.hex() for name in names)
    world.files()[names[1].hex()].unlink()
    assert not base_was_asked_for()
    assert world.packs_asked()
    assert not base_was_asked_for()
    assert world.packs_asked() == []
    # A base is hashed by what is made of it only; a wrong one is noticed and replaced all the same.
    world.files()[names[1].hex()].unlink()
    world.files()[names[0].hex()].write_bytes(bytes(5000))
    assert base_was_asked_for()
    assert world.files()[names[0].hex()].read_bytes() == base.tobytes()


def test_a_damaged_base_is_not_kept(world):
    _, new, names, pack, placement = _delta(world)
    data = bytearray(world.backend.get(str(pack.key)))
    data[7] ^= 1
    world.backend.delete(str(pack.key))
    world.backend.put(str(pack.key), bytes(data))
    fetch = fetching.Fetch(world.open().handle.store, placement, ChunkIndex(placement, names))
    with pytest.raises(Damaged):
        fetch.read({names[1]: memoryview(bytearray(len(new)))})
    assert world.files() == {}


# What is wrong


@pytest.mark.parametrize("harm", ["bit", "short", "long", "empty", "folder", "link", "pipe"])
def test_what_is_damaged_is_a_miss_and_replaced(world, tmp_path, harm):
    state = {"model": {"w": np.arange(5000)}}
    world.save(state)
    world.latest().load()
    (path,) = world.files().values()
    good = path.read_bytes()
    if harm == "bit":
        path.write_bytes(good[:999] + bytes([good[999] ^ 1]) + good[1000:])
    elif harm in ("short", "long", "empty"):
        path.write_bytes({"short": good[:-1], "long": good + b"x", "empty": b""}[harm])
    else:
        path.unlink()
        if harm == "folder":
            path.mkdir()
        elif harm == "pipe":
            os.mkfifo(path)
        else:
            elsewhere = tmp_path / "elsewhere"
            elsewhere.write_bytes(good)
            path.symlink_to(elsewhere)
    assert same(world.latest().load(), state)
    assert world.packs_asked()
    if harm == "folder":  # not ours to remove
        return
    assert path.read_bytes() == good
    assert stat.S_ISREG(path.lstat().st_mode)
    assert same(world.latest().load(), state)
    assert world.packs_asked() == []
    if harm == "link":
        assert elsewhere.read_bytes() == good


def test_nothing_unverified_gets_in(world):
    checkpoint = world.save(small_state())
    assert checkpoint
    latest = world.latest()
    for key in packs_of(latest):
        flip(world.backend, key)
    with pytest.raises(Damaged):
        latest.load()
    for name, path in world.files().items():
        assert hashlib.sha256(path.read_bytes()).hexdigest() == name


def test_the_folder_is_private_and_so_are_its_files(world):
    world.folder.mkdir(parents=True)
    world.folder.chmod(0o777)
    world.save(small_state())
    world.latest().load()
    assert stat.S_IMODE(world.folder.stat().st_mode) == 0o700
    modes = {stat.S_IMODE(path.stat().st_mode) for path in world.folder.iterdir()}
    assert modes == {0o600}


def test_a_folder_that_is_a_link_or_anothers_is_not_used(world, tmp_path, monkeypatch, caplog):
    world.save(small_state())
    (tmp_path / "trap").mkdir()
    world.path.mkdir()
    world.folder.symlink_to(tmp_path / "trap")
    assert same(world.latest().load(), small_state())
    assert list((tmp_path / "trap").iterdir()) == []
    world.folder.unlink()
    monkeypatch.setattr(cache_folder.os, "geteuid", lambda: os.getuid() + 1)
    assert same(world.latest().load(), small_state())
    assert world.files() == {}
    assert "belongs to another user" in caplog.text


def test_what_else_lies_there_stays(world):
    world.save({"model": {"w": np.arange(100_000)}})
    world.folder.mkdir(parents=True)
    (world.path / "mine").write_bytes(b"x" * 1000)
    (world.folder / "notes.txt").write_bytes(b"x" * 1000)
    cache = ChunkCache(world.path, max_bytes=1000 * KIB)
    for seed in range(40):
        cache.offer(dict([chunk(seed, 100 * KIB)]))
    assert (world.path / "mine").exists()
    assert (world.folder / "notes.txt").exists()


# What fails


@pytest.mark.parametrize("code", ["ENOSPC", "EACCES", "EROFS", "EIO", "EDQUOT", "EMFILE"])
@pytest.mark.parametrize("call", ["open", "write", "rename", "mkdir", "ftruncate"])
def test_a_cache_that_cannot_be_written_to_is_said_once(world, monkeypatch, caplog, code, call):
    state = {"model": {"a": np.arange(5000), "b": np.arange(9000)}}
    world.save(state)
    real = getattr(os, call)

    def fails(*args, **more):
        if call == "open" and not args[1] & os.O_CREAT:
            return real(*args, **more)
        raise OSError(getattr(errno, code), os.strerror(getattr(errno, code)))

    monkeypatch.setattr(cache_folder.os, call, fails)
    latest = world.latest()
    with caplog.at_level(logging.WARNING, "holdfast"):
        for _ in range(3):
            assert same(latest.load(), state)
    assert len([one for one in caplog.records if "chunk cache" in one.message]) == 1
    monkeypatch.undo()
    assert world.files() == {}


def test_after_a_failure_nothing_is_tried_for_a_while(tmp_path, monkeypatch):
    cache, (digest, data) = ChunkCache(tmp_path, max_bytes=MIB), chunk(1, 1000)
    tried = []

    def full(*args):
        tried.append(args)
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(cache_folder.os, "ftruncate", full)
    for _ in range(3):
        cache.offer({digest: data})
    assert len(tried) == 1
    monkeypatch.undo()
    cache.offer({digest: data})
    assert not holds(cache, digest, 1000)
    later = time.monotonic() + 61
    clock = SimpleNamespace(monotonic=lambda: later, time=time.time)
    monkeypatch.setattr(chunk_cache, "time", clock)
    cache.offer({digest: data})
    assert holds(cache, digest, 1000)


@pytest.mark.parametrize("code", ["EACCES", "EIO", "ESTALE"])
def test_a_cache_that_cannot_be_read_is_said_once(world, monkeypatch, caplog, code):
    world.save(small_state())
    world.latest().load()
    real = os.open

    def fails(path, flags, *args, **more):
        if len(str(path)) == 64:
            raise OSError(getattr(errno, code), os.strerror(getattr(errno, code)))
        return real(path, flags, *args, **more)

    monkeypatch.setattr(chunk_cache.os, "open", fails)
    with caplog.at_level(logging.WARNING, "holdfast"):
        assert same(world.latest().load(), small_state())
    assert world.packs_asked()
    assert len([one for one in caplog.records if "chunk cache" in one.message]) == 1


def test_a_read_only_folder_still_has_hits(world, monkeypatch):
    world.save(small_state())
    world.latest().load()
    for path in world.files().values():
        age(path, 9000)
    real = os.open

    def read_only(path, flags, *args, **more):
        if flags & (os.O_CREAT | os.O_WRONLY | os.O_RDWR):
            raise OSError(errno.EROFS, "read-only")
        return real(path, flags, *args, **more)

    def refuse(*args, **more):
        raise OSError(errno.EROFS, "read-only")

    monkeypatch.setattr(os, "open", read_only)
    monkeypatch.setattr(os, "utime", refuse)
    assert same(world.latest().load(), small_state())
    assert world.packs_asked() == []


def test_a_disk_without_locks_of_open_files_costs_no_file(world, monkeypatch):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(
        cache_folder, "fcntl", SimpleNamespace(**{**vars(fcntl), "fcntl": no_locks})
    )
    world.save(small_state())
    gc.collect()
    before = len(list(Path("/dev/fd").iterdir()))
    for _ in range(3):
        shutil.rmtree(world.path / "chunks-v1", ignore_errors=True)
        assert same(world.latest().load(), small_state())
    gc.collect()
    assert len(list(Path("/dev/fd").iterdir())) <= before


def test_a_disk_that_fails_at_a_release_is_no_failure_and_costs_no_file(world, monkeypatch):
    real, unlock = os.close, fcntl.flock

    def close(fd):
        is_ours = "/chunks-v1" in str(Path(f"/proc/self/fd/{fd}").readlink())
        real(fd)
        if is_ours:
            raise OSError(errno.EIO, "a disk that fails")

    def flock(fd, kind):
        if kind == fcntl.LOCK_UN:
            raise OSError(errno.EIO, "a disk that fails")
        return unlock(fd, kind)

    world.save(small_state())
    gc.collect()
    before = len(list(Path("/dev/fd").iterdir()))
    monkeypatch.setattr(os, "close", close)
    monkeypatch.setattr(fcntl, "flock", flock)
    for _ in range(3):
        assert same(world.latest().load(), small_state())
    monkeypatch.undo()
    gc.collect()
    assert len(list(Path("/dev/fd").iterdir())) <= before


def test_a_file_in_the_way_is_no_failure(world):
    world.save(small_state())
    world.path.write_bytes(b"a file")
    assert same(world.latest().load(), small_state())
    assert world.path.read_bytes() == b"a file"


def test_a_folder_that_vanishes_in_the_middle_is_made_anew(world, monkeypatch):
    monkeypatch.setattr(fetching, "_JOB_BYTES", 2000)
    state = {"m": {f"w{i}": np.arange(50) + 1000 * i for i in range(100)}}
    world.save(state)
    world.latest().load()
    hooked = Hooked(world.backend)
    latest = world.latest(backend=hooked)
    for path in list(world.files().values())[::2]:
        path.unlink()
    hooked.before = gone = Once("packs/", lambda: shutil.rmtree(world.folder, True))
    assert same(latest.load(), state)
    assert gone.done
    assert world.files()


@pytest.mark.parametrize("call", ["ftruncate", "write", "rename"])
def test_a_folder_may_vanish_at_any_step(world, monkeypatch, caplog, call):
    state = {"model": {"a": np.arange(5000), "b": np.arange(9000)}}
    world.save(state)
    real = getattr(os, call)

    def vanishing(*args, **more):
        shutil.rmtree(world.path, ignore_errors=True)
        return real(*args, **more)

    monkeypatch.setattr(cache_folder.os, call, vanishing)
    latest = world.latest()
    with caplog.at_level(logging.WARNING, "holdfast"):
        assert same(latest.load(), state)
    assert not world.folder.exists()
    monkeypatch.undo()
    assert same(latest.load(), state)
    assert len(world.files()) == 2  # no pause: the folder is simply made anew
    assert caplog.text == ""


def test_a_folder_deleted_over_and_over_while_many_load(world):
    with small_grid():
        state = {"m": {f"w{i}": np.arange(3000) + 1000 * i for i in range(20)}}
        world.save(state)
        stop = threading.Event()

        def delete():
            while not stop.is_set():
                shutil.rmtree(world.path, ignore_errors=True)

        deleting = threading.Thread(target=delete)
        deleting.start()
        try:
            for _ in range(4):
                assert same(world.latest().load(), state)
        finally:
            stop.set()
            deleting.join()


def test_who_holds_the_lock_for_ever_stops_nobody(world, monkeypatch, caplog):
    monkeypatch.setattr(cache_folder, "PATIENCE_S", 0.01)
    world.save(small_state())
    world.folder.mkdir(parents=True)
    with locked(world.folder):
        assert same(world.latest().load(), small_state())
    assert "others held its lock" in caplog.text
    assert world.files() == {}
    world.latest().load()
    assert world.files()


# The bound


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    fd = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def taken(folder: Path) -> int:
    """Return the bytes of all files; the lock keeps them from being renamed meanwhile."""
    total = 0
    with locked(folder):
        for path in folder.iterdir():
            try:
                total += path.lstat().st_size
            except FileNotFoundError:  # what is removed needs no lock
                continue
    return total


def test_the_least_recently_used_goes_first(tmp_path):
    cache = ChunkCache(tmp_path, max_bytes=1000 * KIB)
    sizes = 200 * KIB
    first, second, third, fourth, fifth = (chunk(seed, sizes) for seed in range(5))
    for number, one in enumerate([first, second, third, fourth]):
        cache.offer(dict([one]))
        age(tmp_path / "chunks-v1" / one[0].hex(), 1000 - number)
    assert holds(cache, first[0], sizes)  # a hit: it is the most recently used one now
    cache.offer(dict([fifth]))
    assert [holds(cache, one[0], sizes) for one in (first, second, third, fourth, fifth)] == [
        *(True, False, True, True, True)
    ]


def test_a_hit_within_a_minute_of_the_last_writes_nothing(tmp_path, monkeypatch):
    cache = ChunkCache(tmp_path, max_bytes=MIB)
    digest, data = chunk(1, 100)
    cache.offer({digest: data})
    monkeypatch.setattr(os, "utime", lambda *args: pytest.fail("touched"))
    assert holds(cache, digest, 100)


@pytest.mark.parametrize("size", [1, 31 * KIB, 33 * KIB, 100 * KIB])
def test_the_bound_holds_for_every_size(tmp_path, size):
    cache = ChunkCache(tmp_path, max_bytes=MIB)
    for start in range(0, 100, 5):
        cache.offer(dict(chunk(seed, size) for seed in range(start, start + 5)))
        assert taken(tmp_path / "chunks-v1") <= MIB
    assert holds(cache, chunk(99, size)[0], size)
    assert not holds(cache, chunk(0, size)[0], size)


def test_what_is_larger_than_the_bound_is_not_kept(tmp_path):
    cache = ChunkCache(tmp_path, max_bytes=MIB)
    cache.offer(dict([chunk(1, 2 * MIB), chunk(2, 1000)]))
    assert not holds(cache, chunk(1, 2 * MIB)[0], 2 * MIB)
    assert holds(cache, chunk(2, 1000)[0], 1000)


def test_a_smaller_bound_shrinks_it(tmp_path):
    ChunkCache(tmp_path, max_bytes=8 * MIB).offer(
        dict(chunk(seed, 300 * KIB) for seed in range(10))
    )
    assert taken(tmp_path / "chunks-v1") > 2 * MIB
    ChunkCache(tmp_path, max_bytes=MIB).offer(dict([chunk(99, 1000)]))
    assert taken(tmp_path / "chunks-v1") <= MIB


@pytest.mark.parametrize("said", [None, b"", b"rubbish", b"%020d\n" % 0])
def test_the_number_of_bytes_is_not_believed_by_a_new_handle(tmp_path, said):
    cache = ChunkCache(tmp_path, max_bytes=MIB)
    cache.offer(dict(chunk(seed, 100 * KIB) for seed in range(5)))
    total = tmp_path / "chunks-v1" / ".total"
    if said is None:
        total.unlink()
    else:
        total.write_bytes(said)
    for seed in range(5, 20):
        ChunkCache(tmp_path, max_bytes=MIB).offer(dict([chunk(seed, 100 * KIB)]))
        assert taken(tmp_path / "chunks-v1") <= MIB


def test_files_that_were_deleted_make_room(tmp_path):
    cache = ChunkCache(tmp_path, max_bytes=MIB)
    for start in (0, 4, 8):
        cache.offer(dict(chunk(seed, 100 * KIB) for seed in range(start, start + 4)))
        for path in (tmp_path / "chunks-v1").glob("[0-9a-f]*"):
            path.unlink()
    cache.offer(dict(chunk(seed, 100 * KIB) for seed in range(20, 24)))
    assert all(holds(cache, chunk(seed, 100 * KIB)[0], 100 * KIB) for seed in range(20, 24))


def test_who_is_second_with_a_chunk_leaves_the_number_right(tmp_path, monkeypatch):
    one, other = (ChunkCache(tmp_path, max_bytes=4 * MIB) for _ in range(2))
    both = dict(chunk(seed, 100 * KIB) for seed in range(4))
    write = cache_folder.Batch.write

    def overtaken(self):
        monkeypatch.setattr(cache_folder.Batch, "write", write)
        other.offer(both)
        write(self)

    monkeypatch.setattr(cache_folder.Batch, "write", overtaken)
    one.offer(both)
    assert not list((tmp_path / "chunks-v1").glob(".new-*"))
    said = int((tmp_path / "chunks-v1" / ".total").read_bytes())
    assert said == 4 * 100 * KIB + 32 * KIB


WRITER = """
import hashlib, random, sys
from holdfast.registry.store.chunk_cache import ChunkCache
from holdfast.registry.values.digest import Digest
path, bound, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
rng = random.Random(seed)
cache = ChunkCache(path, max_bytes=bound)
print("ready", flush=True)
sys.stdin.readline()
while True:
    chunks = {}
    for _ in range(rng.randint(1, 12)):
        data = rng.randbytes(rng.choice([50_000, 131_072, 262_144]))
        chunks[Digest(hashlib.sha256(data).digest())] = memoryview(data)
    cache.offer(chunks)
"""


@contextmanager
def writers(path: Path, bound: int, count: int) -> Iterator[list[subprocess.Popen]]:
    """Processes that write until they are killed."""
    running = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), str(bound), str(seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in range(count)
    ]
    try:
        for one in running:
            assert one.stdout.readline() == "ready\n"
        for one in running:
            one.stdin.write("\n")
            one.stdin.flush()
        yield running
    finally:
        for one in running:
            one.kill()
            one.communicate()


def test_the_bound_holds_while_processes_write_and_die(tmp_path):
    bound, folder = 4 * MIB, tmp_path / "chunks-v1"
    seen, staged, names = [], 0, set()
    with writers(tmp_path, bound, 4) as running:
        while not folder.exists():
            time.sleep(0.001)
        for look in range(200):
            seen.append(taken(folder))
            now = {path.name for path in folder.iterdir()}
            staged += any(name.startswith(".new-") for name in now)
            names |= now
            if look in (75, 150):
                running[look // 75].send_signal(signal.SIGKILL)
            time.sleep(0.001)
    assert max(seen) <= bound
    assert max(seen) > 0.8 * bound  # or there was nothing to bound
    assert staged > 10  # the watcher came upon unfinished files
    assert len([name for name in names if len(name) == 64]) > 3 * bound // 131_072
    # All are dead now, whatever they left; the next one clears up and goes on.
    cache = ChunkCache(tmp_path, max_bytes=bound)
    cache.offer(dict([chunk(-1, 100 * KIB)]))
    assert holds(cache, chunk(-1, 100 * KIB)[0], 100 * KIB)
    assert not list(folder.glob(".new-*"))
    assert taken(folder) <= bound


def test_the_unfinished_files_of_the_living_are_left_alone(tmp_path, monkeypatch):
    one, other = (ChunkCache(tmp_path, max_bytes=4 * MIB) for _ in range(2))
    write = cache_folder.Batch.write

    def scanned_meanwhile(self):
        monkeypatch.setattr(cache_folder.Batch, "write", write)
        other.offer(dict([chunk(9, 1000)]))  # its first: it scans
        write(self)

    monkeypatch.setattr(cache_folder.Batch, "write", scanned_meanwhile)
    one.offer(dict(chunk(seed, 1000) for seed in range(4)))
    assert all(holds(one, chunk(seed, 1000)[0], 1000) for seed in (0, 1, 2, 3, 9))


def test_unfinished_files_count(tmp_path, monkeypatch):
    one, other = (ChunkCache(tmp_path, max_bytes=MIB) for _ in range(2))
    write = cache_folder.Batch.write
    seen = []

    def meanwhile(self):
        monkeypatch.setattr(cache_folder.Batch, "write", write)
        for start in range(10, 30, 4):
            other.offer(dict(chunk(seed, 100 * KIB) for seed in range(start, start + 4)))
            seen.append(taken(tmp_path / "chunks-v1"))
        write(self)

    monkeypatch.setattr(cache_folder.Batch, "write", meanwhile)
    one.offer(dict(chunk(seed, 100 * KIB) for seed in range(5)))
    assert len(seen) == 5
    assert max(seen) <= MIB
    assert all(holds(one, chunk(seed, 100 * KIB)[0], 100 * KIB) for seed in range(5))


def test_where_others_unfinished_files_leave_no_room_nothing_is_kept(tmp_path, monkeypatch):
    caches = [ChunkCache(tmp_path, max_bytes=MIB) for _ in range(3)]
    write = cache_folder.Batch.write
    seen = []

    def meanwhile(self):
        number = len(seen) + 1
        seen.append(taken(tmp_path / "chunks-v1"))
        if number < 3:
            caches[number].offer(dict(chunk(10 * number + n, 100 * KIB) for n in range(4)))
        write(self)

    monkeypatch.setattr(cache_folder.Batch, "write", meanwhile)
    caches[0].offer(dict(chunk(n, 100 * KIB) for n in range(4)))
    assert seen == [n * 400 * KIB + 21 for n in (1, 2)]  # the third one wrote nothing
    assert [holds(caches[0], chunk(n, 100 * KIB)[0], 100 * KIB) for n in (0, 10, 20)] == [
        *(True, True, False)
    ]


def test_what_a_dead_writer_left_is_cleared_up(tmp_path, monkeypatch):
    folder = tmp_path / "chunks-v1"
    child = os.fork()
    if not child:
        monkeypatch.setattr(cache_folder.Batch, "write", lambda self: os._exit(0))
        ChunkCache(tmp_path, max_bytes=MIB).offer(dict(chunk(n, 100 * KIB) for n in range(4)))
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert len(list(folder.glob(".new-*"))) == 4
    for foreign in (".new-notes", f".new-{'a' * 16}-x"):
        (folder / foreign).touch()
    cache = ChunkCache(tmp_path, max_bytes=MIB)
    cache.offer(dict([chunk(9, 1000)]))
    assert len(list(folder.glob(".new-*"))) == 2, "nobody knows whose these are"
    assert holds(cache, chunk(9, 1000)[0], 1000)
    assert int((folder / ".total").read_bytes()) == 4 * 32 * KIB


LOADER = """
import sys
import holdfast
from holdfast.backends import open_backend
from holdfast.backends.wrappers import Metered
from holdfast.registry.face.factory import open_on
from holdfast.registry.store.chunk_cache import ChunkCache
metered = Metered(open_backend(sys.argv[1]))
with open_on(metered, cache=ChunkCache(sys.argv[2], max_bytes=2**26)) as reg:
    checkpoint = reg.run("run").latest()
    print("ready", flush=True)
    sys.stdin.readline()
    before = metered.snapshot()
    state = checkpoint.load()
    print(metered.snapshot().since(before).read_bytes, int(state["model"]["w"].sum()), flush=True)
"""

FETCHER = """
import sys, time
from holdfast.registry.store.chunk_cache import ChunkCache
from holdfast.registry.values.digest import Digest
def fetch(lacking):
    print("fetching", flush=True)
    time.sleep(600)
digest = Digest.parse(sys.argv[2])
ChunkCache(sys.argv[1]).fetch_once({digest: memoryview(bytearray(9))}, fetch)
"""


def python(code: str, *arguments: object) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_processes_that_miss_the_same_chunks_fetch_them_once(tmp_path):
    weights = np.random.default_rng(1).integers(0, 99, 24 * MIB, np.uint8)
    with holdfast.init(tmp_path / "store", skip_race_probe=True) as reg:
        reg.create_run("run").save({"model": {"w": weights}}, step=1)
    running = [python(LOADER, tmp_path / "store", tmp_path / "cache") for _ in range(3)]
    assert [one.stdout.readline() for one in running] == ["ready\n"] * 3
    for one in running:
        one.stdin.write("\n")
        one.stdin.flush()
    told = [[int(word) for word in one.communicate()[0].split()] for one in running]
    assert {total for _, total in told} == {int(weights.sum())}
    assert weights.nbytes <= sum(read for read, _ in told) < 1.1 * weights.nbytes


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_fetcher_that_dies_or_stalls_holds_nobody_up(tmp_path, monkeypatch, how):
    monkeypatch.setattr(chunk_cache, "CLAIM_S", 60.0 if how == "killed" else 0.2)
    digest, data = chunk(1, 100)
    fetcher = python(FETCHER, tmp_path, digest)
    assert fetcher.stdout.readline() == "fetching\n"
    cache, asked, view = ChunkCache(tmp_path), [], memoryview(bytearray(100))

    def fetch(lacking):
        asked.extend(lacking)
        view[:] = data
        return {digest: view}

    waiter = threading.Thread(target=cache.fetch_once, args=({digest: view}, fetch))
    waiter.start()
    try:
        if how == "killed":
            waiter.join(0.1)
            assert not asked, "somebody else is fetching it"
            fetcher.kill()
        waiter.join(300)
        assert not waiter.is_alive()
        assert asked == [digest]
        assert holds(cache, digest, 100)
    finally:
        fetcher.kill()
        fetcher.communicate()


def test_waits_that_keep_being_in_vain_end(tmp_path, monkeypatch):
    """Others fetch, but the bound is too small to keep what they fetch."""
    waits = []

    @contextmanager
    def held(folder, digest, patience_s):
        waits.append(patience_s)
        yield patience_s > 0

    monkeypatch.setattr(chunk_cache, "claim", held)
    cache = ChunkCache(tmp_path, max_bytes=1)
    for number in range(6):
        chunks = dict([chunk(number, 100)])
        cache.fetch_once(dict.fromkeys(chunks, memoryview(bytearray(100))), lambda _, c=chunks: c)
    assert [wait > 0 for wait in waits] == [True] * 4 + [False] * 2


def test_a_forked_child_may_use_it(tmp_path):
    cache = ChunkCache(tmp_path, max_bytes=MIB)
    with cache._lock.here():  # as if another thread were at it
        child = os.fork()
        if not child:
            cache.offer(dict([chunk(1, 1000)]))
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    assert holds(cache, chunk(1, 1000)[0], 1000)


# Who gets one


@pytest.fixture
def local(tmp_path):
    with holdfast.init(tmp_path / "registry", skip_race_probe=True) as reg:
        reg.create_run("run").save(small_state(), step=1)
    return tmp_path / "registry"


def test_a_local_registry_has_none_unless_asked_for(local, tmp_path, monkeypatch):
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "cache"))
    with holdfast.open(local) as reg:
        assert reg.handle.store.cache is None
    with holdfast.open(local, cache=tmp_path / "mine") as reg:
        assert reg.handle.store.cache.path == str(tmp_path / "mine")
        assert same(reg.run("run").latest().load(), small_state())
    assert (tmp_path / "mine" / "chunks-v1").is_dir()
    assert not (tmp_path / "cache").exists()


def test_a_bucket_has_the_one_of_the_environment(s3_url, tmp_path, monkeypatch):
    url = s3_url()
    monkeypatch.delenv("HOLDFAST_CACHE", raising=False)
    with holdfast.init(url, skip_race_probe=True) as reg:
        reg.create_run("run").save(small_state(), step=1)
        assert reg.handle.store.cache is None
    with holdfast.open(url) as reg:
        assert reg.handle.store.cache is None
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HOLDFAST_CACHE_BYTES", "12345678")
    with holdfast.open(url, cache="") as reg:
        assert reg.handle.store.cache is None
    for _ in range(2):
        with holdfast.open(url) as reg:
            assert reg.handle.store.cache.max_bytes == 12345678
            assert same(reg.run("run").latest().load(), small_state())
    assert len(list((tmp_path / "cache" / "chunks-v1").glob("[0-9a-f]*"))) == 3
    monkeypatch.setenv("HOLDFAST_CACHE", "")
    with holdfast.open(url) as reg:
        assert reg.handle.store.cache is None


def test_one_cache_serves_several_handles(local, tmp_path):
    cache = ChunkCache(tmp_path / "cache")
    with holdfast.open(local, cache=cache) as one, holdfast.open(local, cache=cache) as other:
        assert one.handle.store.cache is other.handle.store.cache is cache


def test_the_platform_has_a_folder_for_it(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOLDFAST_CACHE_BYTES", raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    assert ChunkCache().path == str(tmp_path / ".cache" / "holdfast")
    disk = os.statvfs(tmp_path)
    free = disk.f_bavail * disk.f_frsize
    assert ChunkCache().max_bytes == pytest.approx(free / 2, rel=0.05)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert ChunkCache().path == str(tmp_path / "xdg" / "holdfast")
    assert ChunkCache("~/chunks").path == str(tmp_path / "chunks")


@pytest.mark.parametrize("said", ["0", "-1", "10G", "1.5", "many"])
def test_a_bound_that_is_none(tmp_path, monkeypatch, said):
    monkeypatch.setenv("HOLDFAST_CACHE_BYTES", said)
    with pytest.raises(InvalidInput, match="HOLDFAST_CACHE_BYTES"):
        ChunkCache(tmp_path)
    with pytest.raises(InvalidInput, match="max_bytes"):
        ChunkCache(tmp_path, max_bytes=0)
