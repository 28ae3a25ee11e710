"""The simulated fleet of `bench/sharded_plans.py` counts what real ranks do."""

from __future__ import annotations

import importlib
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holdfast.backends.memory import MemoryBackend
from holdfast.backends.wrappers.metered import Call, Metered
from holdfast.distributed import Group, load_into
from holdfast.registry.face.factory import open_on
from holdfast.registry.saving.collective import sides
from holdfast.registry.saving.collective.plan import ROUND_BYTES
from holdfast.registry.store.store import create_config
from tests.registry.saving.collective.ranks import group_of, together
from tests.registry.saving.collective.rows import Rows, shard_rows

BENCH = Path(__file__).parents[4] / "bench"
#: Chunks of these have parts of several ranks; the first tensor has more rows than a chunk.
SHAPES = {"a": (1203, 1201), "b": (500, 40, 30), "c": (1201,)}
PARTS = ("master", "exp_avg", "exp_avg_sq")
RANKS = 3


@pytest.fixture
def fleets(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The modules of the simulation."""
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module("architectures"), importlib.import_module("simulated_fleet")


@cache
def whole(seed: int) -> dict[str, Any]:
    """Return for each tensor its bytes: two an element, and three times four."""
    dice = np.random.default_rng(seed)
    return {
        name: [dice.bytes(int(np.prod(shape)) * item) for item in (2, *(4 for _ in PARTS))]
        for name, shape in SHAPES.items()
    }


def state(rank: int, seed: int) -> dict[str, Any]:
    """Return a rank's part of a state."""
    model, moments = {}, {}
    for name, [weights, *others] in whole(seed).items():
        model[name] = rows(name, weights, np.uint16, rank)
        moments[name] = {
            part: rows(name, one, np.uint32, rank) for part, one in zip(PARTS, others, strict=True)
        }
    return {"model": model, "optimizer": {"state": moments}}


def rows(name: str, data: bytes, dtype: Any, rank: int) -> Rows:
    return Rows(np.frombuffer(data, dtype).reshape(SHAPES[name]).copy(), rank, RANKS)


def test_a_simulated_fleet_counts_what_ranks_do(
    fleets: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks, objects, exchanged bytes and bytes read are those of a save and a load by threads."""
    shard_rows(monkeypatch, ROUND_BYTES)
    plans = []
    real = sides.make_plan
    monkeypatch.setattr(sides, "make_plan", lambda *of: plans.append(real(*of)) or plans[-1])
    architectures, simulated_fleet = fleets
    parameters = tuple((name, shape, None) for name, shape in SHAPES.items())
    told = simulated_fleet.Fleet(architectures.Architecture("", parameters), RANKS, 1).run()

    shared = MemoryBackend()
    create_config(shared, "skipped")
    open_on(shared).create_run("run")

    def save(group: Group) -> list[Any]:
        with open_on(shared) as registry:
            run = registry.run("run", group=group)
            return [run.save(state(group.rank, seed), step=seed) for seed in (1, 2)]

    groups = group_of(RANKS, 30.0)
    saved = together(groups, save)[0][0]
    kept = [one.key for one in shared.list() if one.key.startswith(("packs/", "man", "place"))]
    assert told.chunks == len(saved.manifest.all_chunks({}))
    assert len(kept) == 2 * told.objects
    assert told.requests <= 2 * told.objects + 2
    moved = sum(group.moved_bytes for group in groups)
    assert moved == 2 * round(told.exchanged * saved.size_bytes) > 0
    assert len(plans) == 1, "an equal layout is not planned again"

    def load(group: Group) -> int:
        calls: list[Call] = []
        with open_on(Metered(shared, calls)) as registry:
            target = state(group.rank, 3)
            load_into(registry.checkpoint("run/latest"), target, group=group)
            assert (target["model"]["a"].part == state(group.rank, 2)["model"]["a"].part).all()
        return sum(len(call.byte_range) for call in calls if call.byte_range is not None)

    read = together(group_of(RANKS, 30.0), load)
    assert max(read) == round(told.read_gb * 1e9)
    assert sum(read) == saved.size_bytes


def test_a_plan_does_not_grow_with_the_layers(fleets: Any) -> None:
    """Layers are cut alike: boxes and pieces are computed once, and ranks name a box once."""
    architectures, _ = fleets
    few, many = (architectures.gpt("", layers, 256, 1000, 64) for layers in (2, 40))
    sizes = []
    for of in (few, many):
        boxes = of.layouts(16, 2)
        plan = sides.make_plan(of.structure, boxes)
        sizes.append((len(plan.patterns.piece_box), len(boxes[3].distinct)))
        assert sum(len(plan.part(rank).chunks) for rank in range(16)) == len(plan.owner)
    assert sizes[0] == sizes[1]
