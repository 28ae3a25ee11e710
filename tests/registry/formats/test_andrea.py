"""Step files of ANDREA: a real one, those written here, and files that only look like one."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast import Run, formats
from holdfast.registry.errors import IncompatibleState, InvalidInput
from holdfast.registry.formats import andrea
from tests.support.foreign import foreign

TABLE = {"wte": (3, 2), "ln.weight": (2,), "head": (1, 1)}


def step_file(step: int, count: int, form: str = "<") -> bytes:
    values = np.arange(3 * count, dtype=f"{form}f4")
    return struct.pack(f"{form}ii", step, count) + values.tobytes()


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ("[" + "{}," * 50_000 + "{}]", "parsing it would take"),
        (json.dumps({"w": [1] * 65}), "not a table of parameters"),
    ],
    ids=["empty objects", "axes"],
)
def test_a_table_is_bounded(
    table: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of a million empty objects, or of a tensor with a million axes, takes no memory."""
    monkeypatch.setenv("HOLDFAST_MAX_RECORD_BYTES", "4000000")
    (tmp_path / "table.json").write_text(table)
    with pytest.raises(InvalidInput, match=said):
        andrea.read_table(tmp_path / "table.json")


def test_a_real_file(tmp_path: Path) -> None:
    path = foreign("andrea/step_000100.bin")
    found = formats.read(path, format="andrea", portable=True)
    assert formats.detect(path) == "andrea"
    formats.write(tmp_path / path.name, found.state, format="andrea")
    assert (tmp_path / path.name).read_bytes() == path.read_bytes()


def test_names_and_shapes_from_a_table(tmp_path: Path, run: Run) -> None:
    path = tmp_path / "step_000300.bin"
    path.write_bytes(step_file(300, 9))
    assert formats.andrea.load(path).state["m"].tolist() == list(range(9, 18))
    (tmp_path / "table.json").write_text(json.dumps(TABLE))
    named: Any = formats.andrea.load(path, tmp_path / "table.json").state
    assert named["m"]["wte"].shape == TABLE["wte"]
    state: Any = formats.andrea.load(path, TABLE, portable=True).state
    assert list(state["m"]) == list(TABLE)
    assert np.frombuffer(state["m"]["wte"].data, "<f4").tolist() == [9, 10, 11, 12, 13, 14]
    assert state["v"]["head"].shape == (1, 1)
    saved = run.save(state, step=300)
    formats.write(tmp_path / "again.bin", saved, format="andrea")
    assert (tmp_path / "again.bin").read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    "text",
    [
        {name: list(shape) for name, shape in TABLE.items()},
        [[name, list(shape)] for name, shape in TABLE.items()],
        [{"name": name, "shape": list(shape), "more": 1} for name, shape in TABLE.items()],
    ],
)
def test_forms_of_a_table(tmp_path: Path, text: Any) -> None:
    (tmp_path / "table.json").write_text(json.dumps(text))
    assert andrea.read_table(tmp_path / "table.json") == TABLE


@pytest.mark.parametrize("text", ["{", "3", '{"a": 3}', '{"a": [-1]}', '[["a", [1]], ["a", [1]]]'])
def test_bad_tables(tmp_path: Path, text: str) -> None:
    (tmp_path / "table.json").write_text(text)
    with pytest.raises(InvalidInput):
        andrea.read_table(tmp_path / "table.json")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"1234567", "shorter than its header"),
        (step_file(1, 5)[:-1], "cut off"),
        (step_file(1, 5) + b"\0", "cut off"),
        (step_file(-1, 5), "does not fit"),
        (struct.pack("<ii", 1, -1), "does not fit"),
        (struct.pack("<ii", 1, 2**31 - 1), "does not fit"),
        (step_file(1, 5, ">"), "big-endian"),
    ],
)
def test_files_that_do_not_fit_their_header(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "step_000001.bin"
    path.write_bytes(data)
    with pytest.raises(InvalidInput, match=message):
        formats.read(path, format="andrea")
    assert formats.detect(path) is None
    assert formats.validate(path, format="andrea")


def test_the_header_says_the_step(tmp_path: Path) -> None:
    path = tmp_path / "step_1000000.bin"
    path.write_bytes(step_file(7, 2))
    state: Any = formats.read(path, format="andrea", portable=True).state
    assert state["step"] == 7
    assert "its name says step 1000000, its header step 7" in formats.validate(path)[0]
    path.with_name("step_000007.bin").write_bytes(step_file(7, 0))
    assert formats.validate(path.with_name("step_000007.bin")) == []
    with pytest.raises(InvalidInput, match="does not fit the file"):
        andrea.read(path, {"a": (3,)})


@pytest.mark.parametrize(
    "change",
    [
        {"step": 2**31},
        {"step": 1.5},
        {"extra": 1},
        {"m": np.zeros(3, np.float32)},
        {"v": np.zeros(2, np.float64)},
        {"weights": [np.zeros(2, np.float32)]},
    ],
)
def test_states_that_do_not_fit(tmp_path: Path, change: dict[str, Any]) -> None:
    zeros = np.zeros(2, np.float32)
    state = {"step": 1, "weights": zeros, "m": zeros, "v": zeros, **change}
    with pytest.raises(IncompatibleState):
        formats.write(tmp_path / "step_000001.bin", state, format="andrea")
    assert not list(tmp_path.iterdir())
