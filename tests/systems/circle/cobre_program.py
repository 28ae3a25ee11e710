"""A program that trains a policy by Cobre's document and knows nothing but its files.

`python cobre_program.py FOLDER COUNT` goes on for some iterations from `FOLDER/latest`, with its
cuts, bases, generator and history, and writes one more policy as the document has it: files of
FlatBuffers, `metadata.json` last, then the link. It leaves numbers out that equal the defaults of
the schema, as the official compiler does. It imports nothing of Holdfast.
"""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path
from typing import Any

import flatbuffers
import numpy as np
from flatbuffers import number_types as kinds
from flatbuffers.table import Table

U8, U32, U64, F64 = kinds.Uint8Flags, kinds.Uint32Flags, kinds.Uint64Flags, kinds.Float64Flags


# Files


def root(path: Path) -> Table:
    data = bytearray(path.read_bytes())
    return Table(data, *struct.unpack_from("<I", data))


def number(table: Table, field: int, kind: Any = U32) -> Any:
    return table.GetSlot(4 + 2 * field, 0, kind)


def vector(table: Table, field: int, kind: Any) -> np.ndarray:
    return table.GetVectorAsNumpy(kind, table.Offset(4 + 2 * field))


def tables(table: Table, field: int) -> list[Table]:
    at = table.Offset(4 + 2 * field)
    start = table.Vector(at)
    positions = range(start, start + 4 * table.VectorLen(at), 4)
    return [Table(table.Bytes, table.Indirect(position)) for position in positions]


def finished(builder: Any, numbers: dict[int, int], vectors: dict[int, int]) -> bytes:
    builder.StartObject(7)
    for field, offset in vectors.items():
        builder.PrependUOffsetTRelativeSlot(field, offset, 0)
    for field, value in numbers.items():
        builder.PrependUint32Slot(field, value, 0)
    builder.Finish(builder.EndObject())
    return bytes(builder.Output())


# Training


class Stage:
    """The cut pool and the basis of a stage."""

    def __init__(self, cuts: Table, basis: Table) -> None:
        self.id, self.dimension, self.capacity = (number(cuts, field) for field in (0, 1, 2))
        self.warm, self.count = number(cuts, 3), number(cuts, 6)
        self.slopes = np.zeros((self.capacity, self.dimension))
        self.intercepts = np.zeros(self.capacity)
        self.active = np.zeros(self.capacity, bool)
        self.made = np.zeros((self.capacity, 2), np.uint32)  # iteration, forward pass
        for cut in tables(cuts, 4):
            slot = number(cut, 1)
            self.slopes[slot] = vector(cut, 6, F64)
            self.intercepts[slot] = number(cut, 5, F64)
            self.active[slot] = number(cut, 8, kinds.BoolFlags)
            self.made[slot] = number(cut, 2), number(cut, 3)
        self.basis = np.zeros(self.dimension + self.capacity, np.uint8)
        known = np.concatenate([vector(basis, 4, U8), vector(basis, 5, U8)])
        self.basis[: len(known)] = known

    def solve(self, state: np.ndarray) -> float:
        active = self.active[: self.count]
        if not active.any():
            return 0.0
        values = self.slopes[: self.count] @ state + self.intercepts[: self.count]
        return float(values[active].max()) + 1e-3 * float(self.basis.sum())

    def add(self, slope: np.ndarray, intercept: float, made: tuple[int, int]) -> None:
        at = self.count
        self.slopes[at], self.intercepts[at] = slope, intercept
        self.active[at], self.made[at] = True, made
        if at > 4 and intercept > 0:
            self.active[at // 2] = False
        used = self.dimension + at
        self.basis[:used] = (self.basis[:used] + 1 + at) % 5
        self.count += 1

    def file_of_cuts(self, passes: int) -> bytes:
        builder = flatbuffers.Builder(0)
        made = []
        for slot in range(self.count):
            iteration, index = map(int, self.made[slot])
            slopes = builder.CreateNumpyVector(self.slopes[slot])
            builder.StartObject(9)
            builder.PrependUint64Slot(0, iteration * passes + index, 0)
            builder.PrependUint32Slot(1, slot, 0)
            builder.PrependUint32Slot(2, iteration, 0)
            builder.PrependUint32Slot(3, index, 0)
            builder.PrependFloat64Slot(5, float(self.intercepts[slot]), 0.0)
            builder.PrependUOffsetTRelativeSlot(6, slopes, 0)
            builder.PrependBoolSlot(8, bool(self.active[slot]), False)
            made.append(builder.EndObject())
        builder.StartVector(4, len(made), 4)
        for offset in reversed(made):
            builder.PrependUOffsetTRelative(offset)
        cuts = builder.EndVector()
        active = builder.CreateNumpyVector(np.flatnonzero(self.active).astype("<u4"))
        numbers = {0: self.id, 1: self.dimension, 2: self.capacity, 3: self.warm, 6: self.count}
        return finished(builder, numbers, {4: cuts, 5: active})

    def file_of_basis(self, iteration: int) -> bytes:
        builder = flatbuffers.Builder(0)
        rows = self.basis[self.dimension : self.dimension + self.count]
        vectors = {
            4: builder.CreateNumpyVector(self.basis[: self.dimension]),
            5: builder.CreateNumpyVector(rows),
        }
        numbers = {0: self.id, 1: iteration, 2: self.dimension, 3: self.count, 6: self.count}
        return finished(builder, numbers, vectors)


def iterate(stages: list[Stage], scenarios: Any, about: dict[str, Any]) -> None:
    """Take the forward and backward passes of an iteration."""
    costs = []
    about["completed_iterations"] += 1
    for index in range(about["forward_passes"]):
        noise = scenarios.standard_normal((len(stages), about["state_dimension"]))
        costs.append(sum(one.solve(at) for one, at in zip(stages, noise, strict=True)))
        for stage, at in zip(reversed(stages), noise[::-1], strict=True):
            cost = stage.solve(at) + float(at.sum())
            stage.add(np.tanh(at), cost, (about["completed_iterations"], index))
    about["convergence"]["lower"].append(min(costs))
    about["convergence"]["upper"].append(float(np.mean(costs)))


def main(folder: Path, count: int) -> None:
    policy = folder / "latest"
    about = json.loads((policy / "metadata.json").read_text())
    names = sorted(path.name for path in (policy / "cuts").iterdir())
    stages = [Stage(root(policy / "cuts" / name), root(policy / "basis" / name)) for name in names]
    assert len(stages) == about["num_stages"]
    scenarios = np.random.default_rng()
    scenarios.bit_generator.state = about["rng_state"]
    for _ in range(count):
        iterate(stages, scenarios, about)
    about["rng_state"] = scenarios.bit_generator.state
    about["final_lower_bound"] = about["convergence"]["lower"][-1]
    about["best_upper_bound"] = min(about["convergence"]["upper"])
    about["created_at"] = "2026-01-02T03:04:05Z"
    done = folder / f"policy_{about['completed_iterations']:06d}"
    for part in ("cuts", "basis"):
        (done / part).mkdir(parents=True)
    for stage, name in zip(stages, names, strict=True):
        (done / "cuts" / name).write_bytes(stage.file_of_cuts(about["forward_passes"]))
        basis = stage.file_of_basis(about["completed_iterations"])
        (done / "basis" / name).write_bytes(basis)
    (done / "metadata.json").write_text(json.dumps(about))
    (folder / "latest.new").symlink_to(done.name)
    (folder / "latest.new").rename(folder / "latest")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
