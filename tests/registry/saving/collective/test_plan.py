"""Plans of random layouts: every byte comes from one place, and no round exceeds its bound."""

from __future__ import annotations

import numpy as np
import pytest

from holdfast.registry.saving.collective import plan as planning
from holdfast.registry.saving.collective.patterns import WrongLayout
from holdfast.registry.saving.collective.plan import Plan, PlanPart, make_plan
from holdfast.registry.saving.collective.shards import Boxes, Ints, Structure

STATE = Structure(
    ("float32", "int8", "float32", "float64", "float64", "float64"),
    # Equal ones are cut unlike each other.
    ((1003, 3001), (5_000_001,), (7, 13, 300, 41), (5, 9), (5, 9), (5, 9)),
)
Slices = list[tuple[slice, ...]]


def cut(length: int, parts: int) -> list[tuple[int, int]]:
    rows = -(-length // parts)
    return [(min(n * rows, length), min((n + 1) * rows, length)) for n in range(parts)]


def layouts(ranks: int, dice: np.random.Generator, mesh: tuple[int, int]) -> list[Ints]:
    """Shard each tensor along random axes of a mesh, copy it along others, or leave it whole."""
    tables: list[list[list[int]]] = [[] for _ in range(ranks)]
    for tensor, shape in enumerate(STATE.shapes):
        if dice.random() < 0.2:
            continue
        axes = [int(dice.integers(-1, len(shape))) for _ in mesh]
        for rank in range(ranks):
            begin, end = [0] * len(shape), list(shape)
            for axis, parts, at in zip(axes, mesh, np.unravel_index(rank, mesh), strict=True):
                if axis >= 0:
                    low, high = cut(end[axis] - begin[axis], parts)[int(at)]
                    begin[axis], end[axis] = begin[axis] + low, begin[axis] + high
            extent = [stop - start for start, stop in zip(begin, end, strict=True)]
            tables[rank].append([tensor, *STATE.padded(begin, 0), *STATE.padded(extent, 1)])
    return [np.array(one, np.int64).reshape(-1, 1 + 2 * STATE.axes) for one in tables]


def boxes(structure: Structure, tables: list[Ints]) -> list[Boxes]:
    """Return the layouts as rank 0 gets them."""
    made = [Boxes.from_rows(one, len(structure.shapes)).encode() for one in tables]
    return [Boxes.decode([memoryview(one) for one in columns]) for columns in made]


def boxes_of(part: Ints, at: int) -> Slices:
    axes = STATE.axes
    return [
        tuple(slice(a, b) for a, b in zip(row[at : at + axes], row[at + axes :], strict=True))
        for row in part.tolist()
    ]


CASES = [(1, (1, 1)), (2, (2, 1)), (3, (1, 3)), (4, (2, 2)), (6, (3, 2))]


@pytest.mark.parametrize(("ranks", "mesh"), CASES)
@pytest.mark.parametrize("loads", [False, True])
def test_every_element_travels_once_and_rounds_are_bounded(
    ranks: int, mesh: tuple[int, int], loads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "ROUND_BYTES", 5 * 2**20)
    tables = layouts(ranks, np.random.default_rng(ranks), mesh)
    plan = make_plan(STATE, boxes(STATE, tables), loads=loads)
    encoded = [plan.part(rank).encode() for rank in range(ranks)]
    parts = [PlanPart.decode([*map(memoryview, columns)]) for columns in encoded]
    check_chunks(parts)
    if loads:
        check_destinations(parts, tables)
    else:
        check_sources(parts, tables)
    check_rounds(plan, parts)


def check_chunks(parts: list[PlanPart]) -> None:
    """Each element is in one chunk of one owner, and of each chunk the elements are adjacent."""
    for tensor, shape in enumerate(STATE.shapes):
        number = np.arange(np.prod(shape)).reshape(STATE.padded(shape, 1))
        seen = np.zeros(number.shape, np.int8)
        for part in parts:
            mine = part.chunks[part.chunks[:, 0] == tensor]
            for box in boxes_of(mine, 4):
                seen[box] += 1
                assert (np.diff(number[box].reshape(-1)) == 1).all()
        assert (seen == 1).all()


def held(tables: list[Ints], rank: int, tensor: int) -> tuple[slice, ...]:
    """Return the box that a rank has of a tensor."""
    axes = STATE.axes
    for row in tables[rank].tolist():
        if row[0] == tensor:
            begin, extent = row[1 : 1 + axes], row[1 + axes :]
            return tuple(slice(b, b + n) for b, n in zip(begin, extent, strict=True))
    return tuple(slice(0, n) for n in STATE.padded(STATE.shapes[tensor], 1))


def check_sources(parts: list[PlanPart], tables: list[Ints]) -> None:
    """Each element of a chunk comes from one rank, which has it, and is told to send it."""
    given = {
        (rank, *row.tolist()) for rank, part in enumerate(parts) for row in part.gives[:, [0, 1]]
    }
    for owner, part in enumerate(parts):
        tensors = part.chunks[part.takes[:, 0], 0] if len(part.takes) else part.takes[:, 0]
        for tensor, shape in enumerate(STATE.shapes):
            seen = np.zeros(STATE.padded(shape, 1), np.int8)
            rows = part.takes[tensors == tensor]
            for row, box in zip(rows, boxes_of(rows, 3), strict=True):
                seen[box] += 1
                has = np.zeros(seen.shape, bool)
                has[held(tables, int(row[1]), tensor)] = True
                assert has[box].all()
                assert row[1] == owner or (int(row[1]), tensor, owner) in given
            owned = np.zeros(seen.shape, np.int8)
            for box in boxes_of(part.chunks[part.chunks[:, 0] == tensor], 4):
                owned[box] = 1
            assert (seen == owned).all()


def check_destinations(parts: list[PlanPart], tables: list[Ints]) -> None:
    """Each element that a rank has comes from the owner of its chunk, once."""
    for rank, part in enumerate(parts):
        tensors = part.chunks[part.takes[:, 0], 0] if len(part.takes) else part.takes[:, 0]
        own = part.takes[:, 1] == rank
        for tensor, shape in enumerate(STATE.shapes):
            seen = np.zeros(STATE.padded(shape, 1), np.int8)
            near = part.takes[own & (tensors == tensor)]
            far = part.gives[part.gives[:, 0] == tensor]
            for box in [*boxes_of(near, 3), *boxes_of(far, 3)]:
                seen[box] += 1
            wanted = np.zeros(seen.shape, np.int8)
            wanted[held(tables, rank, tensor)] = 1
            assert (seen == wanted).all()


def check_rounds(plan: Plan, parts: list[PlanPart]) -> None:
    items = np.array([4, 1, 4, 8, 8, 8])
    for rank, part in enumerate(parts):
        for table, away in (
            (part.takes, part.takes[:, 1] != rank),
            (part.gives, part.gives[:, 1] != rank),
        ):
            some = table[away]
            of = part.chunks[some[:, 0], 0] if table is part.takes else some[:, 0]
            axes = STATE.axes
            volume = (some[:, 3 + axes :] - some[:, 3 : 3 + axes]).prod(axis=1) * items[of]
            by_round = np.bincount(some[:, 2], volume, minlength=1)
            # A chunk that goes to many ranks travels in a round of its own.
            copies = 4 * 2**20 * max(len(parts) - 1, 1)
            assert by_round.max() <= max(planning.ROUND_BYTES, copies)
        assert (part.chunks[:, 3] < max(plan.rounds, 1)).all()


def test_chunks_are_spread_over_the_ranks_that_have_them() -> None:
    tables = layouts(4, np.random.default_rng(1), (4, 1))
    plan = make_plan(STATE, boxes(STATE, [one[:0] for one in tables]))
    assert np.bincount(plan.owner, minlength=4).min() >= 2  # whole tensors: any rank may own
    assert plan.moved_bytes == 0  # and each takes its own


@pytest.mark.parametrize("end", [60, 101])
def test_parts_that_overlap_or_leave_gaps_are_refused(end: int) -> None:
    one = Structure(("float32",), ((100, 20),))
    tables = [np.array([[0, begin, 0, stop - begin, 20]]) for begin, stop in ((0, 61), (61, 100))]
    make_plan(one, boxes(one, tables))
    tables[0][0, 3] = end
    with pytest.raises(WrongLayout):
        make_plan(one, boxes(one, tables))


def test_a_tensor_that_only_some_ranks_shard_is_refused() -> None:
    one = Structure(("float32",), ((100, 20),))
    with pytest.raises(WrongLayout, match="some ranks only"):
        make_plan(one, boxes(one, [np.array([[0, 0, 0, 100, 20]]), np.zeros((0, 5), np.int64)]))
