"""Bytes of files: those that other doors give, ranged, verified, and of one state."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import signal
import struct
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch

import holdfast
from holdfast.errors import Conflict, Damaged, MissingObject, NoSuchPath, ObjectNotFound
from holdfast.filesystem import HoldfastFileSystem
from holdfast.registry import formats
from holdfast.registry.adapters.filesystem import file_system, state_folder
from holdfast.registry.adapters.filesystem.file_system import RefsTree
from holdfast.registry.adapters.filesystem.session import Folder, Literal
from holdfast.registry.adapters.filesystem.state_folder import Chunks, Joined
from holdfast.registry.history.replay import RunManifest
from holdfast.registry.objects.chunking import RecentChunks
from holdfast.registry.spec.policies import Monitor
from tests.registry.adapters.filesystem.conftest import plain, weights
from tests.support.faults import flip
from tests.support.stores import packs_of, small_grid

DTYPES = [
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
]
FILES = ["state.pt", "model.safetensors", "state.zarr/model/w/c/0/0", "meta.json"]


@pytest.fixture
def grid():
    """Two rows of `w` in a chunk; `w` has a digest list."""
    with small_grid(200, list_threshold=8):
        yield


@pytest.fixture
def saved(grid, run):
    return run.save(plain(), step=1, metrics={"loss": 1.0})


def test_safetensors_are_the_bytes_that_pull_writes(fs, grid, run, tmp_path):
    states = {"model": weights(), "bare": torch.arange(3), "nested": {"a": {"b": torch.ones(1)}}}
    states["odd"] = {"x": torch.zeros(2, dtype=torch.complex128)}
    states["metadata"] = {"a": "b"}
    ck = run.save(states, step=1)
    for name in ("model", "bare"):
        formats.write(tmp_path / "x.safetensors", ck, only=[name], force=True)
        assert (
            fs.cat_file(f"run/latest/{name}.safetensors")
            == (tmp_path / "x.safetensors").read_bytes()
        )
    for name in ("nested", "odd", "metadata"):
        assert not fs.exists(f"run/latest/{name}.safetensors")
    assert [one for one in fs.ls("run/latest", detail=False) if one.endswith("tensors")] == [
        "run/latest/bare.safetensors",
        "run/latest/model.safetensors",
    ]


def test_state_pt_is_the_state_and_the_same_each_time(fs, saved):
    data = fs.cat_file("run/latest/state.pt")
    loaded, expected = torch.load(io.BytesIO(data), weights_only=True), saved.load()
    assert [*loaded] == [*expected]
    assert loaded["optimizer"]["betas"] == (0.9, 0.999)
    assert torch.equal(loaded["optimizer"]["state"][0]["exp_avg"], torch.ones(9))
    assert (loaded["note"], loaded["step"]) == (expected["note"], 3)
    for name, tensor in expected["model"].items():
        assert loaded["model"][name].dtype == tensor.dtype
        assert torch.equal(loaded["model"][name], tensor), name
    fs.invalidate_cache()
    assert fs.cat_file("run/latest/state.pt") == data
    with fs.open("run/latest/state.pt") as file:
        assert torch.equal(
            torch.load(file, weights_only=True)["model"]["w"], expected["model"]["w"]
        )


def test_state_pt_of_every_type_that_torch_loads(fs, run):
    tensors = {n: torch.ones(5).to(getattr(torch, n)) for n in DTYPES}
    state = {
        "model": tensors,
        "plain": {"t": (1, [2.5, None]), "s": {1, 2}, "big": 10**30, "b": b"x" * 5000, "c": 1 + 2j},
        "version": {"torch": torch.__version__},
    }
    run.save(state, step=1)
    loaded = torch.load(io.BytesIO(fs.cat_file("run/latest/state.pt")), weights_only=True)
    assert loaded["plain"] == state["plain"]
    assert type(loaded["version"]["torch"]) is str
    for name, tensor in tensors.items():
        assert loaded["model"][name].dtype == tensor.dtype
        assert torch.equal(loaded["model"][name], tensor), name


@pytest.mark.parametrize(
    "odd",
    [
        np.arange(3),
        torch.eye(2).to_sparse(),
        range(3),
        np.float32(1),
    ],
    ids=lambda odd: type(odd).__name__,
)
def test_state_pt_is_absent_if_only_code_could_load_it(fs, run, odd):
    run.save({"model": {"w": torch.ones(3)}, "odd": {"x": odd}}, step=1)
    assert "run/latest/state.pt" not in fs.ls("run/latest", detail=False)
    assert not fs.exists("run/latest/state.pt")
    with pytest.raises(NoSuchPath, match="running code"):
        fs.open("run/latest/state.pt")


def test_state_pt_does_not_trust_adapters(fs, run):
    class Doubled:
        def __init__(self, value: float) -> None:
            self.value = value

    holdfast.register_adapter(
        "tests.doubled",
        Doubled,
        to_plain=lambda one: torch.tensor(one.value / 2),
        from_plain=lambda half: float(half) * 2,  # of a placeholder it would be nonsense
    )
    run.save({"model": {"w": torch.ones(3)}, "odd": Doubled(4.0)}, step=1)
    assert not fs.exists("run/latest/state.pt")


def test_state_pt_has_a_bound_for_strings(fs, saved, monkeypatch):
    monkeypatch.setattr(state_folder, "_PICKLED_BYTES", 69_999)
    with pytest.raises(NoSuchPath, match="too long"):
        fs.info("run/latest/state.pt")


def test_any_range_is_that_of_the_whole(fs, saved):
    pick = random.Random(7)
    for name in FILES:
        path = f"run/latest/{name}"
        whole = fs.cat_file(path)
        ranges = [(0, 0), (0, None), (-9, None), (5, -5), (len(whole), None), (9, 3), (0, 10**9)]
        for _ in range(150):
            start = pick.randrange(len(whole) + 1)
            ranges.append((start, start + pick.randrange(700)))
        starts, stops = zip(*ranges, strict=True)
        parts = fs.cat_ranges([path] * len(ranges), [*starts], [*stops], on_error="raise")
        assert parts == [whole[start:stop] for start, stop in ranges]
        with fs.open(path) as file:
            file.seek(len(whole) // 2)
            assert file.read(100) + file.read() == whole[len(whole) // 2 :]


def test_a_range_of_one_tensor_moves_that_tensor(fs, meter, run):
    run.save(
        {"model": {"a": torch.randn(500_000), "b": torch.randn(3000, 700), "c": torch.ones(9)}},
        step=1,
    )
    path = "run/latest/model.safetensors"
    with meter.measure() as looking:
        size = fs.info(path)["size"]
        (length,) = struct.unpack("<Q", fs.cat_file(path, 0, 8))
        header = json.loads(fs.cat_file(path, 8, 8 + length))
    assert size > 10_000_000
    assert looking.read_bytes < 10_000  # logs and manifest
    start, stop = (8 + length + one for one in header["b"]["data_offsets"])
    fs.cat_file(path, start, start)
    with meter.measure() as usage:
        data = fs.cat_file(path, start, stop)
    assert usage.read_bytes - 8_400_000 < 3000  # the placement
    assert usage.calls == {"get": 2}
    assert len(data) == 8_400_000
    with meter.measure() as usage:
        fs.cat_file(path, start + 10, start + 20)
        fs.cat_file(path, start + 30, start + 40)
    assert usage.read_bytes == 1497 * 700 * 4  # one chunk, once
    with fs.open("run/latest/state.pt") as file, meter.measure() as usage:
        file.read(4)
        file.seek(-100, 2)
        file.read()
    assert usage.requests == 0


def damage(backend, checkpoint) -> None:
    """Change every chunk of a checkpoint."""
    for pack in packs_of(checkpoint):
        for bit in range(0, 8 * len(backend.get(pack)), 8 * 150):
            flip(backend, pack, bit)


@pytest.mark.parametrize("name", FILES[:3])
def test_a_damaged_chunk_is_our_error(fs, backend, saved, name):
    damage(backend, saved)
    with pytest.raises(Damaged):
        fs.cat_file(f"run/latest/{name}")
    with pytest.raises(Damaged), fs.open(f"run/latest/{name}") as file:
        file.read()


def test_a_failed_copy_leaves_no_file(fs, backend, saved, tmp_path):
    damage(backend, saved)
    with pytest.raises(Damaged):
        fs.get("run/latest/model.safetensors", str(tmp_path / "x"))
    assert not (tmp_path / "x").exists()
    (tmp_path / "x").write_text("mine")
    for absent_or_damaged in ("none", "model.safetensors"):
        with pytest.raises((FileNotFoundError, Damaged)):
            fs.get_file(f"run/latest/{absent_or_damaged}", str(tmp_path / "x"))
        assert (tmp_path / "x").read_text() == "mine"
    fs.get("run/latest/meta.json", str(tmp_path / "x"))
    assert (tmp_path / "x").read_bytes() == fs.cat_file("run/latest/meta.json")


def test_a_name_that_is_a_step_of_a_path_is_no_entry(fs, saved, tmp_path, monkeypatch):
    """A foreign run may have a monitor of such a name: no copy leaves its folder."""
    hostile = tuple(Monitor(metric=name, mode="min") for name in ("..", ".", "loss"))
    monkeypatch.setattr(RunManifest, "monitors", property(lambda _: hostile))
    monkeypatch.setattr(RefsTree, "_state", lambda *_: Folder.of({"x": Literal(b"x")}))
    assert fs.ls("run/best", detail=False) == ["run/best/loss", "run/best/x"]
    for path in ("run/best/..", "run/best/.", "run/best/../x"):
        with pytest.raises(FileNotFoundError):
            fs.info(path)
    fs.get("run/best", str(tmp_path / "a" / "b"), recursive=True)
    assert {one.name for one in tmp_path.rglob("*") if one.is_file()} == {"x"}
    assert not (tmp_path / "a" / "x").exists()


def test_a_lost_pack_is_no_absent_file(fs, backend, saved):
    for pack in packs_of(saved):
        backend.delete(pack)
    for name in FILES[:3]:
        with pytest.raises(MissingObject) as caught:
            fs.cat_file(f"run/latest/{name}")
        assert not isinstance(caught.value, OSError)


def test_an_object_that_is_not_found_while_reading_is_no_absent_file(saved):
    class Losing:
        def chunk_digests(self, entry):
            return [saved.digest] * entry.grid.count

        def read_chunks(self, wanted):
            raise ObjectNotFound("gone")

    entry = saved.manifest.components["optimizer"].tensors[0]
    entry = entry._replace(shape=(200,), inline=None, chunks=(saved.digest,))
    file = Joined([entry], Chunks("run", Losing(), RecentChunks(0)))
    for stop in (1, 800):
        with pytest.raises(MissingObject):
            file.read(0, stop)


# Moving names


def step_of(fs, ref: str = "run/latest") -> int:
    return json.loads(fs.cat_file(f"{ref}/meta.json"))["step"]


def test_a_moving_name_is_resolved_once(fs, run, monkeypatch):
    monkeypatch.setattr(file_system, "_KEPT_STATES", 1)
    run.save({"model": {"w": torch.zeros(3)}}, step=1, companions={"e": {"w": torch.zeros(1)}})
    assert step_of(fs) == 1
    run.save({"model": {"w": torch.ones(3)}}, step=2, companions={"e": {"w": torch.ones(1)}})
    new = fs.cat_file("run/main/step2/model.safetensors")  # found, though it was saved meanwhile
    assert step_of(fs) == 1
    assert fs.cat_file("run/latest/model.safetensors") != new
    assert fs.cat_file("run/latest/companions/e/state.zarr/w/c/0") == bytes(4)
    run.save({"model": {"w": torch.ones(3)}}, step=1, phase="later")
    assert step_of(fs, "run/later/latest") == step_of(fs) == 1
    fs.invalidate_cache()
    assert step_of(fs, "run/main/latest") == 2
    assert json.loads(fs.cat_file("run/latest/meta.json"))["phase"] == "later"
    assert fs.cat_file("run/latest/model.safetensors") == new


def test_a_pickled_instance_has_options_and_what_it_resolved(fs, run):
    run.save({"model": {"w": torch.zeros(3)}}, step=1)
    assert step_of(fs) == 1
    data = pickle.dumps(fs)
    assert len(data) < 500
    run.save({"model": {"w": torch.ones(3)}}, step=2)
    copy = pickle.loads(data)
    assert copy is not fs
    assert step_of(copy) == 1
    copy.invalidate_cache()
    assert step_of(copy) == 2


def test_a_resolved_name_that_is_gone_is_an_error_and_not_absent(fs, run, reg):
    run.pins.artifacts.set("a", {"w": torch.ones(1)})
    fs.info("run/artifacts/a/meta.json")
    resolved = {"run/artifacts/a": ("run", "artifacts/a", "0" * 64)}
    other = HoldfastFileSystem(fs.storage_options["registry"], resolved=resolved)
    with pytest.raises(Conflict, match="invalidate_cache"):
        other.cat_file("run/artifacts/a/meta.json")


def test_another_process_and_a_forked_child_read_the_same(tmp_path):
    with holdfast.init(tmp_path / "reg", skip_race_probe=True) as reg:
        run = reg.create_run("run")
        run.save({"model": {"w": torch.zeros(3)}}, step=1)
        fs = HoldfastFileSystem(str(tmp_path / "reg"))
        before = fs.cat_file("run/latest/model.safetensors")
        run.save({"model": {"w": torch.ones(3)}}, step=2)
        (tmp_path / "fs").write_bytes(pickle.dumps(fs))
        code = (
            "import pickle, sys, pathlib\n"
            "fs = pickle.loads(pathlib.Path(sys.argv[1]).read_bytes())\n"
            "sys.stdout.buffer.write(fs.cat_file('run/latest/model.safetensors'))\n"
        )
        found = subprocess.run(
            [sys.executable, "-c", code, tmp_path / "fs"], check=True, capture_output=True
        )
        assert found.stdout == before
        held, forked = threading.Event(), threading.Event()

        def hold() -> None:
            with fs._session.lock:
                held.set()
                forked.wait()

        holder = threading.Thread(target=hold)
        holder.start()
        held.wait()
        child = os.fork()
        if not child:
            signal.alarm(60)  # nobody releases the lock here
            os._exit(0 if fs.cat_file("run/latest/model.safetensors") == before else 1)
        forked.set()
        holder.join()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
