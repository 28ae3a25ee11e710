"""Reads that rank 0 makes for all ranks, counted; and what happens if it cannot."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast
from holdfast.backends import Backend
from holdfast.backends.local.backend import LocalBackend
from holdfast.backends.location import Location
from holdfast.backends.memory import MemoryBackend
from holdfast.backends.wrappers import Call, Metered
from holdfast.distributed import Group, ThreadGroup, load_into
from holdfast.registry.errors import (
    Damaged,
    IncompatibleState,
    MissingObject,
    NotFound,
    RankFailed,
    RolledBack,
)
from holdfast.registry.face.factory import open_on
from holdfast.registry.objects import slot_key
from holdfast.registry.saving.collective import telling
from holdfast.registry.store.heads import Heads
from holdfast.registry.store.store import create_config
from tests.registry.saving.collective.ranks import group_of, mortals, together
from tests.registry.saving.collective.rows import WHOLE, Rows, state
from tests.support.faults import Died
from tests.support.stores import small_grid

pytestmark = pytest.mark.usefixtures("rows_are_sharded")

WELL_S = 30.0
RANKS = 5
#: Of the only tensor that is cut into more chunks than a manifest names.
LIST_BYTES = 32 * 24


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryBackend]:
    """A registry with a run of three checkpoints, whose large tensor has a digest list."""
    monkeypatch.setattr(telling, "_BLOCK_BYTES", 700)  # so that there are more blocks than levels
    made = MemoryBackend()
    create_config(made, "skipped")
    with small_grid(2**18, list_threshold=4):
        with open_on(made) as registry:
            run = registry.create_run("run")
            for step in (1, 2, 3):
                run.save(whole(step), step=step)
        yield made


def whole(step: int) -> dict[str, Any]:
    return {"model": {"w": WHOLE + np.float32(step), "b": np.arange(100)}}


def newest_placement(backend: Backend) -> str:
    with open_on(backend) as registry:
        return str(registry.checkpoint("run/latest").handle.reader.place.placement_key)


def target(rank: int, size: int) -> dict[str, Any]:
    return {"model": {"w": Rows(np.zeros_like(WHOLE), rank, size), "b": np.zeros(100, np.int64)}}


def kinds(calls: list[Call]) -> list[str]:
    """Return what was asked for, except for the chunks in packs."""
    return [one.key.partition("/")[0] for one in calls if not one.key.startswith("packs/")]


def test_history_and_placements_are_read_once_for_all_ranks(shared: MemoryBackend) -> None:
    def act(group: Group) -> list[list[Call]]:
        calls: list[Call] = []
        steps = []

        def count() -> None:
            steps.append(calls[:])
            calls.clear()

        with open_on(Metered(shared, calls)) as registry:
            run = registry.run("run", group=group)
            count()
            newest = run.latest()
            count()
            wanted = target(group.rank, RANKS)
            load_into(newest, wanted, group=group)
            count()
            right = Rows(whole(3)["model"]["w"], group.rank, RANKS)
            assert (wanted["model"]["w"].part == right.part).all()
            assert (wanted["model"]["b"] == np.arange(100)).all()
            assert run.save(state(group.rank, RANKS), step=4).step == 4
            count()
        return steps

    found = together(group_of(RANKS, WELL_S), act)
    opened, _, loaded, _ = found[0]
    assert "runs" in kinds(opened)
    assert sorted(kinds(loaded)) == ["manifests", "placements"]
    for opened, asked, loaded, saved in found[1:]:
        assert kinds(opened) == ["registry.json"]
        assert kinds(asked) == ["runs"], "only whether there is a next slot"
        assert kinds(loaded) == kinds(saved) == []
    read = sum(len(one.byte_range or "") for each in found for one in each[2])
    assert read == WHOLE.nbytes + 800 + LIST_BYTES, "the digest list once"


def test_a_rank_above_0_believes_no_byte_that_it_is_told(
    shared: MemoryBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A byte of each object is changed: no rank loads what was not committed."""
    real, changed = telling.join, 0

    def join(header: dict[str, Any], *columns: Any) -> bytes:
        if "keys" not in header or len(columns) < 3:
            return real(header, *columns)
        spoiled = bytearray(real(header, *columns))
        spoiled[-changed] ^= 1
        return bytes(spoiled)

    def act(group: Group) -> bool:
        with open_on(shared) as registry:
            wanted = target(group.rank, 2)
            load_into(registry.checkpoint("run/latest"), wanted, group=group)
            right = Rows(whole(3)["model"]["w"], group.rank, 2)
            return bool((wanted["model"]["w"].part == right.part).all())

    monkeypatch.setattr(telling, "join", join)
    size = len(shared.get(newest_placement(shared)))
    for changed in (1, LIST_BYTES):  # the end and the begin of the list: rank 1 reads it for itself
        assert together(group_of(2, WELL_S), act) == [True, True], changed
    for changed in (
        LIST_BYTES + 1,
        LIST_BYTES + size,
        LIST_BYTES + size + 1,
    ):  # placement, and manifest
        found = together(group_of(2, WELL_S), act)
        assert [type(one) for one in found] == [Damaged, Damaged], (changed, found)


def test_an_error_of_rank_0_reaches_every_rank(shared: MemoryBackend) -> None:
    def open_absent(group: Group) -> None:
        with open_on(shared) as registry:
            registry.run("other", group=group)

    found = together(group_of(3, WELL_S), open_absent)
    assert [type(one) for one in found] == [NotFound] * 3
    assert all("rank 0" in str(one) for one in found[1:])
    shared.delete(newest_placement(shared))

    def load(group: Group) -> None:
        with open_on(shared) as registry:
            load_into(registry.checkpoint("run/latest"), target(group.rank, 3), group=group)

    found = together(group_of(3, WELL_S), load)
    assert [type(one) for one in found] == [MissingObject] * 3, found


def test_a_rank_whose_address_leads_elsewhere_is_refused_as_it_opens(
    shared: MemoryBackend,
) -> None:
    """It reads `registry.json` itself: if it were told, its packs would be lost, and committed."""
    elsewhere = MemoryBackend()

    def act(group: Group) -> int:
        with open_on(elsewhere if group.rank else shared) as registry:
            return registry.run("run", group=group).save(state(group.rank, 2), step=9).step

    assert [type(one) for one in together(group_of(2, 2.0), act)] == [RankFailed, NotFound]
    assert not list(elsewhere.list())
    with open_on(shared) as registry:
        assert [one.step for one in registry.run("run").checkpoints()] == [1, 2, 3]


def test_a_rank_that_is_lost_as_the_others_open_is_named(shared: MemoryBackend) -> None:
    def act(group: Group) -> str:
        with open_on(shared) as registry:
            return registry.run("run", group=group).id

    silent = mortals(3, 2.0, victim=0, dies_at=1)
    found = together(silent, act)
    assert isinstance(found[0], Died)
    assert [type(one) for one in found[1:]] == [RankFailed] * 2
    assert {one.rank for one in found[1:]} == {0}
    assert together(mortals(3, 2.0, victim=1, dies_at=1), act)[::2] == ["run", "run"]


def test_a_rank_compares_what_it_is_told_with_what_its_machine_has_seen(
    shared: MemoryBackend, tmp_path: Path
) -> None:
    """Rank 0 is on a machine that has not seen the log, and rank 1 on one that has seen more."""
    older = MemoryBackend()
    for one in shared.list():
        if one.key != slot_key("run", 3) and "snapshots" not in one.key:
            older.put(one.key, shared.get(one.key))

    def act(group: Group, backend: Backend) -> int:
        heads = Heads(Location("memory", "it"), str(tmp_path)) if group.rank else None
        with open_on(backend, heads=heads) as registry:
            return len(registry.run("run", group=group).checkpoints())

    assert together(group_of(2, WELL_S), lambda group: act(group, shared)) == [3, 3]
    first, second = together(group_of(2, WELL_S), lambda group: act(group, older))
    assert (first, type(second)) == (2, RolledBack)


def test_a_late_rank_opens_what_its_machine_has_seen(tmp_path: Path) -> None:
    url = tmp_path / "reg"
    with holdfast.init(url, skip_race_probe=True) as made:
        made.create_run("run").save({"w": np.arange(9)}, step=1)
    groups = ThreadGroup.make(2, WELL_S)
    with holdfast.open(url) as first:
        first.run("run", group=groups[0])
        with holdfast.open(url) as other:
            other.run("run").status = "interrupted"
        with holdfast.open(url) as second:
            assert second.run("run", group=groups[1]).status == "interrupted"


def test_a_told_slot_is_made_durable_before_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = tmp_path / "reg"
    with holdfast.init(url, skip_race_probe=True) as made:
        made.create_run("run").save({"w": np.arange(9)}, step=1)
    groups = ThreadGroup.make(2, WELL_S)
    with holdfast.open(url) as first, holdfast.open(url) as second:
        first.run("run", group=groups[0])
        told = second.run("run", group=groups[1])
        synced: list[str] = []
        whole = LocalBackend.make_durable

        def sync(backend: LocalBackend, keys: Iterable[str]) -> None:
            synced.extend(found := list(keys))
            whole(backend, found)

        monkeypatch.setattr(LocalBackend, "make_durable", sync)
        told.status = "failed"
    assert slot_key("run", 1) in synced  # whoever put it may have died before it was durable


@pytest.mark.parametrize("tied", [0, 1])
def test_a_rank_that_ties_other_tensors_is_refused_at_once(tmp_path: Path, tied: int) -> None:
    url, values = tmp_path / "reg", np.arange(70_000, dtype=np.float32)
    with holdfast.init(url, skip_race_probe=True) as made:
        made.create_run("run").save({"m": {"a": values, "b": values.copy()}}, step=1)

    def act(group: Group) -> str:
        with holdfast.open(url) as registry:
            one = np.zeros_like(values)
            other = one if group.rank == tied else np.zeros_like(values)
            with pytest.raises(IncompatibleState) as caught:
                load_into(
                    registry.checkpoint("run/latest"), {"m": {"a": one, "b": other}}, group=group
                )
            return str(caught.value)

    for said in together(ThreadGroup.make(2, WELL_S), act):
        assert "different tensors" in said
