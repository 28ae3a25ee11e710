"""Policy folders of Cobre: a real one, those written here, those of old releases, damaged ones."""

from __future__ import annotations

import json
import random
import shutil
import struct
from pathlib import Path
from typing import Any

import flatbuffers
import numpy as np
import pytest
from flatbuffers import number_types
from flatbuffers.table import Table

from holdfast import Run
from holdfast.registry import formats
from holdfast.registry.errors import IncompatibleState, InvalidInput, RegistryError
from tests.support.foreign import foreign
from tests.support.states import same

METADATA = {
    "cobre_version": "0.5.1",
    "created_at": "2026-01-02T03:04:05Z",
    "completed_iterations": 5,
    "final_lower_bound": 10.5,
    "best_upper_bound": None,
    "state_dimension": 3,
    "num_stages": 2,
    "max_iterations": 20,
    "forward_passes": 2,
    "warm_start_cuts": 0,
    "warm_start_counts": [0, 0],
    "rng_seed": 2**64 - 1,
    "total_visited_states": 2,
}


def cuts(stage: int, count: int = 4) -> dict[str, Any]:
    chance = np.random.default_rng(stage)
    active = chance.random(count) > 0.5
    return {
        "stage_id": stage,
        "state_dimension": 3,
        "capacity": 40,
        "warm_start_count": 0,
        "populated_count": count,
        "active_cut_indices": np.flatnonzero(active).astype("<u4"),
        "cuts": {
            "cut_id": np.arange(count, dtype="<u8") + 2**40,
            "slot_index": np.arange(count, dtype="<u4"),
            "iteration": np.arange(count, dtype="<u4"),
            "forward_pass_index": np.zeros(count, "<u4"),
            "intercept": chance.normal(size=count),
            "is_active": active,
            "coefficients": chance.normal(size=(count, 3)),
        },
    }


def basis(stage: int) -> dict[str, Any]:
    return {
        "stage_id": stage,
        "iteration": 5,
        "num_columns": 2,
        "num_rows": 3,
        "num_cut_rows": 4,
        "column_status": np.array([0, 4], "u1"),
        "row_status": np.array([1, 2, 3], "u1"),
    }


def policy() -> dict[str, Any]:
    states = {"stage_id": 0, "state_dimension": 3, "count": 2, "data": np.arange(6.0).reshape(2, 3)}
    return {
        "metadata": dict(METADATA),
        "cuts": {"stage_000": cuts(0), "stage_001": cuts(1, 0)},
        "basis": {"stage_000": basis(0)},
        "states": {"stage_000": states},
    }


def test_a_real_policy(run: Run, tmp_path: Path) -> None:
    folder = foreign("cobre/v0.5.1")
    found = formats.read(folder / "policy", format="cobre")
    assert formats.detect(folder / "policy") == "cobre"
    saved = run.save(found.state, step=5)
    formats.write(tmp_path / "policy", saved, format="cobre")
    assert same(formats.read(tmp_path / "policy", format="cobre").state, found.state)
    files = [path for path in (folder / "policy").rglob("*") if path.is_file()]
    assert len(files) == 10
    for path in files:
        copy = tmp_path / "policy" / path.relative_to(folder / "policy")
        assert copy.read_bytes() == path.read_bytes(), path.name


def test_numbers_of_metadata_are_written_as_the_program_writes_them(tmp_path: Path) -> None:
    text = json.dumps(METADATA, indent=2).replace("10.5", "1.25e-7").replace("null", "0.00001")
    text = text.replace('"cobre_version": "0.5.1"', '"cobre_version": "0.5.1: 1e+16,"')
    state = policy()
    for old, new in (("", ""), ("1.25e-7", "-1e16"), ("0.00001", "1.2e300")):
        text = text.replace(old, new) if old else text
        state["metadata"] = json.loads(text)
        formats.write(tmp_path / f"policy{new}", state, format="cobre")
        assert (tmp_path / f"policy{new}" / "metadata.json").read_text() == text


def test_round_trip_through_the_registry(run: Run, tmp_path: Path) -> None:
    formats.write(tmp_path / "policy", policy(), format="cobre")
    found = formats.read(tmp_path / "policy", format="cobre")
    assert same(found.state, policy())
    assert formats.validate(tmp_path / "policy") == []
    saved = run.save(found.state, step=5)
    formats.write(tmp_path / "again", saved, format="cobre")
    for path in (tmp_path / "policy").rglob("*.*"):
        other = tmp_path / "again" / path.relative_to(tmp_path / "policy")
        assert other.read_bytes() == path.read_bytes()
    assert set(formats.inspect(tmp_path / "policy").tensors) >= {
        "cuts/stage_000/cuts/coefficients",
        "basis/stage_000/row_status",
        "states/stage_000/data",
    }


# Read by the library, slot by slot


def root(data: bytes) -> Table:
    (start,) = struct.unpack_from("<I", data)
    return Table(bytearray(data), start)


def number(table: Table, slot: int, flags: Any = number_types.Uint32Flags) -> Any:
    return table.GetSlot(slot, 0, flags)


def test_files_are_read_by_the_library_with_every_field(tmp_path: Path) -> None:
    formats.write(tmp_path / "policy", policy(), format="cobre")
    data = (tmp_path / "policy" / "cuts" / "stage_000.bin").read_bytes()
    table, wanted = root(data), cuts(0)
    assert [number(table, slot) for slot in (4, 6, 8, 10, 16)] == [0, 3, 40, 0, 4]
    vector = table.Vector(table.Offset(12))
    for at in range(table.VectorLen(table.Offset(12))):
        cut = Table(table.Bytes, table.Indirect(vector + 4 * at))
        assert all(cut.Offset(slot) for slot in (4, 6, 8, 10, 14, 16, 18, 20))
        assert not cut.Offset(12)  # deprecated, and never written
        assert not cut.Offset(22)
        assert number(cut, 4, number_types.Uint64Flags) == wanted["cuts"]["cut_id"][at]
        assert number(cut, 14, number_types.Float64Flags) == wanted["cuts"]["intercept"][at]
        assert bool(number(cut, 20, number_types.BoolFlags)) == wanted["cuts"]["is_active"][at]
        row = cut.GetVectorAsNumpy(number_types.Float64Flags, cut.Offset(16))
        assert row.tolist() == wanted["cuts"]["coefficients"][at].tolist()
        assert cut.Vector(cut.Offset(16)) % 8 == 0


# Old releases


def old_cut(builder: Any, *, domination: bool, defaults: bool, slope: bool = True) -> int:
    builder.ForceDefaults(defaults)
    coefficients = builder.CreateNumpyVector(np.array([1.0, 2.0, 3.0])) if slope else 0
    builder.StartObject(10)
    builder.PrependUint64Slot(0, 7, 0)
    builder.PrependUint32Slot(1, 0, 0)
    builder.PrependUint32Slot(2, 3, 0)
    builder.PrependUint32Slot(3, 0, 0)
    builder.PrependFloat64Slot(5, 0.5, 0)
    if slope:
        builder.PrependUOffsetTRelativeSlot(6, coefficients, 0)
    builder.PrependBoolSlot(8, False, False)
    if domination:
        builder.PrependUint32Slot(9, 12, 0)
    return int(builder.EndObject())


def old_policy(
    folder: Path,
    version: str,
    *,
    domination: bool,
    defaults: bool = True,
    slopes: tuple[bool, ...] = (True,),
    dimension: int = 3,
) -> None:
    """Write a policy as an old release did, or as the official compiler would without defaults."""
    builder = flatbuffers.Builder(0)
    cuts = [old_cut(builder, domination=domination, defaults=defaults, slope=one) for one in slopes]
    builder.StartVector(4, len(cuts), 4)
    for cut in reversed(cuts):
        builder.PrependUOffsetTRelative(cut)
    vector = builder.EndVector()
    builder.StartObject(7)
    builder.PrependUint32Slot(1, dimension, 0)
    builder.PrependUint32Slot(2, 5, 0)
    builder.PrependUOffsetTRelativeSlot(4, vector, 0)
    builder.PrependUint32Slot(6, len(cuts), 0)
    builder.Finish(builder.EndObject())
    for name in ("cuts", "basis"):
        (folder / name).mkdir(parents=True)
    (folder / "cuts" / "stage_000.bin").write_bytes(bytes(builder.Output()))
    about = {**METADATA, "version": "1.0.0", "config_hash": "", "system_hash": "", "num_stages": 1}
    about |= {"cobre_version": version, "state_dimension": dimension}
    del about["warm_start_counts"], about["total_visited_states"]
    (folder / "metadata.json").write_text(json.dumps(about))


@pytest.mark.parametrize(
    ("version", "counts"), [("0.1.0", True), ("0.4.4", True), ("0.5.0", False)]
)
def test_field_nine_is_a_domination_count_in_old_releases_only(
    tmp_path: Path, version: str, counts: bool
) -> None:
    old_policy(tmp_path / "p", version, domination=True)
    state: Any = formats.read(tmp_path / "p", format="cobre").state
    found = state["cuts"]["stage_000"]["cuts"]
    assert ("domination_count" in found) is counts
    assert found["iteration"].tolist() == [3]
    if counts:
        assert found["domination_count"].tolist() == [12]
        formats.write(tmp_path / "again", state, format="cobre")
        again: Any = formats.read(tmp_path / "again", format="cobre").state
        assert again.pop("metadata") == state.pop("metadata")  # as a program writes them, in order
        assert same(again, state)


def test_fields_that_equal_their_default_may_be_left_out(tmp_path: Path) -> None:
    for name, defaults in (("with", True), ("without", False)):
        old_policy(tmp_path / name, "0.3.2", domination=False, defaults=defaults)
    one, other = (formats.read(tmp_path / name, format="cobre") for name in ("with", "without"))
    assert one.size_bytes > other.size_bytes
    assert same(one.state, other.state)


@pytest.mark.parametrize("slopes", [(False,), (True, False), (False, True)])
def test_absent_coefficients_are_zeros(tmp_path: Path, slopes: tuple[bool, ...]) -> None:
    old_policy(tmp_path / "p", "0.5.1", domination=False, defaults=False, slopes=slopes)
    state: Any = formats.read(tmp_path / "p", format="cobre").state
    stage = state["cuts"]["stage_000"]
    assert stage["cuts"]["coefficients"].tolist() == [
        [one * x for x in (1, 2, 3)] for one in slopes
    ]
    assert stage["cuts"]["is_active"].tolist() == [False] * len(slopes)  # not as its document says
    assert (stage["stage_id"], stage["warm_start_count"]) == (0, 0)
    assert stage["active_cut_indices"].tolist() == []
    described = formats.inspect(tmp_path / "p").tensors["cuts/stage_000/cuts/coefficients"]
    assert described.shape == (len(slopes), 3)
    formats.write(tmp_path / "again", state, format="cobre")
    assert same(formats.read(tmp_path / "again", format="cobre").state["cuts"], state["cuts"])


def test_absent_coefficients_of_a_huge_dimension_are_refused(tmp_path: Path) -> None:
    slopes = (False,) * 50
    old_policy(tmp_path / "p", "0.5.1", domination=False, slopes=slopes, dimension=2**32 - 1)
    with pytest.raises(InvalidInput, match="too much memory"):
        formats.read(tmp_path / "p", format="cobre")


# Damaged and incomplete policies


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    formats.write(tmp_path / "policy", policy(), format="cobre")
    return tmp_path / "policy"


def test_a_policy_without_metadata_is_not_complete(folder: Path) -> None:
    (folder / "metadata.json").unlink()
    with pytest.raises(InvalidInput, match="written last"):
        formats.read(folder, format="cobre")
    assert "written last" in formats.validate(folder)[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_stages": 3, "warm_start_counts": []}, "num_stages is 3"),
        ({"state_dimension": 4}, "another state_dimension"),
        ({"rng_seed": -1}, "rng_seed has a wrong value"),
        ({"final_lower_bound": None}, "final_lower_bound has a wrong value"),
        ({"warm_start_counts": [1]}, "warm_start_counts has another length"),
        ({"created_at": 3}, "created_at has a wrong value"),
    ],
)
def test_metadata_that_does_not_fit(folder: Path, change: dict[str, Any], message: str) -> None:
    (folder / "metadata.json").write_text(json.dumps({**METADATA, **change}))
    with pytest.raises(InvalidInput, match=message):
        formats.read(folder, format="cobre")
    assert any(message in line for line in formats.validate(folder, format="cobre"))


def test_names_of_files_do_not_count_but_stages_do(folder: Path) -> None:
    (folder / "cuts" / "stage_001.bin").rename(folder / "cuts" / "other.bin")
    assert same(formats.read(folder, format="cobre").state, policy())
    shutil.copy(folder / "cuts" / "stage_000.bin", folder / "cuts" / "twin.bin")
    with pytest.raises(InvalidInput, match="two files are of one stage"):
        formats.read(folder, format="cobre")
    assert any("another file is of the same stage" in line for line in formats.validate(folder))


@pytest.mark.parametrize("name", ["notes.txt", "cuts/stage_000.bin.tmp", "more/x.bin"])
def test_a_file_that_a_policy_does_not_have_is_named_and_not_lost(folder: Path, name: str) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("x")
    with pytest.raises(InvalidInput, match="no part of a policy"):
        formats.read(folder)
    assert any("no part of a policy" in line for line in formats.validate(folder))
    assert formats.read(folder, format="tree").format == "tree"


def test_what_the_program_passes_over_is_a_problem(tmp_path: Path) -> None:
    state = policy()
    stage = state["cuts"]["stage_000"]
    stage |= {"populated_count": 9, "capacity": 1, "active_cut_indices": np.array([77], "<u4")}
    state["basis"]["stage_000"]["num_rows"] = 7
    formats.write(tmp_path / "policy", state, format="cobre")
    found = formats.validate(tmp_path / "policy", format="cobre")
    said = (
        "populated_count is 9",
        "active_cut_indices",
        "more than the capacity",
        "row_status has 3",
    )
    assert len(found) == len(said)
    assert all(any(text in line for line in found) for text in said)


@pytest.mark.parametrize("name", ["cuts", "basis", "states"])
def test_damaged_files_give_a_state_or_a_typed_error(folder: Path, name: str) -> None:
    path = folder / name / "stage_000.bin"
    sound, chance, refused = path.read_bytes(), random.Random(name), 0
    for _ in range(100):
        data = bytearray(sound[: chance.choice([len(sound), chance.randrange(len(sound))])])
        for _ in range(chance.randint(0, 3) if data else 0):
            data[chance.randrange(len(data))] = chance.choice([0, 1, 127, 128, 255])
        path.write_bytes(data)
        try:
            formats.read(folder, format="cobre")
        except RegistryError:
            refused += 1
            assert formats.validate(folder, format="cobre")
    assert refused > 33


def test_many_cuts_with_one_large_vector_are_refused(folder: Path) -> None:
    builder = flatbuffers.Builder(0)
    coefficients = builder.CreateNumpyVector(np.zeros(5000))
    tables = []
    for _ in range(2000):
        builder.StartObject(7)
        builder.PrependUOffsetTRelativeSlot(6, coefficients, 0)
        tables.append(builder.EndObject())
    builder.StartVector(4, len(tables), 4)
    for table in tables:
        builder.PrependUOffsetTRelative(table)
    vector = builder.EndVector()
    builder.StartObject(7)
    builder.PrependUint32Slot(1, 5000, 0)
    builder.PrependUOffsetTRelativeSlot(4, vector, 0)
    builder.Finish(builder.EndObject())
    (folder / "cuts" / "stage_000.bin").write_bytes(bytes(builder.Output()))
    with pytest.raises(InvalidInput, match="vectors of the cuts are not within the file"):
        formats.read(folder, format="cobre")


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("cuts", {"coefficients": np.zeros((4, 2))}, "another type or shape"),
        ("cuts", {"intercept": np.zeros(4, np.float32)}, "another type or shape"),
        ("cuts", {"more": np.zeros(4)}, "no such field"),
        ("metadata", {"final_lower_bound": float("nan")}, "final_lower_bound has a wrong value"),
        ("metadata", {"rng_seed": 2**64}, "rng_seed has a wrong value"),
    ],
)
def test_states_that_are_no_policy(
    tmp_path: Path, part: str, change: dict[str, Any], message: str
) -> None:
    state = policy()
    (state["cuts"]["stage_000"]["cuts"] if part == "cuts" else state[part]).update(change)
    with pytest.raises(IncompatibleState, match=message):
        formats.write(tmp_path / "policy", state, format="cobre")
    assert not list(tmp_path.iterdir())
