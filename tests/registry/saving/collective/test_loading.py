"""Loads by ranks that are threads: bounded memory, damage, and ranks that die."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast
from holdfast import Registry
from holdfast.distributed import Group, load_into
from holdfast.registry.errors import Damaged, RankFailed
from holdfast.registry.loading.fit import LoadReport
from tests.registry.saving.collective.ranks import Troubled, group_of, mortals, together
from tests.registry.saving.collective.rows import WHOLE, Rows
from tests.support.faults import Died

pytestmark = pytest.mark.usefixtures("rows_are_sharded")

#: Long enough for a rank that is well, on a busy machine.
WELL_S = 30.0
#: Tensors of one chunk of 2 MB each, of which every rank has some rows; and one that all have.
TENSORS = 24


def whole() -> dict[str, Any]:
    made = {f"t{n}": WHOLE[:500] + np.float32(n) for n in range(TENSORS)}
    return {"model": {**made, "same": WHOLE}}


def empty(rank: int, size: int) -> dict[str, Any]:
    zeros = {name: np.zeros_like(one) for name, one in whole()["model"].items()}
    parts = {n: one if n == "same" else Rows(one, rank, size) for n, one in zeros.items()}
    return {"model": parts}


def test_a_load_needs_memory_for_a_few_rounds_only(reg: Registry) -> None:
    """Every chunk travels: each rank holds a half of it, and a round takes one of them."""
    saved = reg.run("run").save(whole(), step=1)
    targets = [empty(rank, 2) for rank in range(2)]

    def load(group: Group) -> int:
        load_into(saved, targets[group.rank], group=group)
        return tracemalloc.get_traced_memory()[1]

    tracemalloc.start()
    try:
        [first, second] = together(group_of(2, WELL_S), load)
    finally:
        tracemalloc.stop()
    right = whole()["model"]
    for name, one in right.items():
        parts = [target["model"][name] for target in targets]
        joined = parts[0] if name == "same" else np.concatenate([part.part for part in parts])
        np.testing.assert_array_equal(joined, one, err_msg=name)
    state_bytes = sum(one.nbytes for one in right.values())
    # On each rank 4 rounds of 2 MB or one chunk of 4 MB, and the bytes that are exchanged.
    assert max(first, second) < 28e6 < state_bytes / 1.9


def test_saves_and_loads_of_one_group_take_turns(reg: Registry) -> None:
    def act(group: Group) -> list[bool]:
        with holdfast.open(reg.url) as mine:
            run = mine.run("run", group=group)
            equal = []
            for step in (1, 2, 3):
                part = Rows(WHOLE + np.float32(step), group.rank, 2)
                saved = run.save({"w": part}, step=step)
                target = Rows(np.zeros_like(WHOLE), group.rank, 2)
                load_into(saved, {"w": target}, group=group)
                equal.append(np.array_equal(target.part, part.part))
            return equal

    assert together(group_of(2, WELL_S), act) == [[True] * 3] * 2


def test_a_damaged_chunk_is_an_error_on_every_rank(reg: Registry) -> None:
    saved = reg.run("run").save(whole(), step=1)
    packs = Path(reg.url.removeprefix("file://")) / "packs"
    pack = max(
        (one for one in packs.rglob("*") if one.is_file()), key=lambda one: one.stat().st_size
    )
    data = bytearray(pack.read_bytes())
    data[len(data) // 2] ^= 1
    pack.write_bytes(data)

    def load(group: Group) -> None:
        with holdfast.open(reg.url) as mine:
            load_into(mine.checkpoint(saved.ref), empty(group.rank, 3), group=group)

    found = together(group_of(3, WELL_S), load)
    assert [type(one) for one in found] == [Damaged] * 3, found


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_dies_at_any_call_of_a_load_is_named_by_all(reg: Registry, victim: int) -> None:
    saved = reg.run("run").save({"model": {"w": WHOLE}}, step=1)

    def load(group: Group) -> LoadReport:
        target = {"model": {"w": Rows(np.zeros_like(WHOLE), group.rank, 3)}}
        return load_into(saved, target, group=group)

    trial = [Troubled(one, lambda: None) for one in group_of(3, WELL_S)]
    assert all(isinstance(one, LoadReport) for one in together(trial, load))
    failed = 0
    for at in range(1, trial[victim].calls + 1):
        found = together(mortals(3, WELL_S, victim, at), load)
        assert isinstance(found.pop(victim), Died)
        for one in found:
            assert isinstance(one, LoadReport | RankFailed), found
            failed += isinstance(one, RankFailed)
            assert getattr(one, "rank", victim) == victim, found
    assert failed > 6
