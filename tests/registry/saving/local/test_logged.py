"""`run.log`: with the save of its step, alone after a minute, and never in the way of the loop."""

from __future__ import annotations

import base64
import logging
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest
import torch

import holdfast
from holdfast.backends import Backend, StoreUnavailable
from holdfast.registry.errors import InvalidInput
from holdfast.registry.face.registry import Registry
from holdfast.registry.face.run import Run
from holdfast.registry.history import RunLog, slots
from holdfast.registry.saving import logged
from holdfast.registry.spec import RunSpec, Stream
from tests.registry.saving.collective.ranks import group_of, together
from tests.registry.saving.local.test_outages import Breakable
from tests.support.faults import Gate
from tests.support.states import small_state
from tests.support.stores import Open

#: One grey pixel.
PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNoAAAAggCBd81ytgAAAABJRU5ErkJggg=="
)


@pytest.fixture
def store(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> Breakable:
    monkeypatch.setattr(slots, "_LONGEST_PAUSE_S", 0.0)
    return Breakable(backend)


@pytest.fixture
def reg(store: Breakable, open_registry: Open) -> Registry:
    return open_registry(store)


@pytest.fixture
def run(reg: Registry) -> Run:
    return reg.create_run("run")


def state(step: int) -> dict[str, Any]:
    return {"model": {"w": np.full(10, step, np.float32)}}


def log(run: Run, *steps: int) -> None:
    for step in steps:
        run.log({"loss": np.float32(step)}, step=step)


def steps(run: Run) -> list[int]:
    stream = run.streams["log"]
    return [entry["step"] for entry in stream.read()] if "log" in run.streams else []


def alone(run: Run) -> None:
    """Let a minute pass."""
    run.handle.ownership.logged.tick()


def lost(run: Run) -> int:
    return run.handle.ownership.logged.lost


@pytest.mark.parametrize("background", [True, False])
def test_entries_up_to_the_step_come_with_the_save_and_go_with_a_resume(
    reg: Registry, run: Run, background: bool
) -> None:
    log(run, 1, 2, 3)
    if background:
        run.save_async(state(2), step=2).wait()
    else:
        run.save(state(2), step=2)
    assert (steps(run), run.manifest.commits) == ([1, 2], 2)  # in the slot of the save
    log(run, 4)
    run.save(state(4), step=4)
    assert steps(run) == [1, 2, 3, 4]
    assert run.streams["log"].read()[0] == {"step": 1, "loss": 1.0}
    again = reg.run("run")
    log(again, 9)  # of no line of training
    again.restore(again.checkpoints()[0])
    log(again, 3)
    alone(again)  # it takes the run over, and goes back before it appends
    assert steps(again) == [1, 2, 3]
    log(again, 4)
    again.save(state(40), step=4)
    assert steps(again) == [1, 2, 3, 4]


def test_a_minute_without_a_save_brings_a_commit_of_its_own(run: Run) -> None:
    log(run, 1, 2)
    alone(run)
    alone(run)
    assert (steps(run), run.manifest.commits) == ([1, 2], 2)
    timer = run.handle.ownership.logged._timer
    assert timer is None
    log(run, 3)
    timer = run.handle.ownership.logged._timer
    assert timer is not None
    assert (timer.interval, timer.daemon) == (60.0, True)
    run.close()
    assert steps(run) == [1, 2, 3]


def test_entries_of_later_steps_wait_for_a_save_under_way(gate: Gate, open_registry: Open) -> None:
    run = open_registry(gate).create_run("run")
    log(run, 1)
    pending = run.save_async(small_state(), step=1)
    assert gate.reached.wait(300)
    log(run, 2)
    alone(run)  # waits for nothing
    assert not pending.done()
    gate.open.set()
    pending.wait()
    assert steps(run) == [1]
    alone(run)
    assert steps(run) == [1, 2]


def test_a_save_that_repeats_a_checkpoint_takes_no_entry_with_it(run: Run) -> None:
    run.save(state(1), step=1)
    log(run, 1)
    run.save(state(1), step=1)
    alone(run)
    assert steps(run) == [1]


@pytest.mark.parametrize("fails", ["before", "after"])
@pytest.mark.parametrize("way", ["save", "alone"])
def test_each_entry_comes_once_whatever_fails(
    run: Run, store: Breakable, fails: str, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    log(run, 1)
    store.fails = fails
    with caplog.at_level(logging.WARNING, "holdfast"):
        if way == "save":
            with pytest.raises(StoreUnavailable):
                run.save(state(1), step=1)
        for _ in range(2):
            log(run, 2)
            alone(run)  # raises nothing
    store.fails = ""
    alone(run)
    log(run, 3)
    run.save(state(3), step=3)
    assert (steps(run), lost(run)) == ([1, 2, 2, 3], 0)
    outages = sum("entries wait for the store" in one.message for one in caplog.records)
    assert outages == (1 if fails == "before" else 2)  # the second append has landed all the same


def test_entries_of_a_failed_save_wait_while_the_log_cannot_be_read(
    run: Run, store: Breakable, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(_: RunLog) -> None:
        raise StoreUnavailable("no answer", where="test")

    log(run, 1)
    store.fails = "before"
    with pytest.raises(StoreUnavailable):
        run.save(state(1), step=1)
    log(run, 2)
    with monkeypatch.context() as patch:
        patch.setattr(RunLog, "refresh", away)
        alone(run)
    store.fails = ""
    alone(run)
    assert (steps(run), lost(run)) == ([1, 2], 0)


def test_what_is_wrong_is_counted_and_warned_of_and_never_raised(
    reg: Registry, run: Run, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    declares = reg.create_run(
        "declares", preset=RunSpec(streams=(Stream(name="x", lifetime="forever"),))
    )
    monkeypatch.setattr(logged, "_MOST", 3)
    with caplog.at_level(logging.WARNING, "holdfast"):
        run.log({"loss": None}, step=1)
        run.log({"loss": None}, step=2)
        run.log({"loss": 1}, step=-1)
        run.log({"step": 1}, step=1)
        log(declares, 1)
        log(run, 1, 2, 3, 4)
        run.log({}, step=9)  # nothing
        log(run, 5)
    assert (lost(run), lost(declares)) == (6, 1)
    said = [one.message for one in caplog.records]
    assert len(said) == 5  # the same is said once
    assert all("entries that were logged are lost" in one for one in said)
    alone(run)
    assert [(one["step"], one.get("lost")) for one in run.history.logged()] == [
        *((3, None), (4, None), (5, 5))
    ]
    with pytest.raises(InvalidInput):
        declares.streams["log"].read()


class Drawing:
    """Stands for an image of Pillow, or for a figure of matplotlib."""

    def __init__(self, how: str, data: bytes = PNG) -> None:
        self.data = data
        setattr(self, how, self.write)

    def write(self, into: IO[bytes], *kind: str, **options: str) -> None:
        assert (kind, options) in ((("PNG",), {}), ((), {"format": "png"}))
        into.write(self.data)


def samples(run: Run) -> list[dict[str, Any]]:
    return run.streams["log-samples"].read()


def test_texts_and_pictures_come_with_the_save_or_alone(
    reg: Registry, run: Run, store: Breakable, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.log({"loss": 1.0, "said": "a 7", "seen": [PNG, Drawing("save")]}, step=1)
    run.log({"seen": Drawing("savefig")}, step=2)
    first = {"step": 1, "said": "a 7", "seen/0": PNG, "seen/1": PNG}
    run.save(state(1), step=1)
    assert (samples(run), steps(run), run.manifest.commits) == ([first], [1], 2)
    log(run, 3)
    store.fails = "after"
    for _ in range(3):
        alone(run)
    store.fails = ""
    alone(run)
    assert (samples(run), steps(run)) == ([first, {"step": 2, "seen": PNG}], [1, 3])
    assert run.history.logged() == [{"step": 1, "loss": 1.0}, {"step": 3, "loss": 3.0}]
    monkeypatch.setattr(logged, "_MOST_BYTES", 2 * len(PNG))
    for step in range(4, 9):
        run.log({"seen": PNG}, step=step)
    store.fails = "before"
    with pytest.raises(StoreUnavailable):
        run.save(state(8), step=8)
    store.fails = ""
    run.save(state(9), step=9)
    assert ([one["step"] for one in samples(run)], lost(run)) == ([1, 2, 7, 8], 3)
    again = reg.run("run")
    again.restore(again.checkpoints()[0])
    again.save(state(2), step=2)
    assert samples(again) == [first]


def decoded(data: bytes) -> Any:
    """Return the pixels of a PNG without filters."""
    size, colour = struct.unpack_from(">II", data, 16), data[25]
    length = struct.unpack_from(">I", data, 33)[0]
    rows = np.frombuffer(zlib.decompress(data[41 : 41 + length]), np.uint8)
    width, height = size
    assert rows.size == height * (1 + width * {0: 1, 4: 2, 2: 3, 6: 4}[colour])
    return rows.reshape(height, -1)[:, 1:].reshape(height, width, -1)


def test_arrays_and_tensors_are_pictures(run: Run) -> None:
    pixels = np.arange(2 * 3 * 4, dtype=np.uint8).reshape(2, 3, 4) * 10
    floats = np.array([[0.0, 0.5, 1.0], [-1.0, 2.0, np.nan]])
    values = {"four": pixels, "three": pixels[:, :, :3], "two": pixels[:, :, 0], "floats": floats}
    tensor = torch.tensor(pixels[:, :, :3]).permute(2, 0, 1)
    run.log(
        {**values, "tensor": tensor, "half": tensor.bfloat16() / 256, "flag": floats > 0}, step=1
    )
    run.log({"one": np.float32(1), "two": torch.ones(1, 1)}, step=1)  # numbers
    alone(run)
    found = {name: decoded(data) for name, data in samples(run)[0].items() if name != "step"}
    for name in ("four", "three", "two"):
        assert found[name].tolist() == values[name].reshape(2, 3, -1).tolist()
    assert found["floats"][..., 0].tolist() == [[0, 128, 255], [0, 255, 0]]
    assert found["flag"][..., 0].tolist() == [[0, 255, 255], [0, 255, 0]]
    assert found["tensor"].tolist() == pixels[:, :, :3].tolist()
    assert found["half"].tolist() == np.rint(pixels[:, :, :3] * (255 / 256)).tolist()
    assert run.history.logged() == [{"step": 1, "one": 1.0, "two": 1.0}]


@pytest.mark.parametrize(
    "value",
    [
        b"<svg onload=hacked=1></svg>", PNG[:20], np.zeros((2, 3, 5)), np.zeros(3), [0.5], [[PNG]],
        np.broadcast_to(np.uint8(0), (2**13, 2**13)), PNG + bytes(8 * 2**20), "x" * (2**23 + 1),
        "\ud800", Drawing("save", b"no picture"), Drawing("savefig", None), object(),
    ],
    ids=range(13),
)  # fmt: skip
def test_what_is_no_picture_is_lost_with_its_call(
    run: Run, value: object, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "holdfast"):
        run.log({"loss": 1.0, "seen": value}, step=1)
    run.log({"seen": PNG}, step=2)
    alone(run)
    assert (samples(run), steps(run)) == ([{"step": 2, "seen": PNG, "lost": 1}], [])
    assert len(caplog.records) == 1


def test_segments_of_pictures_stay_small(run: Run) -> None:
    stream = run.streams["seen"]
    for step in range(64):
        stream.append({"step": step, "seen": PNG})
    (record,) = run.manifest.streams
    assert [one.count for one in record.segments] == [32, 32]
    assert [one["step"] for one in stream.read()] == list(range(64))


def test_a_step_that_is_logged_again_after_a_crash_is_there_once(reg: Registry, run: Run) -> None:
    run.save(state(2), step=2)
    log(run, 1, 2, 3, 4, 5)
    alone(run)
    resumed = reg.run("run")
    resumed.restore()
    log(resumed, 3)
    resumed.log({"lr": 0.5}, step=4)
    log(resumed, 4)
    alone(resumed)
    assert steps(run) == [1, 2, 3, 4, 5, 3, 4, 4]
    assert run.history.logged()[1:] == [
        *({"step": 2, "loss": 2.0}, {"step": 3, "loss": 3.0}, {"step": 4, "lr": 0.5, "loss": 4.0})
    ]


def test_a_run_that_is_completed_by_its_status_keeps_its_entries(run: Run) -> None:
    log(run, 1)
    run.status = "completed"
    assert (steps(run), run.status) == ([1], "completed")


def test_a_trainer_that_was_overtaken_logs_no_more(reg: Registry, run: Run) -> None:
    run.save(state(1), step=1)
    other = reg.run("run")
    other.restore()
    other.save(state(2), step=2)
    log(run, 2)
    alone(run)
    assert (steps(other), lost(run)) == ([], 1)


def test_rank_0_of_a_group_logs_with_the_saves(
    reg: Registry, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def act(group: Any) -> int:
        held = reg.run("run", group=group)
        log(held, 1, 2)
        held.save(state(1), step=1)
        alone(held)
        held.close()
        return lost(held)

    assert together(group_of(2, 20.0), act) == [0, 0]
    assert steps(run) == [1]
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    log(run, 3)
    alone(run)
    assert steps(run) == [1]


def test_with_a_journal_entries_are_as_durable_as_their_save(tmp_path: Path) -> None:
    holdfast.init(tmp_path / "registry").close()
    with holdfast.open(tmp_path / "registry", journal=tmp_path / "journal") as reg:
        run = reg.create_run("run")
        log(run, 1, 2)
        run.save(state(1), step=1)
        run.save(state(2), step=2)
        run.wait(remote=True)
        assert steps(run) == [1, 2]


_PROGRAM = """
import sys, holdfast
run = holdfast.open(sys.argv[1]).create_run("run")
run.save_async({"w": 1.0}, step=1)
run.log({"loss": 1}, step=2)
"""


def test_a_program_that_ends_leaves_no_entry_behind(tmp_path: Path) -> None:
    with holdfast.init(tmp_path / "registry") as reg:
        subprocess.run(
            [sys.executable, "-c", _PROGRAM, str(tmp_path / "registry")], check=True, timeout=300
        )
        assert steps(reg.run("run")) == [2]
        with reg.create_run("block") as run:
            log(run, 1)
        assert (steps(run), run.status) == ([1], "completed")


def test_numbers_of_the_machine_come_along_and_are_missed_once_without_psutil(
    run: Run, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.log({"loss": 1.0}, step=1, system=True)
    run.log({}, step=2, system=True)
    monkeypatch.setitem(sys.modules, "psutil", None)
    with caplog.at_level(logging.WARNING, "holdfast"):
        run.log({"loss": 3.0}, step=3, system=True)
        run.log({"loss": 4.0}, step=4, system=True)
    run.save(state(4), step=4)
    first, second, *without = run.streams["log"].read()
    named = {name for name in first if name.startswith("system/")}
    assert {"system/cpu_percent", "system/disk_percent"} < named
    assert named == second.keys() - {"step"}
    assert 0 < first["system/memory_percent"] <= 100
    assert 2**20 < first["system/process_memory_bytes"] < 2**40
    assert without == [{"step": 3, "loss": 3.0}, {"step": 4, "loss": 4.0}]
    assert [record.message.count("[system]") for record in caplog.records] == [1]
