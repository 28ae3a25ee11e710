"""Packs that are written while they are hashed: the same bytes, few blocks, nothing left behind."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from holdfast.backends.base import Unfinished
from holdfast.backends.errors import StoreFull, StoreUnavailable
from holdfast.backends.local import disk
from holdfast.backends.local.backend import LocalBackend
from holdfast.backends.wrappers import Fault, Faulty, InjectedCrash
from holdfast.registry.store.blocks import MOST_BLOCKS
from holdfast.registry.store.store import create_config
from holdfast.registry.writing import hashing
from tests.support.states import same
from tests.support.stores import contents, new_backend, packs_of, small_grid


@pytest.fixture(autouse=True)
def small() -> Iterator[None]:
    """Make blocks of 512 bytes, and packs of ten of them."""
    with pytest.MonkeyPatch.context() as patch, small_grid(256, pack_bytes=5120):
        patch.setattr(hashing, "BLOCK_BYTES", 512)
        yield


class Folder(LocalBackend):
    """A folder with a registry, which counts what is begun in it."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.begun: list[Unfinished] = []
        create_config(self, "skipped", None, None)

    def begin(self, size_bytes: int) -> Unfinished | None:
        found = super().begin(size_bytes)
        self.begun += [found] if found else []
        return found

    def unfinished(self) -> list[Path]:
        return [one for one in Path(self._temporary).iterdir() if one.is_file()]


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "registry")


def state(i: int = 0) -> dict:
    """Return components of several packs, with chunks that repeat within and between them."""
    rng = np.random.default_rng(i)
    large = rng.random((64, 30))
    return {
        "m": {str(n): rng.integers(0, 99, 30 + n) for n in range(60)},
        "o": large,
        "s": {"again": large, "few": rng.random(70), "zeros": np.zeros(1000)},
    }


def test_packs_have_the_bytes_that_they_have_where_none_grows(folder, open_registry):
    plain = new_backend()
    for store in (folder, plain):
        run = open_registry(store).create_run("run", seed=1)
        for step in (1, 2):
            one = state()
            one["m"]["40"][3] = step  # the second save changes one chunk of a pack
            assert same(run.save(one, step=step).load(), one)
    assert contents(folder, "packs/") == contents(plain, "packs/")
    assert folder.unfinished() == []
    assert len([one for one in folder.begun if one.size_bytes]) > 5
    assert open_registry(folder).verify(deep=True).ok


def test_a_save_into_a_folder_has_few_blocks(folder, open_registry, monkeypatch):
    reg = open_registry(folder)
    left, take = [], hashing.Hashing._hash

    def counted(self, *given):
        left.append(reg.handle.store.blocks._left)
        take(self, *given)

    monkeypatch.setattr(hashing.Hashing, "_hash", counted)
    reg.create_run("run").save({"m": np.random.default_rng(0).random(10_000)}, step=1)
    assert len(left) > 100
    assert MOST_BLOCKS - min(left) <= 16  # with all that is sent, 64 MiB
    assert reg.handle.store.blocks._left == MOST_BLOCKS


def test_content_that_is_there_is_not_stored_again(folder, open_registry):
    first = open_registry(folder).create_run("one", seed=1).save(state(), step=1)
    before = {key: Path(folder._path(key)).stat().st_ino for key in packs_of(first)}
    again = open_registry(folder).create_run("two", seed=1).save(state(), step=1)
    assert packs_of(again) == packs_of(first)
    assert {key: Path(folder._path(key)).stat().st_ino for key in packs_of(again)} == before
    assert folder.unfinished() == []


def test_a_damaged_pack_is_replaced_by_the_one_that_grew(folder, open_registry):
    saved = open_registry(folder).create_run("one", seed=1).save(state(), step=1)
    for key in packs_of(saved):
        path = Path(folder._path(key))
        path.chmod(0o600)
        path.write_bytes(bytes(path.stat().st_size))
    again = open_registry(folder).create_run("two", seed=1).save(state(), step=1)
    assert same(again.load(), state())
    assert folder.unfinished() == []


@pytest.mark.parametrize("error", [None, StoreUnavailable("gone")])
@pytest.mark.parametrize("after", [False, True])
def test_a_save_that_breaks_off_anywhere_leaves_nothing_but_garbage(
    folder, open_registry, error, after
):
    open_registry(folder).create_run("run", seed=1).save(state(), step=1)
    for at in itertools.count(1, 4):
        reg = open_registry(Faulty(folder, [Fault(at, after=after, error=error)]))
        try:
            reg.run("run").save(state(at), step=at + 1)
        except (InjectedCrash, StoreUnavailable):
            assert reg.handle.store.blocks._left == MOST_BLOCKS
            assert folder.unfinished() == []
        else:
            break
        latest = open_registry(folder).run("run").latest()
        assert same(latest.load(), state(0 if latest.step == 1 else latest.step - 1))
    assert at > 10
    assert open_registry(folder).verify(deep=True).ok


@pytest.mark.parametrize("call", ["write_all", "sync"])
def test_a_failed_write_or_sync_fails_the_save(folder, open_registry, monkeypatch, call):
    run = open_registry(folder).create_run("run", seed=1)
    real, calls = getattr(disk, call), itertools.count(1)

    def fail(*given):
        if next(calls) == 3:
            raise OSError(28, "No space left on device")
        return real(*given)

    with monkeypatch.context() as patch:
        patch.setattr(disk, call, fail)
        with pytest.raises(StoreFull, match="No space left"):
            run.save(state(), step=1)
    assert folder.unfinished() == []
    assert run.checkpoints() == []
    assert same(run.save(state(), step=1).load(), state())


def test_packs_that_may_be_there_take_no_space_where_it_is_short(
    folder, open_registry, monkeypatch
):
    monkeypatch.setattr(Folder, "free_bytes", lambda _: 9000)
    open_registry(folder).create_run("run").save(
        {"m": np.random.default_rng(0).random(600)}, step=1
    )
    assert folder.begun == []
