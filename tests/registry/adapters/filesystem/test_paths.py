"""How a path splits into a ref and a file, and what listings show."""

from __future__ import annotations

import json

import fsspec
import numpy as np
import pytest
import torch

import holdfast
from holdfast.errors import InvalidLocation, NoSuchPath, ReadOnlyStore, StoreUnavailable
from holdfast.filesystem import HoldfastFileSystem
from holdfast.registry.adapters.filesystem import session
from holdfast.registry.spec.policies import Monitor
from tests.registry.adapters.filesystem.conftest import URL, plain
from tests.support.faults import Hooked


@pytest.fixture
def life(run):
    """Refs of every form. The last step has the best accuracy, the first the best loss."""
    first = run.save({"model": {"w": torch.zeros(4)}}, step=1, metrics={"loss": 1, "accuracy": 0.1})
    run.save(
        {"model": {"w": torch.ones(4)}},
        step=2,
        metrics={"loss": 2, "accuracy": 0.9},
        companions={"ema": {"model": {"w": torch.full((4,), 0.5)}}},
    )
    run.pins.tags.set("state.pt", first)  # spelled like a file
    run.pins.tags.set("companions", first)
    run.pins.gates.set("phase1_end", first)
    card = {"description": "a test", "intended_use": "a test"}
    run.releases.publish("1.2.0", first, only=["model"], card=card)
    data = np.frombuffer(b"a,b\n1,2\n", "u1")
    run.pins.artifacts.set("latest", {"file": {"name": "labels.csv", "bytes": data}})
    return first


def refs_of(first):
    return [
        *("run/latest", "run/best", "run/best/accuracy", "run/main/best", "run/main/best/loss"),
        *("run/main/latest", "run/main/step00000001", "run/main/step1", "run/tags/state.pt"),
        *("run/tags/companions", "run/gates/phase1_end", "run/releases/1.2.0"),
        *("run/releases/latest", "run/artifacts/latest", "run/latest/companions/ema"),
        *(f"run/{first.digest.short}", first.digest.hex()),
    ]


def test_every_form_of_a_ref_is_the_folder_of_its_state(fs, life, reg):
    for ref in refs_of(life):
        expected = reg.stored(ref)
        meta = json.loads(fs.cat_file(f"holdfast://{ref}/meta.json"))
        assert (meta["ref"], meta["id"]) == (expected.ref, str(expected.digest)), ref
        assert fs.isdir(ref)
        assert fs.info(f"{ref}/meta.json")["id"] == meta["id"]
    assert fs.cat_file("run/artifacts/latest/file/labels.csv") == b"a,b\n1,2\n"


def test_best_of_a_metric_and_files_of_best_are_told_apart(fs, life):
    assert json.loads(fs.cat_file("run/best/meta.json"))["step"] == 1
    assert json.loads(fs.cat_file("run/best/accuracy/meta.json"))["step"] == 2
    assert fs.ls("run/best", detail=False) == [
        *("run/best/accuracy", "run/best/meta.json", "run/best/model.safetensors"),
        *("run/best/state.pt", "run/best/state.zarr"),
    ]


def test_a_metric_that_is_spelled_like_a_file_is_the_file(fs, reg):
    run = reg.create_run(
        "odd", monitor=[Monitor(metric=one, mode="min") for one in ("meta.json", "loss")]
    )
    run.save({"m": torch.ones(1)}, step=1, metrics={"meta.json": 1.0, "loss": 1.0})
    assert fs.isfile("odd/best/meta.json")
    assert json.loads(fs.cat_file("odd/best/loss/meta.json"))["step"] == 1


def test_a_run_comes_before_an_id(fs, life, reg):
    digits = life.digest.hex()[:8]
    assert fs.isfile(f"{digits}/meta.json")
    fs.invalidate_cache()
    reg.create_run(digits).save({"m": torch.ones(1)}, step=9)
    assert not fs.exists(f"{digits}/meta.json")
    assert json.loads(fs.cat_file(f"{digits}/latest/meta.json"))["step"] == 9


@pytest.mark.parametrize(
    "path",
    [
        *("other", "run/nothing", "run/tags", "run/tags/none/meta.json", "run/main/step3"),
        *("run/meta.json", "run/latest/none", "run/latest/other.safetensors", "run//latest"),
        *("run/latest/meta.json/x", "run/latest/state.zarr/model/w/c/1", "deadbeefdeadbeef"),
        *("run/latest/companions/none", "run/companions/ema", "run/latest/file/x", ".."),
    ],
)
def test_what_is_not_there_is_said_to_be_absent(fs, run, path):
    run.save({"model": {"w": torch.ones(4)}}, step=2)
    with pytest.raises(NoSuchPath) as caught:
        fs.cat_file(path)
    assert isinstance(caught.value, FileNotFoundError)
    assert fs.exists(path) == (path == "run/tags")


def test_listings_infos_and_contents_agree(fs, life, run):
    run.save(plain(), step=3)
    found = 0
    for folder, folders, files in fs.walk("", detail=True):
        listed = {one["name"]: one for one in fs.ls(folder)}
        assert [*listed] == sorted(listed)
        for entry in [*folders.values(), *files.values()]:
            assert fs.info(entry["name"]) == listed[entry["name"]] == entry
        for entry in files.values():
            assert len(fs.cat_file(entry["name"])) == entry["size"]
            assert fs.ls(entry["name"]) == [entry]
            found += 1
    assert found > 100
    assert fs.glob("run/*/meta.json") == ["run/best/meta.json", "run/latest/meta.json"]


def test_an_outage_is_an_error_and_no_absence(fs, meter, life):
    broken = Hooked(meter.inner)
    meter.inner = broken
    fs.info("run/best")

    def fail(method: str, key: str) -> None:
        raise StoreUnavailable("no answer")

    broken.before = fail
    with pytest.raises(StoreUnavailable):
        fs.exists("run/best/model.safetensors")


def test_writing_says_what_to_do(fs, life, tmp_path):
    (tmp_path / "x").write_bytes(b"x")
    for write in (
        lambda: fs.open("run/x", "wb"),
        lambda: fs.pipe("run/x", b""),
        lambda: fs.put(str(tmp_path / "x"), "run/x"),
        lambda: fs.rm("run/best/meta.json"),
        lambda: fs.mv("run/best/meta.json", "run/x"),
        lambda: fs.cp("run/best/meta.json", "run/x"),
        lambda: fs.makedirs("run/x"),
        lambda: fs.touch("run/x"),
        lambda: fsspec.open("holdfast://run/x", "w", registry=URL).open(),
    ):
        with pytest.raises(ReadOnlyStore, match=r"run\.save"):
            write()


def test_the_registry_of_the_environment_is_the_default(fs, life, monkeypatch):
    monkeypatch.setenv("HOLDFAST_REGISTRY", URL)
    assert HoldfastFileSystem(skip_instance_cache=True).isfile("run/best/meta.json")
    options = {"registry": "memory://none", "storage_options": {"key": "x"}}
    with pytest.raises(InvalidLocation, match="key"), monkeypatch.context() as patch:
        patch.setattr(session, "open_registry", holdfast.open)
        fsspec.filesystem("holdfast", **options).ls("")
    with pytest.raises(TypeError, match="regsitry"):
        HoldfastFileSystem(regsitry=URL)
