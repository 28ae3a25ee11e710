"""What other libraries read by URL: the right values, by no more bytes than they need."""

from __future__ import annotations

import pickle

import fsspec
import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
import zarr

import holdfast
from holdfast.errors import Damaged
from holdfast.filesystem import HoldfastFileSystem
from tests.registry.adapters.filesystem.conftest import URL
from tests.support.faults import flip
from tests.support.stores import packs_of

OPTIONS = {"registry": URL}
ROWS, COLUMNS = 3000, 700
CHUNK_BYTES = 1497 * COLUMNS * 4
#: Logs, manifests and placements.
ASIDE = 20_000


@pytest.fixture
def saved(fs, run):
    """A matrix of three chunks, beside another one that nobody asks for."""
    model = {"w": torch.randn(ROWS, COLUMNS), "other": torch.randn(1_000_000)}
    return run.save({"model": model, "epoch": 3}, step=5, metrics={"loss": 0.25})


@pytest.fixture
def matrix(saved):
    return saved["model/w"][...].numpy()


def test_dask_reads_the_chunks_of_a_slice(meter, run, saved, matrix):
    dask_array = pytest.importorskip("dask.array")
    with meter.measure() as opening:
        lazy = dask_array.from_zarr(
            "holdfast://run/best/state.zarr/model/w", storage_options=OPTIONS
        )
    assert lazy.chunks == ((1497, 1497, 6), (COLUMNS,))
    assert opening.read_bytes < ASIDE
    with meter.measure() as usage:
        part = lazy[1500:1510].sum(axis=0).compute(scheduler="threads")
    np.testing.assert_allclose(part, matrix[1500:1510].sum(axis=0), rtol=1e-5)
    assert usage.read_bytes < CHUNK_BYTES + ASIDE
    # A worker in another process gets it pickled, perhaps after a newer and better checkpoint.
    run.save({"model": {"w": torch.zeros(2, 2)}}, step=6, metrics={"loss": 0.1})
    sent = pickle.loads(pickle.dumps(lazy))
    np.testing.assert_array_equal(sent.compute(scheduler="threads"), matrix)


def test_xarray_opens_a_component(meter, saved, matrix):
    xr = pytest.importorskip("xarray")
    url = "holdfast://run/latest/state.zarr/model"
    with meter.measure() as opening:
        data = xr.open_zarr(url, storage_options=OPTIONS, consolidated=False)
    assert opening.read_bytes < ASIDE
    with meter.measure() as usage:
        part = data["w"][:10, :5].values
    np.testing.assert_array_equal(part, matrix[:10, :5])
    assert usage.read_bytes < CHUNK_BYTES + ASIDE
    assert data["w"].attrs["holdfast_dtype"] == "float32"


def test_zarr_opens_the_state(meter, saved, matrix):
    group = zarr.open_group("holdfast://run/best/state.zarr", mode="r", storage_options=OPTIONS)
    assert group.attrs["id"] == str(saved.digest)
    assert sorted(group["model"].array_keys()) == ["other", "w"]
    with meter.measure() as usage:
        np.testing.assert_array_equal(group["model/w"][2990:], matrix[2990:])
    assert usage.read_bytes < CHUNK_BYTES + 6 * COLUMNS * 4 + ASIDE


def test_pandas_reads_what_is_known_of_a_checkpoint(meter, saved):
    pd = pytest.importorskip("pandas")
    url = "holdfast://run/best/meta.json"
    with meter.measure() as usage:
        frame = pd.read_json(url, storage_options=OPTIONS)
        series = pd.read_json(url, storage_options=OPTIONS, typ="series")
    assert frame.loc["loss", "metrics"] == 0.25
    assert {*frame["step"]} == {5}
    assert (series["step"], series["ref"], series["metrics"]) == (5, saved.ref, {"loss": 0.25})
    assert usage.read_bytes < ASIDE


def test_safetensors_reads_bytes_and_local_copies(fs, meter, saved, matrix, tmp_path):
    path = "run/best/model.safetensors"
    with meter.measure() as usage:
        loaded = safetensors.torch.load(fs.cat(f"holdfast://{path}"))
    np.testing.assert_array_equal(loaded["w"].numpy(), matrix)
    assert usage.read_bytes - saved.size_bytes < ASIDE
    fs.get(path, str(tmp_path / "copy"))
    url = f"simplecache::holdfast://{path}"
    cache = {"cache_storage": str(tmp_path / "cache")}
    cached = fsspec.open_local(url, holdfast=OPTIONS, simplecache=cache)
    for local in (tmp_path / "copy", cached):
        with safetensors.safe_open(local, "pt") as file:
            assert torch.equal(file.get_slice("w")[5:7], loaded["w"][5:7])


def test_torch_loads_a_state(meter, saved, matrix):
    with (
        meter.measure() as usage,
        fsspec.open("holdfast://run/best/state.pt", registry=URL) as file,
    ):
        state = torch.load(file, weights_only=True)
    np.testing.assert_array_equal(state["model"]["w"].numpy(), matrix)
    assert state["epoch"] == 3
    assert usage.read_bytes - saved.size_bytes < ASIDE


def test_damage_is_our_error_through_every_door(fs, backend, saved, tmp_path):
    for pack in packs_of(saved):
        for bit in range(0, 8 * len(backend.get(pack)), 8 * 2**20):
            flip(backend, pack, bit)
    url = "holdfast://run/best"
    xr, pd = pytest.importorskip("xarray"), pytest.importorskip("pandas")
    dask_array = pytest.importorskip("dask.array")
    assert pd.read_json(f"{url}/meta.json", storage_options=OPTIONS, typ="series")["step"] == 5
    group = zarr.open_group(f"{url}/state.zarr", mode="r", storage_options=OPTIONS)
    lazy = dask_array.from_zarr(f"{url}/state.zarr/model/w", storage_options=OPTIONS)
    data = xr.open_zarr(f"{url}/state.zarr/model", storage_options=OPTIONS, consolidated=False)
    for read in (
        lambda: group["model/w"][...],
        lambda: lazy.compute(scheduler="synchronous"),
        lambda: data["w"].values,
        lambda: safetensors.torch.load(fs.cat(f"{url}/model.safetensors")),
        lambda: torch.load(fs.open(f"{url}/state.pt"), weights_only=True),
        lambda: pd.read_csv(f"{url}/model.safetensors", storage_options=OPTIONS),
        lambda: fs.get(f"{url}/model.safetensors", str(tmp_path / "copy")),
        lambda: fs.cat_ranges(["run/best/state.pt"], 10_000, 20_000, on_error="raise"),
    ):
        with pytest.raises(Damaged):
            read()


def test_the_registry_can_be_in_a_bucket(s3_url):
    url = s3_url()
    state = {"model": {"w": torch.arange(5.0)}}
    with holdfast.init(url, skip_race_probe=True) as reg:
        reg.create_run("run").save(state, step=1)
    fsspec.register_implementation("holdfast", HoldfastFileSystem, clobber=True)
    # The options of its own store are one of those of the file system.
    options = {"registry": url, "storage_options": {"requester_pays": False}}
    with fsspec.open("holdfast://run/latest/state.pt", **options) as file:
        found = torch.load(file, weights_only=True)
    assert torch.equal(found["model"]["w"], state["model"]["w"])
    HoldfastFileSystem.clear_instance_cache()
