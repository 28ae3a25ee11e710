"""torch.distributed.checkpoint in one process: the ids, what is refused, what is loaded."""

from __future__ import annotations

import logging
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import holdfast
from holdfast import Registry
from holdfast.dcp import HoldfastReader, HoldfastSavePlanner, HoldfastWriter, typed_errors
from holdfast.registry.adapters.dcp.reader import Description
from holdfast.registry.adapters.dcp.staged import KeptMemory
from holdfast.registry.adapters.dcp.writer import Away, state_of
from holdfast.registry.errors import (
    Conflict,
    Fenced,
    IncompatibleState,
    IntegrityError,
    InvalidInput,
    StoreUnavailable,
    UnsupportedValue,
)


@pytest.fixture(autouse=True)
def no_job() -> Iterator[None]:
    """Let DCP save and load without a job and without its warning of that."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


@pytest.fixture
def reg(tmp_path: Path) -> Registry:
    return holdfast.init(tmp_path / "registry")


def state() -> dict[str, Any]:
    """What torch's planner loses, and what DCP would pickle."""
    return {
        "model": OrderedDict(w=torch.arange(12.0).reshape(3, 4), half=torch.ones(6).bfloat16()),
        "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}, "groups": [{"lr": 0.1}, {}]},
        "empty": {},
        "pair": (torch.ones(2), {1, 2}),
        "array": np.arange(5),
        "n": 2**70,
    }


def save(run: holdfast.Run, state: dict[str, Any], step: int, planner: Any = None) -> Any:
    with typed_errors():
        return dcp.save(state, storage_writer=HoldfastWriter(run, step=step), planner=planner)


def test_ids_are_those_of_run_save_unless_the_planner_loses_something(
    reg: Registry, caplog: pytest.LogCaptureFixture
) -> None:
    run = reg.run("run", create=True)
    alone = run.save(state(), step=1)
    ours = save(run, state(), 2, HoldfastSavePlanner())
    later: Any = dcp.async_save(state(), storage_writer=HoldfastWriter(run, step=3))
    metas = [ours.storage_meta, later.result().storage_meta]
    assert [one.save_id for one in metas] == [alone.digest.hex()] * 2
    assert [one.checkpoint_id for one in metas] == [
        "run/main/step00000002",
        "run/main/step00000003",
    ]
    [same] = [one for one in caplog.records if one.name == "holdfast"]
    assert "no tensor has changed" in same.getMessage()
    caplog.clear()
    save(run, state(), 4)
    [said] = [one for one in caplog.records if one.name == "holdfast"]
    assert said.levelno == logging.WARNING
    flat = run.history.checkpoint(4)
    assert flat.digest != alone.digest
    kept = flat.load()
    assert "empty" not in kept
    assert list(kept["optimizer"]["state"]) == ["0"]
    assert kept["pair"][1] == {1, 2}  # a value of the closed list, and no pickle


def test_a_writer_says_at_once_what_is_wrong(reg: Registry) -> None:
    run = reg.run("run", create=True)

    class Casting(dcp.DefaultSavePlanner):
        def lookup_object(self, index: Any) -> Any:
            return super().lookup_object(index).half()

    with pytest.raises(InvalidInput, match="step"):
        HoldfastWriter(run, step=-1)
    with pytest.raises(InvalidInput, match="checkpoint_id"):
        dcp.save(state(), storage_writer=HoldfastWriter(run, step=1), checkpoint_id="x")
    with pytest.raises(InvalidInput, match="changes the saved state"):
        save(run, state(), 1, Casting())
    with pytest.raises(InvalidInput, match="HoldfastWriter alone"), typed_errors():
        dcp.save(state(), checkpoint_id=str(run), planner=HoldfastSavePlanner())
    with pytest.raises(UnsupportedValue, match=r"state\['model'\]\['odd'\]"):
        save(run, {"model": {"odd": object()}}, 1, HoldfastSavePlanner())
    twins = {"a": {"b": torch.ones(1)}, "a.b": torch.zeros(1)}  # DCP could never load it
    with pytest.raises(IncompatibleState, match=r"one name .* a\.b"):
        save(run, twins, 1, HoldfastSavePlanner())
    later: Any = dcp.async_save(twins, storage_writer=HoldfastWriter(run, step=1))
    with pytest.raises(IncompatibleState, match=r"one name .* a\.b"), typed_errors():
        later.result()
    # As the error of the future, and not of the call: other ranks would wait for this one.
    later = dcp.async_save({"odd": object()}, storage_writer=HoldfastWriter(run, step=1))
    with pytest.raises(UnsupportedValue), typed_errors():
        later.result()
    assert not run.checkpoints()


def test_a_save_that_is_committed_is_no_error(
    reg: Registry, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(stored: holdfast.Stored) -> None:
        raise StoreUnavailable("the store went away", where=stored.ref)

    run = reg.run("run", create=True)
    monkeypatch.setattr(Description, "of", fail)
    done = save(run, state(), 1, HoldfastSavePlanner())
    [checkpoint] = run.checkpoints()
    assert done.storage_meta.checkpoint_id == checkpoint.ref
    assert done.storage_meta.save_id == checkpoint.digest.hex()
    assert "is saved, but could not be described" in caplog.text


def test_loading_is_that_of_dcp(reg: Registry) -> None:
    saved = reg.run("run", create=True).save(state(), step=1)
    target = state()
    column = torch.zeros(4, 3, dtype=torch.float64)
    target["model"]["w"] = column.T  # another type, and not contiguous
    target["model"]["half"].zero_()
    target["n"], target["array"], target["pair"] = 0, None, None
    weights = target["model"]["half"]
    with typed_errors():
        dcp.load(target, storage_reader=HoldfastReader(saved))
    assert torch.equal(column.T, torch.arange(12.0).reshape(3, 4).double())
    assert target["model"]["half"] is weights
    assert torch.equal(weights, torch.ones(6).bfloat16())
    assert target["n"] == 2**70
    assert np.array_equal(target["array"], np.arange(5))
    assert torch.equal(target["pair"][0], torch.ones(2))
    assert target["optimizer"]["groups"] == [{"lr": 0.1}, {}]
    # A part of the keys, and a key that is not there.
    part = {"model": {"half": torch.zeros(6)}}
    dcp.load(part, storage_reader=HoldfastReader(saved))
    assert torch.equal(part["model"]["half"], torch.ones(6))
    with pytest.raises(CheckpointException, match="Missing key"), typed_errors():
        dcp.load({"model": {"more": torch.zeros(1)}}, storage_reader=HoldfastReader(saved))


def test_loading_refuses_what_is_damaged_or_ambiguous(reg: Registry) -> None:
    run = reg.run("run", create=True)
    twice = run.save({"a": {"b": 1}, "a.b": 2}, step=1)
    with pytest.raises(IncompatibleState, match=r"a\.b"):
        HoldfastReader(twice)
    saved = run.save({"w": torch.arange(3000.0)}, step=2)
    [pack] = Path(reg.url.removeprefix("file://")).glob("packs/*/*")
    data = bytearray(pack.read_bytes())
    data[200] ^= 1
    pack.chmod(0o600)
    pack.write_bytes(data)
    with pytest.raises(IntegrityError), typed_errors():
        dcp.load({"w": torch.zeros(3000)}, storage_reader=HoldfastReader(saved))


def test_kept_memory_is_used_again_once_its_save_has_ended(reg: Registry) -> None:
    run = reg.run("run", create=True)
    writer = HoldfastWriter(run, step=1)
    held: Any = writer.stage({"w": torch.ones(500)})
    memory = KeptMemory.of(run)
    with pytest.raises(Conflict, match="has not ended"):
        memory.take("next", 0.001)
    writer.write_data(dcp.SavePlan([]), dcp.DefaultSavePlanner())
    other: Any = HoldfastWriter(run, step=2)
    other = other.stage({"w": torch.ones(500)})
    del held  # the end of the first save says nothing of the second
    with pytest.raises(Conflict):
        memory.take("next", 0.001)
    del other  # as when DCP has failed before it wrote
    assert memory.take("next", 0.001) == {}


def test_both_processes_are_one_trainer(reg: Registry) -> None:
    """What a save in another process does to the handle here, and it to that."""
    run = reg.run("run", create=True)
    for step in (1, 2):
        run.save({"n": step}, step=step)
    run.restore(run.history.checkpoint(1))
    away = Away.of(run)
    there = away.open()
    assert away.open() is there
    there.save({"n": 3}, step=3)
    assert [one.step for one in run.checkpoints()] == [1, 3]
    run.save({"n": 4}, step=4)  # supersedes nothing more
    assert Away.of(run).open() is there
    there.save({"n": 5}, step=5)
    assert [one.step for one in run.checkpoints()] == [1, 3, 4, 5]
    run.restore(run.history.checkpoint(4))
    again = Away.of(run).open()
    again.save({"n": 6}, step=6)
    assert [one.step for one in run.checkpoints()] == [1, 3, 4, 6]
    reg.run("run").save({"n": 7}, step=7)  # another trainer
    for handle in (run, again):
        with pytest.raises(Fenced):
            handle.save({"n": 8}, step=8)


def test_a_run_that_no_other_process_can_open(tmp_path: Path) -> None:
    journaled = holdfast.open(holdfast.init(tmp_path / "r").url, journal=tmp_path / "j")
    for reg in (journaled, holdfast.init("memory://dcp-away", skip_race_probe=True)):
        with reg, pytest.raises(InvalidInput, match="another process cannot"):
            Away.of(reg.run("run", create=True))


def test_one_rank_of_a_job_warns_of_the_default_planner(caplog: pytest.LogCaptureFixture) -> None:
    for rank in range(3):
        planner = DefaultSavePlanner()
        planner.set_up_planner({"model": {"x": 1}}, is_coordinator=rank == 0)
        assert state_of(planner) == {"model": {"x": 1}}
    assert len([one for one in caplog.records if "flattens a state" in one.getMessage()]) == 1
