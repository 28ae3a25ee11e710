"""Lossless deltas: the same state, the same id, and of what changed only the difference."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import holdfast
from holdfast import Storing, sync
from holdfast.backends.wrappers import Metered
from holdfast.registry.errors import Damaged, InvalidInput, Malformed
from holdfast.registry.face.factory import open_on
from holdfast.registry.history.log import RunLog
from holdfast.registry.history.retention import Retention
from holdfast.registry.history.state_reader import PlacedState
from holdfast.registry.objects import codecs
from holdfast.registry.objects.codecs import COMPRESSIONS, RAW
from holdfast.registry.objects.keys import ObjectKey
from holdfast.registry.objects.pack import PackTable, trailer
from holdfast.registry.objects.placement import (
    MAX_DEPTH,
    NO_BASE,
    ChunkRow,
    PackRef,
    Placement,
    Rows,
)
from holdfast.registry.store.chunk_cache import ChunkCache
from holdfast.registry.values.digest import Digest
from holdfast.registry.writing.placing import locations_of
from tests.support.faults import flip
from tests.support.loads import refused
from tests.support.states import same
from tests.support.stores import contents, new_backend, packs_of, small_grid
from tests.support.strategies import examples

ROWS = 2000


def weights(seed: int = 0, rows: int = ROWS) -> torch.Tensor:
    fresh = np.random.default_rng(seed)
    return torch.from_numpy(fresh.normal(size=(rows, 50)).astype(np.float32)).bfloat16()


def nudged(tensor: torch.Tensor, step: int, share: float = 0.01, mask: int = 1) -> torch.Tensor:
    """Return a tensor of which some elements have other last bits."""
    result = tensor.clone()
    bits = result.view(torch.int16).view(-1)
    where = np.random.default_rng(1000 + step).integers(0, bits.numel(), int(bits.numel() * share))
    bits[torch.from_numpy(where)] ^= mask
    return result


def history(steps: int, share: float = 0.01) -> list[dict]:
    tensor, states = weights(), []
    for step in range(steps):
        states.append({"model": {"w": tensor}, "step": step})
        tensor = nudged(tensor, step, share)
    return states


def saved(run, states, **storing):
    return [run.save(state, step=state["step"], storing=Storing(**storing)) for state in states]


def links_of(checkpoint) -> list[int]:
    """Return how many differences are below each chunk of a checkpoint."""
    rows = checkpoint.handle.reader.placement.rows
    found = []
    for row in rows[: len(checkpoint.manifest.direct_chunks)]:
        found.append(0)
        while row.base != NO_BASE:
            row = rows[row.base]
            found[-1] += 1
    return found


# What is stored


def test_two_chains_that_end_at_one_chunk_are_read_together(run, backend, open_registry):
    """What one job adds up for the chunk below both is not forgotten for either."""
    pair = [weights()] * 2
    for step in range(3):
        if step:
            pair = [nudged(one, 10 * step + n) for n, one in enumerate(pair)]
        state = {"model": dict(enumerate(pair))}
        last = run.save(state, step=step, storing=Storing(compression="zstd", keyframe_every=8))
    assert links_of(last) == [2, 2]
    (first, second), rows = last.handle.reader.placement.rows[:2], last.handle.reader.placement.rows
    assert first.base != second.base
    assert rows[first.base].base == rows[second.base].base
    loaded = open_registry(backend).checkpoint("run").load()
    assert all(torch.equal(loaded["model"][n], one) for n, one in enumerate(pair))


def test_of_a_small_change_only_the_difference_is_stored(run, backend, open_registry):
    states = history(3)
    first, second, third = saved(run, states, compression="zstd", keyframe_every=8)
    assert (links_of(first), links_of(second), links_of(third)) == ([0], [1], [2])
    whole = first.handle.reader.placement.rows[0].stored_bytes
    assert third.handle.reader.placement.rows[0].stored_bytes < whole / 10
    assert sum(backend.stat(key).size_bytes for key in packs_of(third)) < 1.3 * whole
    for state, checkpoint in zip(states, (first, second, third), strict=True):
        assert same(open_registry(backend).checkpoint(checkpoint.ref).load(), state)


def test_ids_know_nothing_of_deltas(run, reg):
    states = history(3)
    plain = saved(reg.create_run("plain"), states)
    deltified = saved(run, states, keyframe_every=8)
    assert [one.digest for one in plain] == [one.digest for one in deltified]


@pytest.mark.parametrize("every", [2, 3, 8])
def test_a_chunk_is_whole_at_least_each_so_many_versions(run, reg, every):
    links = [links_of(one)[0] for one in saved(run, history(10), keyframe_every=every)]
    assert links == [0, *((number - 1) % every + 1 for number in range(1, 10))]
    # Where a difference is not small beside the chunk, the chunk itself is stored whole.
    states = [{"w": weights(7), "step": 0}]
    for step in range(1, 10):
        w = states[-1]["w"]
        for mask in (1, 2, 4, 8):
            w = nudged(w, 4 * step + mask, 0.5, mask)
        states.append({"w": w, "step": step})
    large = saved(reg.create_run("changes"), states, keyframe_every=every)
    assert [links_of(one)[0] for one in large] == [number % every for number in range(10)]


def test_one_is_no_deltas(run, tmp_path):
    assert [links_of(one) for one in saved(run, history(3), keyframe_every=1)] == [[0]] * 3
    with holdfast.init(tmp_path, keyframe_every=4, skip_race_probe=True) as reg:
        own = reg.create_run("r")
        states = history(3)
        own.save(states[0], step=0)
        assert links_of(own.save(states[1], step=1)) == [1]
        assert links_of(own.save(states[2], step=2, storing=Storing(keyframe_every=1))) == [0]
        assert links_of(own.save(history(4)[3], step=3, storing=Storing(compression="none"))) == [0]


def test_a_registry_keeps_its_own_distance(tmp_path):
    holdfast.init(tmp_path, compression="lz4", keyframe_every=2, skip_race_probe=True).close()
    with holdfast.open(tmp_path) as reg:
        first, second, third = saved(reg.create_run("r"), history(3))
        assert (links_of(first), links_of(second), links_of(third)) == ([0], [1], [2])
        names = {codecs.CODECS[row.codec] for row in second.handle.reader.placement.rows}
        assert names == {codecs.LZ4}


def test_deltas_alone_mean_zstd(run):
    _, second = saved(run, history(2), keyframe_every=2)
    assert {codecs.CODECS[row.codec] for row in second.handle.reader.placement.rows} == {
        codecs.ZSTD
    }


@pytest.mark.parametrize("wanted", [0, -1, 33, True, 2.0, "8"])
def test_a_distance_that_no_chain_may_have(run, tmp_path, backend, wanted):
    before = contents(backend)
    with pytest.raises(InvalidInput, match="not a whole number in range"):
        run.save({}, step=1, storing=Storing(keyframe_every=wanted))
    with pytest.raises(InvalidInput, match="not a whole number in range"):
        holdfast.init(tmp_path / "r", keyframe_every=wanted)
    assert contents(backend) == before
    assert not (tmp_path / "r").exists()


def test_deltas_without_compression_are_refused(run, tmp_path):
    with pytest.raises(InvalidInput, match="without compression"):
        run.save({}, step=1, storing=Storing(compression="none", keyframe_every=2))
    with pytest.raises(InvalidInput, match="without compression"):
        holdfast.init(tmp_path / "r", compression="none", keyframe_every=2)


def test_noise_is_stored_whole(run):
    fresh = np.random.default_rng(0)
    for step in range(3):
        state = {"m": {"x": fresh.integers(0, 256, 300_000, np.uint8)}}
        assert links_of(run.save(state, step=step, storing=Storing(keyframe_every=8))) == [0]


def test_what_gains_nothing_is_not_read_at_every_save(backend, open_registry):
    calls: list = []
    run = open_registry(Metered(backend, calls)).create_run("run")
    tried = []
    for step in range(9):
        calls.clear()
        run.save({"m": {"w": weights(step)}}, step=step, storing=Storing(keyframe_every=4))
        tried.append(any(call.method == "get" and "packs/" in call.key for call in calls))
    assert tried == [False, True, False, False, False, False, True, False, False]


@pytest.mark.parametrize(
    "other",
    [
        {"w": weights(rows=ROWS + 1)},
        {"w": weights().float()},
        {"v": weights()},
        {"w": weights().reshape(-1)},
    ],
)
def test_another_tensor_is_no_base(run, other):
    run.save({"model": {"w": nudged(weights(), 7)}}, step=1, storing=Storing(keyframe_every=8))
    assert links_of(run.save({"model": other}, step=2, storing=Storing(keyframe_every=8))) == [0]


def test_each_chunk_by_itself(run, backend, open_registry):
    with small_grid(4000, list_threshold=4):
        first = {"model": {"w": weights()}}
        second = {"model": {"w": weights()}}
        second["model"]["w"][300:500] = nudged(second["model"]["w"][300:500], 1)
        second["model"]["w"][900:1000] = weights(5, 100)  # nothing in common
        run.save(first, step=1, storing=Storing(keyframe_every=8))
        checkpoint = run.save(second, step=2, storing=Storing(keyframe_every=8))
        rows = checkpoint.handle.reader.placement.rows
        assert 4 < sum(row.base != NO_BASE for row in rows) < 8
        loaded = open_registry(backend).checkpoint("run")
        assert torch.equal(loaded.load()["model"]["w"], second["model"]["w"])
        assert torch.equal(loaded["model/w"][310:990:7], second["model"]["w"][310:990:7])


def test_a_base_that_is_damaged_is_not_built_on(run, backend, open_registry):
    states = history(2)
    first = run.save(states[0], step=0, storing=Storing(keyframe_every=8))
    flip(backend, packs_of(first)[0])
    second = (
        open_registry(backend).run("run").save(states[1], step=1, storing=Storing(keyframe_every=8))
    )
    assert links_of(second) == [0]
    assert same(open_registry(backend).checkpoint("run").load(), states[1])


def test_with_a_cache_a_save_reads_nothing_of_the_store(tmp_path, backend):
    calls: list = []
    with open_on(Metered(backend, calls), cache=ChunkCache(tmp_path, max_bytes=2**26)) as reg:
        run = reg.create_run("run")
        for number, state in enumerate(history(4)):
            calls.clear()
            checkpoint = run.save(state, step=number, storing=Storing(keyframe_every=8))
            assert links_of(checkpoint) == [number]
            assert not [call for call in calls if call.method == "get" and "packs/" in call.key]


def test_who_has_the_checkpoint_before_moves_only_the_difference(run, tmp_path, backend):
    states = history(3)
    saved(run, states[:2], keyframe_every=8)
    with ExitStack() as stack:

        def pulled() -> int:
            calls: list = []
            cache = ChunkCache(tmp_path, max_bytes=2**26)
            reg = stack.enter_context(open_on(Metered(backend, calls), cache=cache))
            assert reg.checkpoint("run").load()["step"] == run.latest().step
            ranges = [call.byte_range for call in calls if "packs/" in call.key]
            return sum(0 if one is None else one.stop - one.start for one in ranges)

        assert pulled() > weights().nbytes / 2
        third = run.save(states[2], step=2, storing=Storing(keyframe_every=8))
        # The difference, and its pack's table.
        assert pulled() < third.handle.reader.placement.rows[0].stored_bytes + 2**10


# Bases live as long as what is stored against them


def test_collection_keeps_what_a_delta_is_to(run, reg, backend, open_registry):
    states = history(4)
    saved(run, states, keyframe_every=8)
    run.retention.prune(Retention(last=1))
    reg.gc(grace_s=0)
    fresh = open_registry(backend)
    assert same(fresh.checkpoint("run").load(), states[3])
    assert fresh.verify(deep=True).findings == ()


def test_forks_gates_and_mirrors_carry_the_bases_along(run, reg, backend):
    states = history(5)
    saved(run, states[:3], keyframe_every=8)
    fork = reg.fork("run", "child")
    assert links_of(fork.save(states[3], step=3, storing=Storing(keyframe_every=8))) == [3]
    with open_on(new_backend("deltas-mirror")) as mirror:
        sync(reg, mirror)
        assert same(mirror.checkpoint("child").load(), states[3])
        assert mirror.verify(deep=True).findings == ()
        assert links_of(
            mirror.run("child").save(states[4], step=4, storing=Storing(keyframe_every=8))
        ) == [4]


def test_where_a_base_has_a_chunk_whole_it_is_taken_whole(run):
    first, second, third = saved(run, history(3), keyframe_every=8)
    names = [next(iter(one.manifest.direct_chunks)) for one in (first, second, third)]
    deep = [third.handle.reader.base(), second.handle.reader.base(), first.handle.reader.base()]
    below = [locations_of(deep)[name].base for name in names]
    assert below == [None, names[0], names[1]]
    pack = PackRef(ObjectKey("packs", Digest.of(b"whole"), 0), 1000)
    whole = Placement(second.digest, (pack,), Rows([ChunkRow(0, 0, 900, 1)]))
    known = PlacedState(second.handle.reader.place, second.manifest, whole, {})
    assert locations_of([*deep, known])[names[1]].base is None
    assert locations_of([known, *deep])[names[1]].base is None


def test_no_save_makes_a_chain_too_long_to_read(reg, backend, open_registry):
    """Runs that fork, go back and save the same chunks at other depths."""
    fresh = np.random.default_rng(3)
    with small_grid(500):
        tensors = [weights(rows=60)]
        runs = [reg.create_run("r0")]
        for step in range(60):
            tensors.append(nudged(tensors[fresh.integers(len(tensors))], step, 0.02))
            if step % 15 == 14:
                runs.append(reg.fork(runs[-1].id, f"r{len(runs)}"))
            mixed = tensors[-1].clone()
            mixed[:30] = tensors[fresh.integers(len(tensors))][:30]
            run = runs[fresh.integers(len(runs))]
            every = int(fresh.integers(2, MAX_DEPTH + 1))
            checkpoint = run.exchange.push(
                {"m": {"w": mixed}}, step=step, storing=Storing(keyframe_every=every)
            )
            assert max(links_of(checkpoint)) <= MAX_DEPTH
            loaded = open_registry(backend).checkpoint(checkpoint.ref).load()
            assert torch.equal(loaded["m"]["w"], mixed)


# Any state


@st.composite
def changing(draw):
    dtype = draw(st.sampled_from([np.uint8, np.int16, np.float32, np.float64]))
    size = draw(st.integers(0, 1500))
    fresh = np.random.default_rng(size)
    raw = fresh.integers(0, 100, size).astype(dtype)
    versions = []
    for _ in range(draw(st.integers(1, 5))):
        versions.append(raw.copy())
        kind = draw(st.sampled_from(["few", "all", "none", "resized"]))
        if kind == "few" and raw.size:
            raw[fresh.integers(0, raw.size, 1 + raw.size // 50)] += 1
        elif kind == "all":
            raw = fresh.integers(0, 100, raw.size).astype(dtype)
        elif kind == "resized":
            raw = raw[: raw.size // 2].copy()
    return versions


@examples(60)
@given(
    changing(),
    st.sampled_from(list(COMPRESSIONS)),
    st.integers(1, MAX_DEPTH),
    st.sampled_from([300, 700]),
    st.slices(60),
    st.booleans(),
)
def test_any_history_any_slice(versions, compression, every, chunk_bytes, part, prunes):
    every = 1 if compression == "none" else every
    with small_grid(chunk_bytes, list_threshold=4), open_on(new_backend()) as reg:
        run = reg.create_run("r")
        how = Storing(compression=compression, keyframe_every=every)
        made = [run.save({"m": {"a": a}}, step=n, storing=how) for n, a in enumerate(versions)]
        if prunes:
            run.retention.prune(Retention(last=1))
            reg.gc(grace_s=0)
            made, versions = made[-1:], versions[-1:]
        for checkpoint, array in zip(made, versions, strict=True):
            assert same(checkpoint.load(), {"m": {"a": array}})
            assert checkpoint["m/a"][part].tobytes() == array[part].tobytes()
        assert reg.verify(deep=True).findings == ()


# Nothing is believed unchecked


@pytest.fixture(params=["none", "zstd"])
def chain(run, request):
    """A checkpoint of one chunk, two differences above one that is raw or compressed."""
    first, *others = history(3)
    run.save(first, step=0, storing=Storing(compression=request.param))
    return saved(run, others, keyframe_every=8)[-1]


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.soak)])
def test_every_byte_of_every_link_matters(chain, backend, open_registry, every):
    for pack, row in zip(
        chain.handle.reader.placement.packs, chain.handle.reader.placement.rows, strict=True
    ):
        points = range(row.offset, row.offset + row.stored_bytes, 1 + row.stored_bytes // 12)
        for at in points[::every]:
            flip(backend, str(pack.key), at * 8 + 3)
            refused(backend, open_registry, "damaged", Damaged)
            assert not open_registry(backend).verify(deep=True).ok
            flip(backend, str(pack.key), at * 8 + 3)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_link_that_is_cut_or_gone(chain, backend, open_registry, which):
    key = str(chain.handle.reader.placement.packs[which].key)
    backend.put(key, backend.get(key)[:50])
    refused(backend, open_registry, "ends before|gone|too early|not a trailer|too short")
    backend.delete(key)
    refused(backend, open_registry, "gone")


def placed(reg, checkpoint, rows, packs=None) -> None:
    """Give a checkpoint another place, as anybody who can write to the store could."""
    before = checkpoint.handle.reader.placement
    after = Placement(before.manifest, packs or before.packs, Rows(rows), before.extra)
    moved = checkpoint.handle.reader.place.changed(placement=after.digest)
    reg.handle.store.backend.put(str(moved.placement_key), after.encode())
    log = RunLog(reg.handle.store, "run")
    log.open()
    log.append(lambda _: [moved])


def test_a_circle_of_differences_ends(chain, reg, backend, open_registry):
    rows = list(chain.handle.reader.placement.rows)
    last = rows[2]
    link = rows[1]
    data = backend.get(str(chain.handle.reader.placement.packs[link.pack].key))
    frame = data[link.offset : link.offset + link.stored_bytes]
    names = [*chain.manifest.direct_chunks, *chain.handle.reader.placement.extra]
    entry = reg.handle.store.table(chain.handle.reader.placement.packs[link.pack]).at(link.offset)
    forged = PackTable(
        (type(entry)(names[1], 0, len(frame), entry.raw_bytes, entry.codec, names[1],
                     Digest.of(frame)),)
    )  # fmt: skip
    body = forged.encode()
    pack = PackRef(
        ObjectKey("packs", Digest.of(body), 0), len(frame) + len(body) + len(trailer(body))
    )
    backend.put(str(pack.key), frame + body + trailer(body))
    rows[1] = ChunkRow(3, 0, len(frame), link.codec, 1)
    placed(reg, chain, [rows[0], rows[1], last], (*chain.handle.reader.placement.packs, pack))
    refused(backend, open_registry, "too long", Malformed)


def test_bases_that_are_swapped(chain, reg, backend, open_registry):
    rows = list(chain.handle.reader.placement.rows)
    swapped = ChunkRow(*[*(getattr(rows[0], n) for n in ("pack", "offset", "stored_bytes", "codec")), 2])  # noqa: E501  # fmt: skip
    placed(reg, chain, [swapped, *rows[1:]])
    refused(backend, open_registry, "different chunks", Malformed)


def test_a_raw_base_of_another_length_is_refused(run, reg, backend, open_registry):
    states = history(2)
    run.save(states[0], step=0)
    second = run.save(states[1], step=1, storing=Storing(keyframe_every=8))
    rows = list(second.handle.reader.placement.rows)
    assert codecs.CODECS[rows[1].codec] == RAW
    short = ChunkRow(rows[1].pack, rows[1].offset, rows[1].stored_bytes - 2)
    placed(reg, second, [rows[0], short])
    refused(backend, open_registry, "another length", Malformed)


def test_deltas_of_several_lengths_on_one_chunk_are_refused(run, reg, backend, open_registry):
    with small_grid(4000):
        whole = np.arange(1900, dtype=np.int32)  # two chunks, of 4,000 and 3,600 bytes
        first = run.save({"m": {"a": whole}}, step=1, storing=Storing(compression="zstd"))
        second = run.save(
            {"m": {"a": whole + 1}}, step=2, storing=Storing(compression="zstd", keyframe_every=8)
        )
        rows = second.handle.reader.placement.rows
        assert len(rows) == 4
        long, short = rows[0], rows[1]
        base = next(iter(first.manifest.direct_chunks))
        entries = [
            reg.handle.store.table(second.handle.reader.placement.packs[row.pack]).at(row.offset)
            for row in (long, short)
        ]
        forged = PackTable(tuple(entry._replace(base=base) for entry in entries))
        body = forged.encode()
        frames = b"".join(
            backend.get(str(second.handle.reader.placement.packs[r.pack].key))[r.offset :][
                : r.stored_bytes
            ]
            for r in (long, short)
        )
        pack = PackRef(
            ObjectKey("packs", Digest.of(body), 0), len(frames) + len(body) + len(trailer(body))
        )
        backend.put(str(pack.key), frames + body + trailer(body))
        number = len(second.handle.reader.placement.packs)
        moved = [
            ChunkRow(number, 0, long.stored_bytes, long.codec, long.base),
            ChunkRow(number, long.stored_bytes, short.stored_bytes, short.codec, long.base),
        ]
        placed(reg, second, [*moved, *rows[2:]], (*second.handle.reader.placement.packs, pack))
        refused(backend, open_registry, "several lengths", Malformed)


def test_a_placement_without_end_does_not_stop_the_run(chain, reg, backend, open_registry):
    rows = list(chain.handle.reader.placement.rows)
    circle = ChunkRow(rows[1].pack, rows[1].offset, rows[1].stored_bytes, rows[1].codec, 1)
    placed(reg, chain, [rows[0], circle, rows[2]])
    refused(backend, open_registry, "too long", Malformed)
    saved_now = (
        open_registry(backend)
        .run("run")
        .exchange.push(history(4)[3], step=3, storing=Storing(keyframe_every=8))
    )
    assert same(open_registry(backend).checkpoint(saved_now.ref).load(), history(4)[3])


def test_what_is_stored_does_not_depend_on_the_threads(reg):
    fresh = np.random.default_rng(0)
    mixed = np.concatenate([fresh.integers(0, 256, 2**22, np.uint8), np.zeros(3 * 2**22, np.uint8)])
    stored = set()
    for number in range(6):
        state = {"m": {"x": mixed}, "n": number}
        checkpoint = reg.create_run(f"r{number}").save(
            state, step=1, storing=Storing(compression="zstd")
        )
        stored.add(tuple(row.stored_bytes for row in checkpoint.handle.reader.placement.rows))
    assert len(stored) == 1
