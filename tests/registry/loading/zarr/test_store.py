"""The store against zarr's own tests of stores, as far as they do not write."""

from __future__ import annotations

import asyncio

import pytest
import torch
from zarr.core.buffer import cpu
from zarr.testing.store import StoreTests

from holdfast.registry.loading.tensors import tensors_by_path
from holdfast.registry.loading.zarr.group import CheckpointStore


def writes(name):
    def test(self):
        pytest.skip("a stored state is read only, and this test writes through the store")

    test.__name__ = name
    return test


class TestCheckpointStore(StoreTests[CheckpointStore, cpu.Buffer]):
    store_cls = CheckpointStore
    buffer_cls = cpu.Buffer

    async def get(self, store, key):
        return self.buffer_cls.from_bytes(store._layout.documents[key])

    async def set(self, store, key, value):
        # Chunks are what a checkpoint has; arbitrary values can stand where its metadata does.
        store._layout.documents[key] = value.to_bytes()

    @pytest.fixture
    def store_kwargs(self, run):
        held = run.save({"m": {"w": torch.arange(100)}}, step=1)
        tensors = tensors_by_path(held.manifest.components)
        return {"source": held, "ref": held.ref, "digest": held.digest, "tensors": tensors}

    @pytest.fixture
    def store(self, open_kwargs):
        return asyncio.run(self.store_cls.open(**open_kwargs))

    @pytest.fixture
    def store_not_open(self, store_kwargs):
        return self.store_cls(**store_kwargs)

    def test_store_repr(self, store):
        assert str(store) == "run/main/step00000001"
        assert repr(store).startswith("<CheckpointStore run/main/step00000001 ")

    def test_store_supports_writes(self, store):
        assert not store.supports_writes
        assert not store.supports_deletes

    def test_store_supports_listing(self, store):
        assert store.supports_listing

    def test_store_read_only(self, store):
        assert store.read_only
        with pytest.raises(AttributeError):
            store.read_only = False

    @pytest.mark.parametrize("read_only", [True, False])
    async def test_store_open_read_only(self, open_kwargs, read_only):
        if read_only:
            store = await self.store_cls.open(**open_kwargs, read_only=True)
            assert store._is_open
            assert store.read_only
        else:
            with pytest.raises(ValueError, match="cannot be written"):
                await self.store_cls.open(**open_kwargs, read_only=False)

    async def test_is_empty(self, store):
        assert not await store.is_empty("")
        assert not await store.is_empty("m")
        assert not await store.is_empty("m/w/")
        assert await store.is_empty("spam/")

    async def test_exists(self, store):
        assert await store.exists("m/w/zarr.json")
        assert await store.exists("m/w/c/0")
        assert not await store.exists("m/w/c/1")
        assert not await store.exists("m/w")

    test_serializable_store = writes("test_serializable_store")
    test_set = writes("test_set")
    test_set_not_open = writes("test_set_not_open")
    test_set_many = writes("test_set_many")
    test_set_if_not_exists = writes("test_set_if_not_exists")
    test_getsize_prefix = writes("test_getsize_prefix")
    test_clear = writes("test_clear")
    # What these list they write first; `test_zarr.py` lists a checkpoint.
    test_list = writes("test_list")
    test_list_prefix = writes("test_list_prefix")
    test_list_empty_path = writes("test_list_empty_path")
    test_list_dir = writes("test_list_dir")
