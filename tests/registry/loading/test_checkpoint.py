"""A checkpoint in hand: what it tells, and its ways back into memory."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
import torch

from holdfast.backends.wrappers import Metered
from holdfast.registry.errors import (
    Damaged,
    IncompatibleState,
    InvalidInput,
    MissingObject,
    NotFound,
)
from holdfast.registry.history.log import RunLog
from holdfast.registry.objects.keys import slot_key
from tests.support.faults import flip
from tests.support.states import same, small_state
from tests.support.stores import contents, packs_of


def net() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(30, 20), torch.nn.BatchNorm1d(20))


def test_what_a_checkpoint_tells(reg):
    run = reg.create_run("run")
    checkpoint = run.save(
        small_state(), step=7, phase=2, metrics={"loss": 0.5}, meta={"epoch": (1, None)}
    )
    assert (checkpoint.run_id, checkpoint.phase, checkpoint.step) == ("run", 2, 7)
    assert checkpoint.metrics == {"loss": 0.5}
    assert checkpoint.meta == {"epoch": (1, None)}
    assert checkpoint.size_bytes == 2400 + 800 + 3600
    assert checkpoint.ref == "run/phase2/step00000007"
    assert list(checkpoint.components) == ["model", "optimizer"]
    assert not checkpoint.superseded
    assert checkpoint.created.tzinfo is not None
    assert reg.checkpoint(checkpoint.ref).digest == checkpoint.digest
    assert checkpoint.digest.short in repr(checkpoint)


def test_a_named_phase_stays_a_name(run):
    checkpoint = run.save(small_state(), step=1, phase="warmup")
    assert (checkpoint.phase, checkpoint.ref) == ("warmup", "run/warmup/step00000001")


def test_tensors_are_told_from_the_manifest_alone(backend, open_registry):
    open_registry(backend).create_run("run").save(small_state(), step=1)
    calls = []
    checkpoint = open_registry(Metered(backend, calls)).run("run").latest()
    found = checkpoint.tensors()
    assert {path: (t.dtype, t.shape, t.nbytes) for path, t in found.items()} == {
        "model/w": ("float32", (600,), 2400),
        "model/b": ("float64", (100,), 800),
        "optimizer/m": ("int32", (900,), 3600),
    }
    assert not [call for call in calls if call.key.startswith(("packs/", "placements/"))]


def test_only_some_components(run):
    checkpoint = run.save(small_state(), step=1)
    assert same(checkpoint.load(only=["optimizer"]), {"optimizer": small_state()["optimizer"]})
    assert checkpoint.load(only=[]) == {}
    assert list(checkpoint.load(only=["optimizer", "model"])) == ["model", "optimizer"]


def test_a_mistyped_component_suggests_near_ones(run):
    checkpoint = run.save(small_state(), step=1)
    with pytest.raises(NotFound, match=r"modle.*expected model, optimizer.*Did you mean 'model'"):
        checkpoint.load(only=["modle"])


@pytest.mark.parametrize("only", [[1], [None], [b"model"], [["model"]]])
def test_a_component_is_named_by_a_text(run, only):
    checkpoint = run.save(small_state(), step=1)
    with pytest.raises(InvalidInput, match="a component is named by a text"):
        checkpoint.load(only=only)


def test_metrics_reported_later_are_merged_and_need_no_token(run, backend, open_registry):
    checkpoint = run.save(small_state(), step=1, metrics={"a": 1.0})
    other = open_registry(backend).run("run")
    other.latest().report({"b": 2, "a": float("inf")})
    assert other.latest().metrics == {"a": float("inf"), "b": 2.0}
    assert checkpoint.metrics == {"a": 1.0}
    run.refresh()
    assert checkpoint.metrics == {"a": float("inf"), "b": 2.0}
    run.save(small_state(1), step=2)


def test_a_report_of_no_number_writes_nothing(run, backend):
    checkpoint = run.save(small_state(), step=1)
    before = contents(backend)
    with pytest.raises(InvalidInput, match="a metric is not a number"):
        checkpoint.report({"loss": "low"})
    assert contents(backend) == before


# Into memory that exists


def test_load_into_fills_a_module_in_place(run):
    source, target = net(), net()
    with torch.no_grad():
        source[0].weight.add_(1)
    checkpoint = run.save({"model": source}, step=1)
    pointer = target[0].weight.data_ptr()
    report = checkpoint.load_into(target, component="model")
    assert torch.equal(target[0].weight, source[0].weight)
    assert target[0].weight.data_ptr() == pointer
    assert target[0].weight.requires_grad
    assert set(report.loaded) == {f"model/{key}" for key in source.state_dict()}
    assert (report.missing, report.unexpected) == ((), ())


def test_load_into_a_nest_of_dicts_leaves_plain_values_alone(run):
    checkpoint = run.save(small_state(1), step=1)
    target = small_state(9)
    checkpoint.load_into(target)
    assert same(target["model"], small_state(1)["model"])
    assert (target["optimizer"]["lr"], target["optimizer"]["step"]) == (0.1, 9)


def test_load_into_memory_that_is_not_contiguous(run):
    one = torch.arange(600).reshape(20, 30)
    checkpoint = run.save({"m": {"w": one}}, step=1)
    target = torch.zeros(30, 20, dtype=torch.int64).T
    checkpoint.load_into({"m": {"w": target}})
    assert torch.equal(target, one)


def test_load_into_an_array_that_is_not_contiguous(run):
    one = np.arange(600).reshape(20, 30)
    checkpoint = run.save({"m": {"w": one}}, step=1)
    target = np.zeros((30, 20), np.int64).T
    checkpoint.load_into({"m": {"w": target}})
    assert np.array_equal(target, one)


def test_load_into_leaves_long_strings_alone(run):
    checkpoint = run.save({"m": {"w": np.arange(100), "text": b"x" * 9000}}, step=1)
    target = {"m": {"w": np.zeros(100, np.int64), "text": b"y" * 9000}}
    checkpoint.load_into(target)
    assert target["m"]["w"][5] == 5


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ({"w": np.zeros(601, np.float32)}, r"m/w is float32\[600\], target float32\[601\]"),
        ({"w": np.zeros(600, np.float64)}, r"m/w is float32\[600\], target float64\[600\]"),
        ({"w": np.zeros(600, np.float32), "v": np.zeros(99)}, "m/v is not in the checkpoint"),
        ({}, "m/w is not in the target"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_read(
    backend, open_registry, target, message
):
    open_registry(backend).create_run("run").save({"m": {"w": np.ones(600, np.float32)}}, step=1)
    calls = []
    checkpoint = open_registry(Metered(backend, calls)).run("run").latest()
    with pytest.raises(IncompatibleState, match=rf"run/main/step00000001.*{message}"):
        checkpoint.load_into({"m": target})
    assert not [call for call in calls if call.key.startswith("packs/")]
    assert all(not array.any() for array in target.values())


def test_not_strict_fills_what_both_sides_have(run):
    checkpoint = run.save({"m": {"w": np.ones(600), "old": np.ones(70)}}, step=1)
    target = {"m": {"w": np.zeros(600), "new": np.zeros(70)}}
    report = checkpoint.load_into(target, strict=False)
    assert report.loaded == ("m/w",)
    assert report.missing == ("m/new",)
    assert report.unexpected == ("m/old",)
    assert target["m"]["w"].all()


def test_many_differences_are_counted_not_listed(run):
    checkpoint = run.save({"m": {f"w{i}": np.ones(70) for i in range(30)}}, step=1)
    with pytest.raises(IncompatibleState, match="and 22 more"):
        checkpoint.load_into({"m": {}})


def test_another_component_is_not_found(run):
    checkpoint = run.save({"model": net()}, step=1)
    with pytest.raises(NotFound, match="no such component"):
        checkpoint.load_into(net(), component="modell")


def test_a_module_as_the_whole_state(run):
    source, target = net(), net()
    with torch.no_grad():
        source[0].bias.fill_(3)
    run.save(source, step=1).load_into(target)
    assert torch.equal(target[0].bias, source[0].bias)
    assert type(run.latest().load()) is OrderedDict


def test_tensors_come_to_the_device_that_is_asked_for(run):
    checkpoint = run.save({"m": {"w": torch.arange(100), "n": np.arange(90)}}, step=1)
    loaded = checkpoint.load(map_location="meta")
    assert loaded["m"]["w"].device.type == "meta"
    assert isinstance(loaded["m"]["n"], np.ndarray)


# Its place


def test_a_reader_follows_a_repack_and_tries_once_more(run, backend, open_registry, reg):
    checkpoint = run.save(small_state(), step=1)
    reader = open_registry(backend).run("run").latest()
    moved = checkpoint.handle.reader.place.changed(manifest_generation=3)
    old, new = (
        f"manifests/{checkpoint.digest.hex()[:2]}/{checkpoint.digest.hex()}.{g}" for g in "03"
    )
    backend.put(new, backend.get(old))
    log = RunLog(reg.handle.store, "run")
    log.open()
    log.append(lambda run: [moved])
    backend.delete(old)
    assert same(reader.load(), small_state())


def test_what_is_gone_for_good_is_missing(run, backend, open_registry):
    checkpoint = run.save(small_state(), step=1)
    for key in packs_of(checkpoint):
        backend.delete(key)
    with pytest.raises(MissingObject):
        open_registry(backend).run("run").latest().load()


def test_a_checkpoint_that_the_log_does_not_place_is_missing(backend, open_registry, reg):
    from holdfast.registry.history.actions import AddCheckpoint
    from holdfast.registry.history.authorship import commit_line
    from holdfast.registry.values.digest import Digest

    reg.create_run("run")
    log = RunLog(reg.handle.store, "run")
    log.open()
    action = AddCheckpoint(manifest=Digest.of(b"?"), phase="main", step=1, size_bytes=0)
    log.append(lambda run: [commit_line(run, [action])])
    with pytest.raises(MissingObject, match="run/main/step00000001: the log gives no place"):
        open_registry(backend).run("run").latest().load()


def test_a_damaged_slot_refuses_the_run(run, backend, open_registry):
    run.save(small_state(), step=1)
    flip(backend, slot_key("run", 1))
    with pytest.raises(Damaged):
        open_registry(backend).run("run")


@pytest.mark.parametrize("device", ["nowhere", "cuda:99", 5.5])
def test_a_device_that_is_none_is_refused_before_anything_is_read(run, device):
    checkpoint = run.save({"m": {"w": np.zeros(1000)}}, step=1)
    with pytest.raises(InvalidInput, match="no such device to load to"):
        checkpoint.load(map_location=device)
