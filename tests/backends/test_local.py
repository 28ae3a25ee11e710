from __future__ import annotations

import errno
import os
import shutil
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from holdfast.backends import (
    AccessDenied,
    ByteRange,
    InvalidLocation,
    ObjectNotFound,
    ObjectTruncated,
    ReadOnlyStore,
    StorageError,
    StoreFull,
    StoreUnavailable,
    StoreUnsuitable,
    open_backend,
)
from holdfast.backends.local import disk, folders, mounts, reserve
from holdfast.backends.local.backend import LocalBackend
from holdfast.backends.testing import keys_of


@pytest.fixture
def backend(tmp_path: Path) -> LocalBackend:
    return LocalBackend(tmp_path / "root")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


def failing(code: int) -> Callable[..., None]:
    def fail(*args: object, **options: object) -> None:
        raise OSError(code, os.strerror(code))

    return fail


def only_reading(real: Callable[..., int]) -> Callable[..., int]:
    """Return `os.open` as it is on a file system that is mounted for reading."""

    def read_only(path: object, flags: int, *args: object, **options: object) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return real(path, flags, *args, **options)

    return read_only


def files(root: Path) -> list[str]:
    return sorted(str(p.relative_to(root)) for p in root.rglob("*") if not p.is_dir())


WRITES = {
    "put": lambda b: b.put("a/b", b"12345"),
    "put_if_absent": lambda b: b.put_if_absent("a/b", b"12345"),
}
both_puts = pytest.mark.parametrize("method", WRITES)
both_writes = pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())


# What is on the disk


def test_reader_creates_nothing(backend: LocalBackend, root: Path) -> None:
    assert keys_of(backend) == []
    with pytest.raises(ObjectNotFound):
        backend.get("a")
    backend.delete("a")
    assert not root.exists()


@both_writes
def test_nothing_unfinished_stays(
    backend: LocalBackend, root: Path, write: Callable[[LocalBackend], object]
) -> None:
    write(backend)
    write(backend)
    assert files(root) == ["a/b"]
    assert list((root / ".tmp").iterdir()) == []


def test_leftovers_of_a_dead_process_are_invisible(backend: LocalBackend, root: Path) -> None:
    backend.put("a", b"x")
    (root / ".tmp" / "1-dead").write_bytes(b"half")
    assert keys_of(backend) == ["a"]
    assert keys_of(backend, delimiter=True) == ["a"]
    assert keys_of(backend, ".tmp/") == keys_of(backend, ".t") == []


@pytest.mark.parametrize("method", ["get", "stat", "delete"])
def test_key_among_the_unfinished_is_refused(backend: LocalBackend, method: str) -> None:
    with pytest.raises(InvalidLocation, match="reserved"):
        getattr(backend, method)(".tmp/x")


def test_mode_follows_the_umask(backend: LocalBackend, root: Path) -> None:
    before = os.umask(0o027)
    try:
        backend.put("a", b"x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((root / "a").stat().st_mode) == 0o640


def test_every_new_folder_is_synced_into_its_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    real = disk.sync_folder
    monkeypatch.setattr(disk, "sync_folder", lambda path: (synced.append(path), real(path)))
    backend = LocalBackend(tmp_path / "p" / "root")
    backend.put_if_absent("a/b/c", b"x")
    made = {tmp_path, *(tmp_path / "p" / name for name in ("", "root", "root/a", "root/a/b"))}
    # And what is above: somebody who died since may have made it just now.
    assert set(map(Path, synced)) == made | {
        above for above in tmp_path.parents if above.stat().st_dev == tmp_path.stat().st_dev
    }
    synced.clear()
    backend.put_if_absent("a/b/d", b"x")
    assert synced == [str(tmp_path / "p/root/a/b")]


def test_what_was_seen_is_synced_with_the_way_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "root"
    LocalBackend(root).put_if_absent("a/b/c", b"x")
    LocalBackend(root).put_if_absent("a/b/d", b"x")
    LocalBackend(root).put_if_absent("a/e/f", b"x")
    synced: list[Path] = []
    monkeypatch.setattr(disk, "sync_folder", lambda path: synced.append(Path(path)))
    backend = LocalBackend(root)
    backend.make_durable(["a/b/c", "a/b/d", "a/e/f"])
    inside = [path for path in synced if path.is_relative_to(root)]
    # A folder after the one that holds it; that one once, the folders of the objects each time.
    assert inside == [root, root / "a", root / "a/b", root / "a", root / "a/e"]
    assert tmp_path in synced
    synced.clear()
    backend.make_durable(["a/b/c"])
    assert synced == [root / "a/b"]


def test_a_failed_sync_of_what_was_seen_is_told(
    backend: LocalBackend, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend.put("a/b", b"x")
    monkeypatch.setattr(disk, "sync_folder", failing(errno.EIO))
    with pytest.raises(StorageError, match="file system failed") as caught:
        backend.make_durable(["a/b"])
    assert caught.value.where == str(root / "a")


def test_folders_above_that_may_not_be_read_are_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = disk.sync_folder

    def guarded(path: str) -> None:
        if not Path(path).is_relative_to(tmp_path / "root"):
            raise PermissionError(errno.EACCES, "not yours", path)
        real(path)

    monkeypatch.setattr(disk, "sync_folder", guarded)
    backend = LocalBackend(tmp_path / "root")
    assert backend.put_if_absent("a", b"x")
    backend.make_durable(["a"])


def test_data_is_synced_before_it_gets_its_name(
    backend: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    for module, name in ((os, "writev"), (os, "fsync"), (os, "link"), (os, "unlink")):
        real = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *a, _n=name, _r=real, **k: (calls.append(_n), _r(*a, **k))[1]
        )
    backend.put_if_absent("a", b"x")
    calls.clear()
    backend.put_if_absent("b", b"x")
    assert calls == ["writev", "fsync", "link", "unlink", "fsync"]


def test_short_writes_and_reads_are_continued(
    backend: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    writev, preadv, pread = os.writev, os.preadv, os.pread
    data = bytes(range(256)) * 40
    parts = [memoryview(data)[i : i + 100] for i in range(0, len(data), 100)]
    monkeypatch.setattr(os, "writev", lambda fd, views: writev(fd, [views[0][:7]]))
    backend.put("a", parts)
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: preadv(fd, [views[0][:9]], at))
    monkeypatch.setattr(os, "pread", lambda fd, size, at: pread(fd, min(size, 11), at))
    assert backend.get("a") == data
    target = bytearray(5000)
    views = [memoryview(target)[i : i + 30] for i in range(0, 5000, 30)]
    backend.get("a", ByteRange(1, 5001), into=views)
    assert target == data[1:5001]


def test_file_that_shrinks_under_the_reader_is_truncated(
    backend: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend.put("a", b"12345")
    monkeypatch.setattr(disk, "check_size", lambda *_: None)
    with pytest.raises(ObjectTruncated, match="found 5 bytes"):
        backend.get("a", ByteRange(0, 6))
    with pytest.raises(ObjectTruncated):
        backend.get("a", ByteRange(0, 6), into=[memoryview(bytearray(6))])


def test_removed_folder_is_made_again(backend: LocalBackend, root: Path) -> None:
    backend.put("a/b/c", b"x")
    for path in (root / "a/b/c", root / "a/b", root / "a", root / ".tmp"):
        path.rmdir() if path.is_dir() else path.unlink()
    assert backend.put_if_absent("a/b/c", b"y")
    assert backend.get("a/b/c") == b"y"


# Deleting


def test_delete_of_what_has_no_folder_any_more_is_no_error(
    backend: LocalBackend, root: Path
) -> None:
    backend.put("a/b/c", b"x")
    (root / "a/b/c").unlink()
    (root / "a/b").rmdir()
    backend.delete("a/b/c")
    (root / "a/b").write_bytes(b"a file")
    backend.delete("a/b/c")
    assert files(root) == ["a/b"]


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (errno.EACCES, AccessDenied),
        (errno.EPERM, AccessDenied),
        (errno.EROFS, ReadOnlyStore),
        (errno.EIO, StorageError),
    ],
)
def test_failed_delete_is_typed(
    backend: LocalBackend,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    kind: type[StorageError],
) -> None:
    backend.put("a", b"x")
    monkeypatch.setattr(os, "unlink", failing(code))
    with pytest.raises(kind, match=str(root / "a")) as caught:
        backend.delete("a")
    assert type(caught.value) is kind


def test_each_of_many_deletions_fails_for_itself(
    backend: LocalBackend, root: Path, tmp_path: Path
) -> None:
    for key in ("a/b", "a/c", "d/e", "f/g"):
        backend.put(key, b"x")
    (root / "a/c").unlink()
    (root / "a/c").symlink_to(tmp_path)
    shutil.move(root / "d", tmp_path / "d")
    (root / "d").symlink_to(tmp_path / "d")
    (root / "h").write_bytes(b"a file")
    keys = ["a/b", "a/c", "d/e", "d/x", "f/g", "h/i", "gone/j"]
    failed = backend.delete_many(keys)
    assert {key: type(error) for key, error in failed.items()} == dict.fromkeys(
        ["a/c", "d/e", "d/x"], StoreUnsuitable
    )
    assert files(root) == ["h"]
    assert (root / "a/c").is_symlink()
    assert files(tmp_path / "d") == ["e"]


def test_emptied_folder_stays(backend: LocalBackend, root: Path) -> None:
    """Another writer knows it as synced into its parent, which one made anew might not be."""
    backend.put("a/b/c", b"x")
    backend.delete("a/b/c")
    assert (root / "a/b").is_dir()


# What dead writers leave


def unfinished(root: Path, name: str, *, age_s: float, now_s: float | None = None) -> Path:
    """Leave a file as a writer does that dies, last written so long ago."""
    path = root / ".tmp" / name
    path.write_bytes(b"half")
    written_s = (path.stat().st_mtime if now_s is None else now_s) - age_s
    os.utime(path, (written_s, written_s))
    return path


def dead(pid: int, number: int = 0xABC) -> str:
    """Return a name as the backend gives it to an unfinished file."""
    return f"{pid}-{number:016x}"


def test_what_is_old_is_cleared_and_what_is_young_stays(backend: LocalBackend, root: Path) -> None:
    backend.put("a", b"x")
    for pid, age_s in ((1, 7300), (2, 10**6), (3, 7100), (4, -900)):
        unfinished(root, dead(pid), age_s=age_s)
    assert backend.clear_unfinished(7200) == 8
    assert files(root) == [f".tmp/{dead(3)}", f".tmp/{dead(4)}", "a"]
    assert backend.clear_unfinished(7200) == 0
    assert backend.clear_unfinished(0) == 4
    assert files(root) == [f".tmp/{dead(4)}", "a"]


def test_only_names_of_unfinished_files_are_cleared(backend: LocalBackend, root: Path) -> None:
    backend.put("a", b"x")
    foreign = ["notes.txt", "1-old", f"x{dead(1)}", f"{dead(1)}.bak", dead(1).upper()]
    for name in foreign:
        unfinished(root, name, age_s=10**6)
    assert backend.clear_unfinished(0) == 0
    assert files(root) == sorted(["a", *(f".tmp/{name}" for name in foreign)])


def test_age_is_by_the_clock_of_the_file_system(
    backend: LocalBackend, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server whose clock is a day behind: what it was given just now is not a day old."""
    backend.put("a", b"x")
    path = unfinished(root, dead(1), age_s=0)
    behind_s = path.stat().st_mtime - 86_400
    os.utime(path, (behind_s, behind_s))
    real = os.fstat

    def fstat(fd: int) -> os.stat_result:
        os.utime(fd, (behind_s + 5, behind_s + 5))
        return real(fd)

    monkeypatch.setattr(os, "fstat", fstat)
    assert backend.clear_unfinished(3600) == 0
    assert path.exists()
    assert backend.clear_unfinished(4) == 4


def test_file_that_has_its_name_frees_nothing(backend: LocalBackend, root: Path) -> None:
    """Its writer died between giving the name and removing the first one."""
    backend.put("a", b"12345")
    unfinished(root, dead(1), age_s=9000)
    os.link(root / "a", root / ".tmp" / dead(2))
    os.utime(root / "a", (1, 1))
    assert backend.clear_unfinished(3600) == 4
    assert files(root) == ["a"]
    assert backend.get("a") == b"12345"


def test_process_id_in_a_name_is_no_evidence(backend: LocalBackend, root: Path) -> None:
    """It may be a process of another host on a shared file system, dead or alive."""
    backend.put("a", b"x")
    for pid in (os.getpid(), 2**22 + 1):
        unfinished(root, dead(pid, 1), age_s=10)
        unfinished(root, dead(pid, 2), age_s=4000)
    assert backend.clear_unfinished(3600) == 8
    assert sorted(name[-1] for name in files(root)) == ["1", "1", "a"]


def test_clearing_follows_no_link_and_enters_no_folder(
    backend: LocalBackend, root: Path, tmp_path: Path
) -> None:
    backend.put("a", b"x")
    (tmp_path / "elsewhere").write_bytes(b"precious")
    (root / ".tmp" / dead(1)).symlink_to(tmp_path / "elsewhere")
    (root / ".tmp" / dead(2)).mkdir()
    (root / ".tmp" / dead(2) / dead(3)).write_bytes(b"x")
    assert backend.clear_unfinished(0) == 0
    assert files(root) == [f".tmp/{dead(1)}", f".tmp/{dead(2)}/{dead(3)}", "a"]
    assert (tmp_path / "elsewhere").read_bytes() == b"precious"


def test_clearing_where_nothing_is_writes_nothing(
    backend: LocalBackend, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert backend.clear_unfinished(0) == 0
    assert not root.exists()
    backend.put("a", b"x")
    monkeypatch.setattr(os, "open", only_reading(os.open))
    assert backend.clear_unfinished(0) == 0


@pytest.mark.parametrize(
    ("name", "code", "kind"),
    [("open", errno.EROFS, ReadOnlyStore), ("unlink", errno.EACCES, AccessDenied)],
)
def test_failed_clearing_is_typed(
    backend: LocalBackend,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    code: int,
    kind: type[StorageError],
) -> None:
    backend.put("a", b"x")
    unfinished(root, dead(1), age_s=9000)
    monkeypatch.setattr(os, name, only_reading(os.open) if name == "open" else failing(code))
    with pytest.raises(kind, match=r"\.tmp"):
        backend.clear_unfinished(3600)


def test_full_disk_is_told_even_if_the_file_was_cleared(
    backend: LocalBackend, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def clear_and_fail(*_: object) -> None:
        backend.clear_unfinished(0)
        raise OSError(errno.ENOSPC, "full")

    backend.put("a", b"x")
    monkeypatch.setattr(os, "writev", clear_and_fail)
    with pytest.raises(StoreFull):
        backend.put("b", b"x")
    assert files(root) == ["a"]


@both_writes
def test_writer_whose_file_is_cleared_has_made_nothing(
    backend: LocalBackend,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    write: Callable[[LocalBackend], object],
) -> None:
    backend.put("other", b"x")
    real = disk.write_all

    def write_and_lose(fd: int, buffers: list[memoryview]) -> None:
        real(fd, buffers)
        assert backend.clear_unfinished(0) == 5

    monkeypatch.setattr(disk, "write_all", write_and_lose)
    with pytest.raises(StoreUnavailable, match="removed during the write"):
        write(backend)
    assert files(root) == ["other"]


# Files that are written before their key is known


def test_unfinished_file_gets_its_name_when_it_is_put(backend: LocalBackend, root: Path) -> None:
    for number, put in enumerate((backend.put, backend.put_if_absent)):
        begun = backend.begin(7)
        assert begun is not None
        begun.write([b"123", b""])
        begun.write([b"4567"])
        assert keys_of(backend) == ["k0", "k1"][:number]
        put(f"k{number}", begun)
        begun.close()
        begun.close()
        assert backend.get(f"k{number}") == b"1234567"
    assert list((root / ".tmp").iterdir()) == []


@pytest.mark.parametrize("is_race", [False, True])
def test_unfinished_file_replaces_what_it_did_not_create(
    backend: LocalBackend, root: Path, monkeypatch: pytest.MonkeyPatch, is_race: bool
) -> None:
    backend.put("a", b"wrong")
    if is_race:  # it was put just now
        monkeypatch.setattr(os.path, "lexists", lambda _: False)
    begun = backend.begin(5)
    assert begun is not None
    begun.write([b"right"])
    assert not backend.put_if_absent("a", begun)
    assert backend.get("a") == b"wrong"
    backend.put("a", begun)
    begun.close()
    assert backend.get("a") == b"right"
    assert files(root) == ["a"]


def test_unfinished_file_that_is_not_put_is_removed(backend: LocalBackend, root: Path) -> None:
    begun, empty = backend.begin(5), backend.begin(0)
    assert begun is not None
    assert empty is not None
    begun.write([b"12345"])
    assert len(files(root)) == 1
    begun.close()
    assert files(root) == []
    backend.put("a", empty)
    empty.close()
    assert backend.get("a") == b""


@both_puts
def test_unfinished_file_that_was_cleared_is_no_object(
    backend: LocalBackend, root: Path, method: str
) -> None:
    begun = backend.begin(5)
    assert begun is not None
    begun.write([b"12345"])
    assert backend.clear_unfinished(0) == 5
    with pytest.raises(StoreUnavailable, match="removed during the write"):
        getattr(backend, method)("a", begun)
    begun.close()
    assert files(root) == []


@both_puts
def test_unfinished_file_whose_sync_failed_is_never_an_object(
    backend: LocalBackend, root: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    begun = backend.begin(5)
    assert begun is not None
    begun.write([b"12345"])
    with monkeypatch.context() as broken:
        broken.setattr(disk, "sync", failing(errno.EIO))
        with pytest.raises(StorageError, match="file system failed"):
            getattr(backend, method)("a", begun)
    with pytest.raises(StoreUnavailable):
        getattr(backend, method)("a", begun)
    assert files(root) == []


# Listing


def test_illegal_names_are_listed_all_the_same(backend: LocalBackend, root: Path) -> None:
    backend.put("b", b"x")
    (root / "a b").write_bytes(b"123")
    (root / os.fsdecode(b"c\xff")).write_bytes(b"")
    (root / "é").mkdir()
    (root / "é" / "x").write_bytes(b"")
    assert [os.fsencode(key) for key in keys_of(backend)] == [
        b"a b", b"b", b"c\xff", "é/x".encode()
    ]  # fmt: skip


def test_file_that_vanishes_while_listing_is_passed_over(backend: LocalBackend, root: Path) -> None:
    for key in ("a", "b", "c"):
        backend.put(key, b"x")
    listing = backend.list()
    assert next(listing).key == "a"
    (root / "b").unlink()
    assert [info.key for info in listing] == ["c"]


def test_listing_reads_only_folders_that_matter(
    backend: LocalBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key in ("a/x/1", "b/x/1", "b/y/1", "b/y/2", "c/x/1"):
        backend.put(key, b"")
    read: list[str] = []
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: (read.append(path), scandir(path))[1])
    assert keys_of(backend, "b/y") == ["b/y/1", "b/y/2"]
    assert [path[-4:] for path in read] == ["t/b/", "b/y/"]
    read.clear()
    assert keys_of(backend, start_after="b/y/1", limit=1) == ["b/y/2"]
    assert [path[-4:] for path in read] == ["oot/", "t/b/", "b/y/"]


def test_linked_folder_is_followed_and_a_loop_is_refused(
    backend: LocalBackend, root: Path, tmp_path: Path
) -> None:
    backend.put("a/b", b"x")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "c").write_bytes(b"y")
    (root / "linked").symlink_to(tmp_path / "elsewhere")
    assert keys_of(backend) == ["a/b", "linked/c"]
    assert backend.get("linked/c") == b"y"
    (root / "a" / "loop").symlink_to(root)
    with pytest.raises(StoreUnsuitable, match="loop"):
        keys_of(backend)


def test_pipe_is_no_object_and_does_not_block(backend: LocalBackend, root: Path) -> None:
    backend.put("a", b"x")
    os.mkfifo(root / "pipe")
    with pytest.raises(ObjectNotFound, match="not a regular file"):
        backend.get("pipe")


# Failures


@both_writes
@pytest.mark.parametrize(
    ("code", "kind", "said"),
    [
        (errno.ENOSPC, StoreFull, r"5 bytes to write.*\d+ bytes.* free"),
        (errno.EDQUOT, StoreFull, "5 bytes to write"),
        (errno.EACCES, AccessDenied, f"user id {os.geteuid()}"),
        (errno.EPERM, AccessDenied, "user id"),
        (errno.EROFS, ReadOnlyStore, "[Rr]ead-only"),
        (errno.EMFILE, StoreUnavailable, "ulimit"),
        (errno.EIO, StorageError, "file system failed"),
    ],
)
def test_failed_write_is_typed_and_leaves_nothing(
    backend: LocalBackend,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    write: Callable[[LocalBackend], object],
    code: int,
    kind: type[StorageError],
    said: str,
) -> None:
    backend.put("other", b"x")
    monkeypatch.setattr(os, "writev", failing(code))
    with pytest.raises(kind, match=said) as caught:
        write(backend)
    assert type(caught.value) is kind
    assert str(root) in str(caught.value)
    assert files(root) == ["other"]


@pytest.mark.parametrize(
    ("code", "free", "said", "unsaid"),
    [
        (
            errno.ENOSPC,
            {"f_favail": 1},
            "no more files.*found 20480000 bytes and 1 inodes free",
            None,
        ),
        (
            errno.ENOSPC,
            {"f_favail": 99},
            "5 bytes to write.*20480000 bytes and 99 inodes",
            "no more",
        ),
        (
            errno.ENOSPC,
            {"f_favail": 1, "f_bavail": 2},
            "to write.*4096 bytes and 1 inodes",
            "no more",
        ),
        (errno.ENOSPC, {"f_favail": 0, "f_files": 0}, "found 20480000 bytes free", "inode"),
        (errno.EDQUOT, {"f_favail": 7}, "quota of user id .* 20480000 bytes and 7 inodes", None),
    ],
    ids=["no inodes", "no bytes", "neither", "inodes are not counted", "quota"],
)
def test_a_full_disk_says_what_is_used_up(
    backend: LocalBackend,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    free: dict[str, int],
    said: str,
    unsaid: str | None,
) -> None:
    counts = {"f_bavail": 10_000, "f_frsize": 2048, "f_files": 100, **free}
    monkeypatch.setattr(os, "writev", failing(code))
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(**counts))
    with pytest.raises(StoreFull, match=said) as caught:
        backend.put("a", b"12345")
    assert unsaid is None or unsaid not in str(caught.value)
    assert "nothing was written" in str(caught.value)


@both_writes
def test_failed_fsync_fails_the_write_and_is_not_tried_again(
    backend: LocalBackend,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    write: Callable[[LocalBackend], object],
) -> None:
    backend.put("a/other", b"x")
    tried: list[int] = []
    real = os.fsync

    def once(fd: int) -> None:
        tried.append(fd)
        if len(tried) == 1:
            raise OSError(errno.EIO, "I/O error")
        real(fd)

    monkeypatch.setattr(os, "fsync", once)
    with pytest.raises(StorageError) as caught:
        write(backend)
    assert not isinstance(caught.value, StoreUnavailable), "which a wrapper would try again"
    assert len(tried) == 1
    assert files(root) == ["a/other"]


@both_writes
def test_failed_fsync_of_the_folder_fails_the_write(
    backend: LocalBackend, monkeypatch: pytest.MonkeyPatch, write: Callable[[LocalBackend], object]
) -> None:
    backend.put("a/other", b"x")
    monkeypatch.setattr(disk, "sync_folder", failing(errno.EIO))
    with pytest.raises(StorageError, match="file system failed"):
        write(backend)


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.EXDEV])
def test_file_system_without_links_is_unsuitable(
    backend: LocalBackend, root: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(os, "link", failing(code))
    with pytest.raises(StoreUnsuitable, match="hard links"):
        backend.put_if_absent("a", b"x")
    assert files(root) == []


@pytest.mark.parametrize("code", [errno.EEXIST, errno.EIO])
def test_link_whose_answer_was_lost_counts(
    backend: LocalBackend, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    real = os.link

    def link(source: str, target: str, **options: int) -> None:
        real(source, target, **options)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", link)
    assert backend.put_if_absent("a", b"x") is True


def test_interrupt_leaves_nothing(
    backend: LocalBackend, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **options: object) -> None:
        raise KeyboardInterrupt

    backend.put("other", b"x")
    monkeypatch.setattr(os, "link", interrupt)
    with pytest.raises(KeyboardInterrupt):
        backend.put_if_absent("a", b"x")
    assert files(root) == ["other"]


def test_collector_that_removes_an_unfinished_file_is_survived(
    backend: LocalBackend, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.link

    def link(source: str, target: str, **options: int) -> None:
        Path(source).unlink()
        real(source, target, **options)

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(StoreUnavailable, match="removed during the write"):
        backend.put_if_absent("a", b"x")


@both_writes
def test_key_below_an_object_is_refused(
    backend: LocalBackend, write: Callable[[LocalBackend], object]
) -> None:
    backend.put("a", b"x")
    with pytest.raises(InvalidLocation, match="a file is where"):
        write(backend)


@pytest.mark.parametrize("method", ["put", "put_if_absent"])
def test_object_above_a_key_is_refused(backend: LocalBackend, method: str) -> None:
    backend.put("a/b", b"x")
    with pytest.raises(InvalidLocation, match="folder"):
        getattr(backend, method)("a", b"x")
    assert keys_of(backend) == ["a/b"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may do everything")
def test_folder_without_permission_is_denied(backend: LocalBackend, root: Path) -> None:
    backend.put("a", b"x")
    (root / "a").chmod(0)
    with pytest.raises(AccessDenied):
        backend.get("a")


def test_file_as_root_is_refused(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"")
    with pytest.raises(InvalidLocation, match="not a folder"):
        open_backend(tmp_path / "f")


# File systems


MOUNTS = """\
/dev/sda1 / ext4 rw 0 0
server:/x /mnt/nfs nfs4 rw 0 0
//server/x /mnt/my\\040share cifs rw 0 0
host: /mnt/ssh fuse.sshfs rw 0 0
/dev/sdb1 /mnt/nfs/disk xfs rw 0 0
"""


@pytest.fixture
def mounted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mounts").write_text(MOUNTS)
    monkeypatch.setattr(mounts, "MOUNTS", tmp_path / "mounts")
    monkeypatch.delenv(mounts.ALLOW, raising=False)


@pytest.mark.usefixtures("mounted")
def test_network_file_system_has_to_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    mounts.check_file_system("/home/x")
    mounts.check_file_system("/mnt/nfs/disk/x")
    mounts.check_file_system("/mnt/nfs2")
    for folder in ("/mnt/nfs/x", "/mnt/ssh"):
        with pytest.raises(StoreUnsuitable, match="HOLDFAST_ALLOW_NETWORK_FS=1"):
            mounts.check_file_system(folder)
    monkeypatch.setenv(mounts.ALLOW, "1")
    mounts.check_file_system("/mnt/nfs/x")


@pytest.mark.usefixtures("mounted")
def test_file_system_without_links_is_always_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(mounts.ALLOW, "1")
    with pytest.raises(StoreUnsuitable, match="hard links"):
        mounts.check_file_system("/mnt/my share/x")


@pytest.mark.usefixtures("mounted")
def test_open_asks_for_the_file_system_of_the_nearest_folder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(disk, "nearest", lambda _: "/mnt/nfs")
    with pytest.raises(StoreUnsuitable):
        LocalBackend("/mnt/nfs/not/there")


def test_unknown_table_of_mounts_refuses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mounts, "MOUNTS", Path("/nonexistent"))
    mounts.check_file_system("/")


# Processes


def test_forked_child_writes_on(backend: LocalBackend) -> None:
    backend.put("a", b"x")
    child = os.fork()
    if child == 0:
        code = 1
        try:
            backend.put("b/c", b"y")
            code = 0 if not backend.put_if_absent("a", b"z") else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert keys_of(backend) == ["a", "b/c"]


def test_two_processes_race_for_a_key(backend: LocalBackend) -> None:
    rounds, children = 50, 3
    start = threading.Event()
    pids = []
    for number in range(children):
        pid = os.fork()
        if pid == 0:
            won = 0
            try:
                won = sum(backend.put_if_absent(f"race/{n}", b"%d" % number) for n in range(rounds))
            finally:
                os._exit(won)
        pids.append(pid)
    start.set()
    wins = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    assert sum(wins) == rounds


# Links


def test_no_write_or_deletion_goes_through_a_link_that_comes_late(
    backend: LocalBackend, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The look at the names before is for the message; what is open cannot be exchanged."""
    backend.put("a/b", b"x")
    shutil.move(root / "a", tmp_path / "a")
    (root / "a").symlink_to(tmp_path / "a")
    monkeypatch.setattr(folders, "refuse_links", lambda *_: None)
    for act in (
        lambda: backend.put("a/b", b"y"),
        lambda: backend.put_if_absent("a/c", b"y"),
        lambda: backend.delete("a/b"),
    ):
        with pytest.raises(StoreUnsuitable, match="symbolic link") as caught:
            act()
        assert caught.value.where == str(root / "a")
    assert files(tmp_path / "a") == ["b"]
    assert backend.get("a/b") == b"x"


def test_links_are_listed_and_not_followed(
    backend: LocalBackend, root: Path, tmp_path: Path
) -> None:
    for key in ("a/b/c", "d/e", "f"):
        backend.put(key, b"x")
    for name in ("a/b/link", "a/nowhere", "d/loop", ".tmp/link", "g"):
        (root / name).symlink_to(root if name == "d/loop" else tmp_path / "absent")
    assert [*backend.links()] == [".tmp/link", "a/b/link", "a/nowhere", "d/loop", "g"]
    assert [*backend.links("a/")] == ["a/b/link", "a/nowhere"]
    assert [*backend.links("a/", delimiter=True)] == ["a/nowhere"]
    assert [*backend.links("a/b/l")] == [*backend.links("a/b/link")] == ["a/b/link"]
    assert [*backend.links("d/loop/a/b/")] == ["d/loop"]
    assert [*backend.links("absent/")] == [*backend.links("f/")] == []


# The reserve


def test_reserve_is_kept_given_up_and_never_listed(backend: LocalBackend, root: Path) -> None:
    for name in ("one", "two"):
        backend.put(f"runs/{name}/x", b"x")
    before = list(backend.list())
    backend.keep_reserve("runs/")
    held = sorted((root / reserve.RESERVE).iterdir())
    assert [path.name for path in held] == [f"{n:08d}" for n in range(reserve.BASE_FILES + 2)]
    assert {path.stat().st_size for path in held} == {reserve.FILE_BYTES}
    assert all(path.stat().st_blocks * 512 >= reserve.FILE_BYTES for path in held), "no holes"
    assert list(backend.list()) == before
    assert backend.clear_unfinished(0) == 0
    assert backend.give_up_reserve(5) == 5
    backend.keep_reserve("runs/")
    (root / reserve.RESERVE / "notes").touch()
    assert backend.give_up_reserve() == reserve.BASE_FILES + 2
    assert backend.give_up_reserve() == 0
    assert files(root) == [".tmp/reserve/notes", "runs/one/x", "runs/two/x"]


def test_reserve_behind_a_link_is_left_alone(
    backend: LocalBackend, root: Path, tmp_path: Path
) -> None:
    backend.put("a", b"x")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "00000000").write_bytes(b"precious")
    (root / ".tmp" / "reserve").symlink_to(tmp_path / "elsewhere")
    backend.keep_reserve("runs/")
    with pytest.raises(StoreUnsuitable, match=r"\.tmp/reserve"):
        backend.give_up_reserve()
    assert files(tmp_path / "elsewhere") == ["00000000"]


def test_reserve_that_cannot_be_made_is_no_failure(
    backend: LocalBackend, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend.put("a", b"x")
    monkeypatch.setattr(os, "posix_fallocate", failing(errno.ENOSPC))
    backend.keep_reserve("runs/")
    assert files(root) == ["a"]


def test_full_folder_tells_the_time_by_what_is_there(
    backend: LocalBackend, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend.put("a", b"x")
    unfinished(root, dead(1), age_s=9000)
    unfinished(root, dead(2), age_s=10)
    monkeypatch.setattr(disk, "now_s", failing(errno.ENOSPC))
    assert backend.clear_unfinished(3600) == 4
    assert files(root) == [f".tmp/{dead(2)}", "a"]


@pytest.mark.usefixtures("mounted")
def test_free_bytes_are_told_where_they_bound_what_fits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert LocalBackend("/").free_bytes() is not None
    table = MOUNTS + f"pool/x {tmp_path} zfs rw 0 0\n"
    (tmp_path / "mounts").write_text(table)
    assert LocalBackend(tmp_path / "root").free_bytes() is None, "it compresses"
    monkeypatch.setenv(mounts.ALLOW, "1")
    monkeypatch.setattr(disk, "nearest", lambda _: "/mnt/nfs")
    assert LocalBackend("/mnt/nfs/x").free_bytes() is None, "who knows what is behind it"


def test_what_lies_on_a_file_system_that_is_only_read_needs_no_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = LocalBackend(tmp_path)
    backend.put("a/b", b"x")

    def refuse(_path: str) -> None:
        raise OSError(errno.EINVAL, "no sync here")

    monkeypatch.setattr(disk, "sync_folder", refuse)
    with pytest.raises(StorageError):
        backend.make_durable(["a/b"])
    there = os.statvfs(tmp_path)
    flags = os.ST_RDONLY | there.f_flag
    monkeypatch.setattr(os, "statvfs", lambda _path: SimpleNamespace(f_flag=flags))
    backend.make_durable(["a/b"])


def test_a_failed_removal_does_not_hide_why_a_write_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(error: int) -> Callable[..., None]:
        def act(*_: object) -> None:
            raise OSError(error, os.strerror(error))

        return act

    monkeypatch.setattr(disk, "write_all", fail(errno.ENOSPC))
    monkeypatch.setattr(disk, "remove", fail(errno.EROFS))
    with pytest.raises(StoreFull):
        LocalBackend(tmp_path).put("packs/aa", b"x")
