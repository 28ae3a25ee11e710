"""Random number generators of a process as a part of a state."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import holdfast
from holdfast import rng
from holdfast.errors import IncompatibleState, InvalidInput


@pytest.fixture(autouse=True)
def left_as_found() -> Iterator[None]:
    before = rng.capture()
    yield
    rng.restore(before)


def draws(given: dict[str, Any]) -> list[float]:
    """Return the next numbers of every generator; the odd ones leave half of a pair behind."""
    return [
        random.random(),
        random.gauss(),
        float(np.random.standard_normal()),
        float(torch.rand(1)),
        float(torch.randn(3)[2]),
        float(given["data"].standard_normal()),
        float(given["old"].standard_normal()),
        given["own"].gauss(0, 1),
        float(torch.rand(1, generator=given["loader"])),
    ]


def given() -> dict[str, Any]:
    return {
        "data": np.random.default_rng(5),
        "old": np.random.RandomState(6),
        "own": random.Random(7),
        "loader": torch.Generator().manual_seed(8),
    }


def test_a_saved_and_loaded_state_draws_the_same_numbers(tmp_path: Path) -> None:
    own = given()
    draws(own)
    with holdfast.init(tmp_path / "reg", skip_race_probe=True) as reg:
        saved = reg.create_run("run").save({"rng": rng.capture(own)}, step=1)
        wanted = [draws(own) for _ in range(3)]
        state = saved.load()["rng"]
        again = given()
        rng.restore(state, again)
        assert [draws(again) for _ in range(3)] == wanted
        rng.restore(state, again)
        assert reg.run("run").save({"rng": rng.capture(again)}, step=2).digest == saved.digest


@pytest.mark.parametrize("bits", [np.random.PCG64, np.random.Philox, np.random.SFC64])
def test_every_kind_of_numpy_generator_comes_back(bits: Any) -> None:
    one = {"g": np.random.Generator(bits(3))}
    state = rng.capture(one)
    wanted = one["g"].random(4).tolist()
    rng.restore(state, one)
    assert one["g"].random(4).tolist() == wanted


@pytest.mark.skipif(not hasattr(np.random, "set_bit_generator"), reason="NumPy before 1.24")
def test_numpys_global_generator_comes_back_with_other_bits() -> None:
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(3))
    try:
        state = rng.capture()
        wanted = np.random.rand(4).tolist()
        rng.restore(state)
        assert np.random.rand(4).tolist() == wanted
    finally:
        np.random.set_bit_generator(before)
    with pytest.raises(IncompatibleState, match="numpy"):
        rng.restore(state)


def test_nothing_is_imported_that_the_program_does_not_use() -> None:
    program = """
import sys
import holdfast
state = holdfast.rng.capture()
assert set(state) == {"format", "python"}, state
holdfast.rng.restore(state)
assert not {"torch", "numpy"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)


class Cuda:
    """A machine with a number of CUDA devices, whose generators are on the CPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, devices: int) -> None:
        self.generators = [torch.Generator().manual_seed(n) for n in range(devices)]
        make = torch.Generator
        monkeypatch.setattr(torch, "Generator", lambda device="cpu": make())
        for name, value in {
            "is_initialized": lambda: True,
            "device_count": lambda: devices,
            "get_rng_state_all": lambda: [one.get_state() for one in self.generators],
            "set_rng_state": lambda state, device: self.generators[device].set_state(state),
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)

    def draws(self) -> list[float]:
        return [float(torch.rand(1, generator=one)) for one in self.generators]


def test_every_cuda_device_is_captured_and_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(monkeypatch, 3)
    state = rng.capture()
    wanted = cuda.draws()
    cuda.draws()
    rng.restore(state)
    assert cuda.draws() == wanted


def test_devices_go_by_their_numbers_if_a_file_has_sorted_the_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = Cuda(monkeypatch, 12)
    state = rng.capture()
    wanted = cuda.draws()
    rng.restore({name: state[name] for name in sorted(state)})
    assert cuda.draws() == wanted


@pytest.mark.parametrize("wrong", [{5: random.Random()}, {None: random.Random()}, [1], "abc"])
def test_generators_are_given_by_name(wrong: Any) -> None:
    with pytest.raises(InvalidInput, match="generators are given by name"):
        rng.capture(wrong)
    with pytest.raises(InvalidInput, match="generators are given by name"):
        rng.restore(rng.capture(), wrong)


def test_fewer_cuda_devices_are_an_error_and_nothing_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Cuda(monkeypatch, 3)
    state = rng.capture()
    Cuda(monkeypatch, 2)
    random.seed(1)
    before = random.getstate()
    with pytest.raises(IncompatibleState, match=r"3 devices.*found 2"):
        rng.restore(state)
    assert random.getstate() == before


@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")
def test_the_generators_of_real_cuda_devices_come_back() -> None:
    for index in range(torch.cuda.device_count()):
        torch.rand(5, device=f"cuda:{index}")
    state = rng.capture()
    assert f"torch.cuda.{torch.cuda.device_count() - 1}" in state
    wanted = [torch.randn(7, device=f"cuda:{n}").tolist() for n in range(torch.cuda.device_count())]
    rng.restore(state)
    assert wanted == [
        torch.randn(7, device=f"cuda:{n}").tolist() for n in range(torch.cuda.device_count())
    ]


def nested(**generators: Any) -> dict[str, Any]:
    """Return what `capture` returned before its states were flat."""
    return {
        "format": "holdfast.rng/1",
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": {"cpu": torch.get_rng_state(), "cuda": []},
        "generators": generators,
    }


def test_a_state_of_the_nested_format_is_restored(tmp_path: Path) -> None:
    own = given()
    draws(own)
    states = own["data"].bit_generator.state, own["old"].get_state(legacy=False)
    old = nested(data=states[0], old=states[1], own=own["own"].getstate())
    old["generators"]["loader"] = own["loader"].get_state()
    with holdfast.init(tmp_path / "reg", skip_race_probe=True) as reg:
        state = reg.create_run("run").save({"rng": old}, step=1).load()["rng"]
    wanted = draws(own)
    rng.restore(state, own)
    assert draws(own) == wanted


def test_files_of_torch_and_of_safetensors_hold_every_generator(tmp_path: Path) -> None:
    own = given() | {"bits": np.random.Generator(np.random.MT19937(3))}
    draws(own)
    state = {"rng": rng.capture(own)}
    wanted = [draws(own), own["bits"].random()]
    holdfast.formats.write(tmp_path / "a.pt", state)
    holdfast.formats.write(tmp_path / "a.safetensors", state)
    files = [torch.load(tmp_path / "a.pt", weights_only=True)["rng"]]
    files.append(holdfast.formats.read(tmp_path / "a.safetensors").state["model"])
    for read in files:
        rng.restore(read, own)
        assert [draws(own), own["bits"].random()] == wanted


def broken(**parts: Any) -> dict[str, Any]:
    return {**nested(), **parts}


@pytest.mark.parametrize(
    ("state", "where"),
    [
        (3, "not a state"),
        ({"format": "holdfast.rng/3"}, "holdfast.rng/3"),
        ({**rng.capture(), "more": rng.capture()["python"]}, "not a state"),
        ({**rng.capture(), "python": torch.zeros(4)}, "python"),
        ({**rng.capture(), "numpy": {"key": [1]}}, "numpy"),
        ({**rng.capture(), "torch.cpu": torch.zeros(4, dtype=torch.uint8)}, "torch/cpu"),
        (broken(more=1), "not a state"),
        (broken(python=(3, (1, 2), None)), "python"),
        (broken(numpy={"bit_generator": "PCG64"}), "numpy"),
        (broken(torch={"cpu": torch.zeros(4, dtype=torch.uint8), "cuda": []}), "torch/cpu"),
        (broken(torch={"cpu": None, "cuda": []}), "torch"),
        (broken(torch={"cuda": []}), "torch"),
        (broken(generators=[1]), "generators"),
        (broken(generators={"data": (1, 2)}), "expected data.*found none"),
    ],
)
def test_a_state_of_another_kind_is_refused_and_nothing_changes(state: Any, where: str) -> None:
    before = rng.capture()
    with pytest.raises(IncompatibleState, match=where):
        rng.restore(state)
    after = rng.capture()
    assert all(torch.equal(one, after[name]) for name, one in before.items())


def test_generators_must_be_those_that_were_captured() -> None:
    one, other = np.random.default_rng(1), np.random.default_rng(2)
    state = rng.capture({"data": one})
    with pytest.raises(IncompatibleState, match=r"expected data.*found none"):
        rng.restore(state)
    with pytest.raises(IncompatibleState, match=r"generators/data.*PCG64.*Philox"):
        rng.restore(state, {"data": np.random.Generator(np.random.Philox(1))})
    with pytest.raises(InvalidInput, match=r"generators\['data'\].*dict"):
        rng.capture({"data": {}})
    with pytest.raises(InvalidInput, match=r"generators\['data'\].*SystemRandom"):
        rng.capture({"data": random.SystemRandom()})
    huge = {**one.bit_generator.state, "state": {"state": 2**200, "inc": 1}}
    with pytest.raises(IncompatibleState, match="generators/data"):
        rng.restore(nested(data=huge), {"data": one})
    # A state that fails a later check changes no generator of the caller's.
    broken = nested(a=other.bit_generator.state, b={"bit_generator": "x"})
    before = one.bit_generator.state
    with pytest.raises(IncompatibleState):
        rng.restore(broken, {"a": one, "b": other})
    assert one.bit_generator.state == before
