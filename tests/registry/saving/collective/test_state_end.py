"""The table of chunks on rank 0 finds and places what dicts of locations do."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import holdfast
from holdfast import Checkpoint, Registry, Storing
from holdfast.distributed import Group
from holdfast.registry.history.actions import Place
from holdfast.registry.history.state_reader import PlacedState
from holdfast.registry.objects.chunking import CHUNK_BYTES
from holdfast.registry.objects.keys import ObjectKey
from holdfast.registry.objects.manifest import Component, Manifest
from holdfast.registry.objects.placement import PackRef, Placement
from holdfast.registry.objects.tensor_entry import TensorEntry
from holdfast.registry.saving.collective.state_end import ChunkTable, as_digests, named_digests
from holdfast.registry.values.digest import Digest
from holdfast.registry.writing.placing import (
    ChunkLocation,
    build_placement,
    locations_of,
    make_place,
)
from tests.registry.saving.collective.ranks import group_of, together
from tests.registry.saving.collective.rows import WHOLE, Rows

#: Digests that are equal in their first eight bytes, and others.
DIGESTS = [Digest(bytes([head] * 8 + [tail] * 24)) for head in range(4) for tail in range(3)]
PACKS = [PackRef(ObjectKey("packs", Digest(bytes([n] * 32)), n), 9_000 + n) for n in range(3)]

locations = st.dictionaries(
    st.sampled_from(DIGESTS),
    st.builds(
        ChunkLocation,
        st.sampled_from(PACKS),
        st.integers(0, 2**33),
        st.integers(1, 99),
        st.integers(0, 1),
        st.none(),
    ),
)
entries = st.lists(st.lists(st.sampled_from(DIGESTS), min_size=1, max_size=4), max_size=4)


def manifest_of(tensors: list[list[Digest]]) -> Manifest:
    made = [
        TensorEntry("uint8", (len(some) * CHUNK_BYTES,), chunks=tuple(some)) for some in tensors
    ]
    return Manifest("dict", {"a": Component.build(None, made)})


@given(st.lists(locations, max_size=3), entries, entries)
@settings(max_examples=60, deadline=None)
def test_a_placement_is_that_of_the_locations(
    ranks: list[dict[Digest, ChunkLocation]], new: list[list[Digest]], old: list[list[Digest]]
) -> None:
    manifest, before = manifest_of(new), manifest_of(old)
    known = {d: ChunkLocation(PACKS[0], n, 7) for n, d in enumerate(before.direct_chunks)}
    state = placed(before, build_placement(before, {}, known))
    expected = locations_of([state])
    for of_rank in reversed(ranks):
        expected |= of_rank

    reports = [ChunkTable.of(one) for one in ranks]
    sent = [ChunkTable.decode(*one.encode(), one.packs) for one in reports]
    table = ChunkTable.joined([*sent, ChunkTable.of_state(state)])
    wanted = named_digests(manifest, {})
    distinct, rows = table.find(wanted)
    assert [Digest(one.tobytes()) for one in wanted[distinct]] == list(manifest.direct_chunks)
    assert [row < 0 for row in rows] == [d not in expected for d in manifest.direct_chunks]
    assert expected == dict(table.items())
    if (rows >= 0).all():
        made = table.placement(manifest, rows)
        assert made.content == build_placement(manifest, {}, expected).content


def placed(manifest: Manifest, placement: Placement) -> PlacedState:
    manifest_key = ObjectKey("manifests", manifest.digest, 0)
    place: Place = make_place(manifest_key, ObjectKey("placements", placement.digest, 0))
    return PlacedState(place, manifest, placement, {})


@pytest.mark.parametrize("count", [1, 500])
def test_a_few_chunks_are_found_among_many(count: int) -> None:
    dice = np.random.default_rng(0)
    digests = dice.integers(0, 256, (600, 32), np.uint8)
    digests[7] = digests[3]
    named = [Digest(one.tobytes()) for one in digests]
    table = ChunkTable.joined(
        [ChunkTable.of({d: ChunkLocation(PACKS[0], n, 1)}) for n, d in enumerate(named)]
    )
    wanted = np.concatenate([digests[3:4], as_digests(bytes(32)), digests[:count], digests[7:8]])
    distinct, rows = table.find(wanted)
    others = [n for n in range(count) if n not in (3, 7)]
    assert rows.tolist() == [3, -1, *others]
    assert distinct.tolist() == [0, 1, *(n + 2 for n in others)]


@pytest.mark.usefixtures("rows_are_sharded")
def test_ranks_keep_the_deltas_of_one_process(reg: Registry) -> None:
    """A chunk that has not changed stays a delta, and its base is placed too."""

    def rows(change: float, *at: int) -> NDArray[np.float32]:
        made = WHOLE.copy()
        made[list(at)] += np.float32(change)
        return made

    alone = reg.run("run")
    alone.save({"w": WHOLE}, step=1, storing=Storing(compression="zstd"))
    base = alone.save(
        {"w": rows(1, 0, -1)}, step=2, storing=Storing(compression="zstd", keyframe_every=4)
    )
    assert base.handle.reader.placement.rows.has_deltas
    alone.close()

    def save(group: Group) -> Checkpoint:
        with holdfast.open(reg.url) as mine:
            run = mine.run("run", group=group)
            whole = rows(1, 0)  # the first chunk as before, the last as in step 1
            return run.save({"w": Rows(whole, group.rank, group.size)}, step=3)

    made = together(group_of(2, 30.0), save)
    assert len({one.digest for one in made}) == 1, made
    found = reg.run("run").latest()
    placement = found.handle.reader.placement
    assert placement.rows.has_deltas
    assert len(placement.extra) == 1
    assert (found.load()["w"] == rows(1, 0)).all()


@pytest.mark.usefixtures("rows_are_sharded")
def test_ranks_choose_the_codec_of_one_process(tmp_path: Path) -> None:
    """A registry whose saves keep differences compresses, also in saves that make none."""
    with holdfast.init(tmp_path / "differences", keyframe_every=4) as reg:
        alone = reg.create_run("alone").save({"w": np.zeros_like(WHOLE)}, step=1)
        reg.create_run("ranks")

    def save(group: Group) -> Checkpoint:
        with holdfast.open(tmp_path / "differences") as mine:
            rows = Rows(np.zeros_like(WHOLE), group.rank, group.size)
            return mine.run("ranks", group=group).save({"w": rows}, step=1)

    made = together(group_of(2, 30.0), save)[0]
    codecs = [{row.codec for row in one.handle.reader.placement.rows} for one in (alone, made)]
    assert codecs[0] == codecs[1] != {0}
