"""The three tables of a stage, as dicts of arrays and back.

All numbers of a table are absent where they are 0, if the official compiler wrote it; Cobre writes
all of them. Numbers of fields are those of the schema; 4 was never written, and 9 was a domination
count up to release 0.4.4.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from holdfast.registry.errors import IncompatibleState, InvalidInput
from holdfast.registry.formats.cobre.wire import Buffer, BufferSource, InMemory, Tables
from holdfast.registry.formats.state_file import TensorHeader

#: Fields of a cut: name, number, type.
_CUT: Final = (
    ("cut_id", 0, "<u8"),
    ("slot_index", 1, "<u4"),
    ("iteration", 2, "<u4"),
    ("forward_pass_index", 3, "<u4"),
    ("intercept", 5, "<f8"),
    ("is_active", 8, "|u1"),
)
_COEFFICIENTS, _STATE_AT_GENERATION, _DOMINATION = 6, 7, 9
#: Numbers of the three tables, by the folder of their files.
_NUMBERS: Final[Mapping[str, tuple[tuple[str, int], ...]]] = {
    "cuts": (
        ("stage_id", 0),
        ("state_dimension", 1),
        ("capacity", 2),
        ("warm_start_count", 3),
        ("populated_count", 6),
    ),
    "basis": (
        ("stage_id", 0),
        ("iteration", 1),
        ("num_columns", 2),
        ("num_rows", 3),
        ("num_cut_rows", 6),
    ),
    "states": (("stage_id", 0), ("state_dimension", 1), ("count", 2)),
}
#: Vectors of the three tables besides the cuts: name, number, type; in the order of the program.
_ARRAYS: Final[Mapping[str, tuple[tuple[str, int, str], ...]]] = {
    "cuts": (("active_cut_indices", 5, "<u4"),),
    "basis": (("column_status", 4, "|u1"), ("row_status", 5, "|u1")),
    "states": (("data", 3, "<f8"),),
}
FOLDERS: Final = tuple(_NUMBERS)


def read_stage(folder: str, data: bytes, where: str, *, domination: bool) -> dict[str, Any]:
    """Read the table of a file."""
    root = Buffer(InMemory(data), where).root()
    found: dict[str, Any] = {name: root.number(field, "<u4") for name, field in _NUMBERS[folder]}
    found |= {name: root.array(field, form) for name, field, form in _ARRAYS[folder]}
    if folder == "cuts":
        found["cuts"] = _cuts(root, found["state_dimension"], domination=domination)
    elif folder == "states":
        shape = found["count"], found["state_dimension"]
        found["data"] = _states(found["data"], shape, where)
    return found


def describe_stage(
    folder: str, data: BufferSource, where: str, *, domination: bool
) -> tuple[int, dict[str, TensorHeader]]:
    """Return the number of a stage, and its arrays, as `read_stage` would give them."""
    root = Buffer(data, where).root()
    numbers = {name: root.number(field, "<u4") for name, field in _NUMBERS[folder]}
    found: dict[str, tuple[str, tuple[int, ...]]] = {
        name: (form, (root.count(field),)) for name, field, form in _ARRAYS[folder]
    }
    if folder == "cuts":
        cuts = root.children(4, "the cuts")
        forms = {name: "|b1" if name == "is_active" else form for name, _, form in _CUT}
        found |= {f"cuts/{name}": (form, (len(cuts),)) for name, form in forms.items()}
        found["cuts/coefficients"] = "<f8", (len(cuts), numbers["state_dimension"])
        if visited := cuts.first().count(_STATE_AT_GENERATION):
            found["cuts/state_at_generation"] = "<f8", (len(cuts), visited)
        if domination and np.any(cuts.fields(_DOMINATION)):
            found["cuts/domination_count"] = "<u4", (len(cuts),)
    elif folder == "states":
        found["data"] = "<f8", (numbers["count"], numbers["state_dimension"])
    headers = {
        name: TensorHeader(np.dtype(form).name, shape) for name, (form, shape) in found.items()
    }
    return numbers["stage_id"], headers


def _cuts(root: Tables, dimension: int, *, domination: bool) -> dict[str, NDArray[Any]]:
    cuts = root.children(4, "the cuts")
    found = {name: cuts.numbers(field, form) for name, field, form in _CUT}
    if np.any(found["is_active"] > 1):
        raise root.buffer.broken("a truth value is neither 0 nor 1")
    found["is_active"] = found["is_active"].astype(bool)
    found["coefficients"] = cuts.rows(_COEFFICIENTS, "<f8", absent=dimension)
    if len(cuts) and found["coefficients"].shape[1] != dimension:
        raise InvalidInput(
            "cuts have another number of coefficients than the dimension of the state",
            where=root.buffer.where,
            expected=dimension,
            found=found["coefficients"].shape[1],
        )
    found["coefficients"] = found["coefficients"].reshape(len(cuts), dimension)
    visited = cuts.rows(_STATE_AT_GENERATION, "<f8")
    if visited.shape[1]:
        found["state_at_generation"] = visited
    if domination and np.any(cuts.fields(_DOMINATION)):
        found["domination_count"] = cuts.numbers(_DOMINATION, "<u4")
    return found


def _states(data: NDArray[Any], shape: tuple[int, int], where: str) -> NDArray[Any]:
    if len(data) != shape[0] * shape[1]:
        raise InvalidInput(
            "the visited states have another length than their number and dimension",
            where=where,
            expected=f"{shape[0]} x {shape[1]} numbers",
            found=len(data),
            hint="A file by Cobre's specification has a list of tables here, which no release "
            "of the program wrote.",
        )
    return data.reshape(shape)


def problems(folder: str, stage: Mapping[str, Any]) -> list[str]:
    """Return the contradictions within a stage; the program of Cobre ignores them."""
    found = []
    if folder == "cuts":
        cuts = stage["cuts"]
        count = len(cuts["cut_id"])
        if stage["populated_count"] != count:
            found.append(
                f"populated_count is {stage['populated_count']}, and there are {count} cuts"
            )
        active = np.sort(cuts["slot_index"][cuts["is_active"]])
        if not np.array_equal(np.sort(stage["active_cut_indices"]), active):
            found.append("active_cut_indices are not the slots of the active cuts")
        if len(np.unique(cuts["slot_index"])) != count:
            found.append("two cuts have the same slot")
        if count > stage["capacity"]:
            found.append(f"{count} cuts are more than the capacity of {stage['capacity']}")
    if folder == "basis":
        for name, numbers in (("column_status", "num_columns"), ("row_status", "num_rows")):
            if len(stage[name]) != stage[numbers]:
                found.append(
                    f"{name} has {len(stage[name])} elements, and {numbers} says otherwise"
                )
            if np.any(stage[name] > 4):
                found.append(f"{name} has a code above 4")
    return found


# Writing


def write_stage(folder: str, stage: Any, where: str) -> bytes:
    """Return the file of a stage, with the bytes that the program writes: every field, in order."""
    import flatbuffers

    builder = flatbuffers.Builder(1024)
    builder.ForceDefaults(True)
    fields = {name: _number(stage, name, where) for name, _ in _NUMBERS[folder]}
    vectors = {}
    if folder == "cuts":
        cuts = _cut_arrays(stage, fields["state_dimension"], where)
        offsets = [_write_cut(builder, cuts, at) for at in range(len(cuts["cut_id"]))]
        builder.StartVector(4, len(offsets), 4)
        for offset in reversed(offsets):
            builder.PrependUOffsetTRelative(offset)
        vectors[4] = builder.EndVector()
    for name, field, form in _ARRAYS[folder]:
        shape = (fields["count"], fields["state_dimension"]) if name == "data" else None
        array = _array(stage, name, form, where, shape=shape)
        vectors[field] = builder.CreateNumpyVector(array.reshape(-1))
    known = {*fields, *(name for name, *_ in _ARRAYS[folder]), *(("cuts",) * (folder == "cuts"))}
    unknown = sorted(map(str, set(stage) - known))
    if unknown:
        raise IncompatibleState("a stage has no such field", where=where, found=", ".join(unknown))
    numbers = {field: fields[name] for name, field in _NUMBERS[folder]}
    builder.StartObject(max((*numbers, *vectors)) + 1)
    for field in sorted((*numbers, *vectors)):
        if field in vectors:
            builder.PrependUOffsetTRelativeSlot(field, vectors[field], 0)
        else:
            builder.PrependUint32Slot(field, numbers[field], 0)
    builder.Finish(builder.EndObject())
    return bytes(builder.Output())


def _write_cut(builder: Any, cuts: Mapping[str, NDArray[Any]], at: int) -> int:
    visited = cuts.get("state_at_generation", np.zeros((len(cuts["cut_id"]), 0), "<f8"))
    coefficients = builder.CreateNumpyVector(cuts["coefficients"][at])
    state = builder.CreateNumpyVector(visited[at])
    has_domination = "domination_count" in cuts
    builder.StartObject(10 if has_domination else 9)
    put: Mapping[str, Callable[[int, Any, int], None]] = {
        "<u8": builder.PrependUint64Slot,
        "<u4": builder.PrependUint32Slot,
        "<f8": builder.PrependFloat64Slot,
        "|u1": builder.PrependUint8Slot,
    }
    for name, field, form in _CUT:
        if name == "is_active":
            builder.PrependUOffsetTRelativeSlot(_COEFFICIENTS, coefficients, 0)
            builder.PrependUOffsetTRelativeSlot(_STATE_AT_GENERATION, state, 0)
        value = cuts[name][at]
        put[form](field, float(value) if form == "<f8" else int(value), 0)
    if has_domination:
        builder.PrependUint32Slot(_DOMINATION, int(cuts["domination_count"][at]), 0)
    return int(builder.EndObject())


def _cut_arrays(stage: Any, dimension: int, where: str) -> dict[str, NDArray[Any]]:
    cuts = stage.get("cuts")
    if not isinstance(cuts, dict) or not isinstance(cuts.get("cut_id"), np.ndarray):
        raise IncompatibleState("a stage has no cuts as arrays", where=where)
    count = len(cuts["cut_id"])
    forms = {name: "|b1" if name == "is_active" else form for name, _, form in _CUT}
    found = {name: _array(cuts, name, form, where, shape=(count,)) for name, form in forms.items()}
    found["coefficients"] = _array(cuts, "coefficients", "<f8", where, shape=(count, dimension))
    if "domination_count" in cuts:
        found["domination_count"] = _array(cuts, "domination_count", "<u4", where, shape=(count,))
    if "state_at_generation" in cuts:
        found["state_at_generation"] = _array(cuts, "state_at_generation", "<f8", where)
    unknown = sorted(set(cuts) - set(found))
    if unknown:
        raise IncompatibleState("a cut has no such field", where=where, found=", ".join(unknown))
    return found


def _array(
    values: Any, name: str, form: str, where: str, shape: tuple[int, ...] | None = None
) -> NDArray[Any]:
    array = values.get(name)
    kind = np.dtype(form)
    if (
        not isinstance(array, np.ndarray)
        or array.dtype != kind
        or (shape is not None and array.shape != shape)
    ):
        raise IncompatibleState(
            "an array of a policy is missing, or has another type or shape",
            where=f"{where}/{name}",
            expected=f"{kind.name}" + (f" of shape {shape}" if shape is not None else ""),
            found=f"{array.dtype.name} {array.shape}"
            if isinstance(array, np.ndarray)
            else type(array).__name__,
        )
    return array


def _number(stage: Any, name: str, where: str) -> int:
    value = stage.get(name) if isinstance(stage, dict) else None
    if type(value) is not int or not 0 <= value < 2**32:
        raise IncompatibleState(
            "a number of a policy is missing or wrong",
            where=f"{where}/{name}",
            expected="a whole number of 32 bits",
            found=repr(value)[:50],
        )
    return value
