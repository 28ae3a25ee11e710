"""Repacking that compresses, and that lets go of bases of deltas: fewer bytes, the same states."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast import Retention, Storing
from holdfast.backends.memory import MemoryBackend
from holdfast.backends.wrappers import Fault, Faulty, InjectedCrash, Metered
from holdfast.registry.errors import Conflict, Damaged, InvalidInput, Malformed
from holdfast.registry.face.factory import open_on
from holdfast.registry.face.registry import Registry
from holdfast.registry.objects import codecs
from holdfast.registry.objects.codecs import CODECS, LZ4, RAW, ZSTD
from holdfast.registry.objects.codecs import blosc as frames
from holdfast.registry.objects.keys import ObjectKey
from holdfast.registry.objects.pack import PackEntry, PackTable, trailer
from holdfast.registry.objects.placement import (
    MAX_DEPTH,
    NO_BASE,
    ChunkRow,
    PackRef,
    Placement,
    Rows,
)
from holdfast.registry.store.chunk_cache import ChunkCache
from holdfast.registry.upkeep.gc import collect
from holdfast.registry.upkeep.repacking import catalog
from holdfast.registry.upkeep.repacking import chunks as repack_chunks
from holdfast.registry.upkeep.repacking import execution as repack
from holdfast.registry.upkeep.repacking import packs as repack_packs
from holdfast.registry.upkeep.repacking import repack_plan as repack_plan
from holdfast.registry.upkeep.repacking.execution import RepackReport
from holdfast.registry.upkeep.repacking.recoding import plan_recoding
from holdfast.registry.upkeep.repacking.repack_plan import RepackPlan, Target
from holdfast.registry.upkeep.repacking.runs import NewPlacement
from holdfast.registry.upkeep.repacking.survey import Survey
from holdfast.registry.values.digest import Digest, Digests
from holdfast.registry.writing.placing import ChunkLocation, build_placement, locations_of
from tests.registry.upkeep.thinning import attempt, settled
from tests.support.faults import Hooked, Once, flip
from tests.support.inline import without_threads
from tests.support.loads import check_states
from tests.support.repacks import plan_repack
from tests.support.states import same
from tests.support.stores import codecs_of, contents, new_backend, small_grid
from tests.support.strategies import examples

SIZE = 6000


def weights(step: int, share: float = 0.01, size: int = SIZE) -> np.ndarray:
    """Return weights that shrink by a half, of which every step changes a share."""
    values = np.random.default_rng(7).normal(size=size).astype(np.float32)
    for n in range(1, step + 1):
        changing = np.random.default_rng(n)
        at = changing.choice(size, max(1, int(size * share)), replace=False)
        values[at] = changing.normal(size=len(at)).astype(np.float32)
    return (values.view(np.uint32) & 0xFFFF0000).view(np.float32)


def state(step: int, share: float = 0.01) -> dict:
    noise = np.frombuffer(np.random.default_rng(step).bytes(3000), np.uint8)
    return {"model": {"w": weights(step, share), "few": noise % 3}, "noise": {"x": noise}}


def save(run, *steps: int, last: int | None = None, share: float = 0.01, **options) -> None:
    for step in steps:
        run.save(state(step, share), step=step, **options)
    if last is not None:
        run.retention.prune(Retention(last=last))


def link(reg: Registry, run_id: str, below: dict[int, int], codec: str = ZSTD) -> None:
    """Place the weights of checkpoints as deltas against those of others, by step."""
    run = reg.run(run_id)
    saved = {checkpoint.step: checkpoint for checkpoint in run.checkpoints()}
    locations: dict[Digest, ChunkLocation] = {}
    for step, checkpoint in sorted(saved.items()):
        locations |= {
            d: s
            for d, s in locations_of([checkpoint.handle.reader.base()]).items()
            if d not in locations
        }
        digest = weights_of(checkpoint)
        if step in below:
            base = saved[below[step]]
            delta = memoryview(bytearray(weights(step).tobytes()))
            codecs.join(delta, checkpoint_bytes(base))
            stored = frames.encode(delta, 4, codec)
            table = PackTable(
                (
                    PackEntry(
                        digest,
                        0,
                        len(stored),
                        len(delta),
                        codec,
                        weights_of(base),
                        Digest.of(stored),
                    ),
                )
            ).encode()
            body = stored + table + trailer(table)
            pack = PackRef(ObjectKey("packs", Digest.of(table), 0), len(body))
            reg.handle.store.backend.put(str(pack.key), body)
            number = CODECS.index(codec)
            locations[digest] = ChunkLocation(pack, 0, len(stored), number, weights_of(base))
        placement = build_placement(checkpoint.manifest, {}, locations)
        place = checkpoint.handle.reader.place.changed(placement=placement.digest)
        reg.handle.store.backend.put(str(place.placement_key), placement.encode())
        run.handle.log.append(lambda _, place=place: [place])


def checkpoint_bytes(checkpoint) -> bytes:
    return checkpoint.load()["model"]["w"].tobytes()


def weights_of(checkpoint) -> Digest:
    (digest,) = checkpoint.manifest.components["model"].tensors[0].chunks
    return digest


def form(checkpoint) -> tuple[str, Digest | None]:
    """Return how the weights of a checkpoint are stored."""
    location = locations_of([checkpoint.handle.reader.base()])[weights_of(checkpoint)]
    return CODECS[location.codec], location.base


def chain(reg: Registry, run, last: int, *steps: int) -> None:
    """Save weights as a chain of deltas, and keep the newest."""
    save(run, *steps)
    link(reg, "run", {step: step - 1 for step in steps[1:]})
    with open_on(reg.handle.store.backend) as other:
        collect(other.handle.store, grace_s=0)
        other.run("run").retention.prune(Retention(last=last))


def loads(registry: Registry, share: float = 0.01) -> None:
    check_states(registry, lambda one: state(one.step, share))


def collected(backend) -> int:
    """Collect; return the bytes of all objects that are left."""
    with open_on(backend) as registry:
        collect(registry.handle.store, grace_s=0)
    kinds = ("packs/", "manifests/", "placements/")
    return sum(len(data) for key, data in contents(backend).items() if key.startswith(kinds))


def settles(backend, **options) -> None:
    """Check that another repack finds nothing to do, before a collection and after it."""
    for _ in range(2):
        before = contents(backend)
        with open_on(backend) as registry:
            assert registry.repack(**options) == RepackReport(dry_run=False)
        assert contents(backend) == before
        collected(backend)


# Compression


@pytest.mark.parametrize("compression", ["auto", "zstd", "lz4"])
def test_what_is_raw_is_compressed_and_stays_what_it_is(
    run, reg, backend, open_registry, compression
):
    save(run, 1, 2, 3)
    ids = [checkpoint.digest for checkpoint in run.checkpoints()]
    before = collected(backend)
    report = reg.repack(compression=compression)
    assert report.recoded == 6
    assert report.recoded_after < 0.9 * report.recoded_before
    fresh = open_registry(backend)
    loads(fresh)
    assert [checkpoint.digest for checkpoint in fresh.run("run").checkpoints()] == ids
    assert codecs_of(fresh.run("run").latest()) == {
        RAW,
        codecs.stored_as(codecs.COMPRESSIONS[compression]),
    }
    saved = report.recoded_before - report.recoded_after
    assert collected(backend) < before - saved
    loads(open_registry(backend))
    settles(backend, compression=compression)
    settles(backend)


@pytest.mark.parametrize("compression", ["auto", "zstd"])
def test_it_is_what_a_save_would_have_stored(run, reg, backend, open_registry, compression):
    floats = np.random.default_rng(1).normal(size=9000).astype(np.float32)
    value = state(1) | {"floats": {"f": floats}}  # of which `auto` keeps planes apart
    run.save(value, step=1)
    saved = open_registry(new_backend(f"saved-{compression}")).create_run("run")
    saved = saved.save(value, step=1, storing=Storing(compression=compression))
    reg.repack(compression=compression)
    repacked = open_registry(backend).run("run").latest()
    by_digest = {
        d: (s.codec, s.stored_bytes) for d, s in locations_of([saved.handle.reader.base()]).items()
    }
    found = {
        d: (s.codec, s.stored_bytes)
        for d, s in locations_of([repacked.handle.reader.base()]).items()
    }
    assert found == by_digest


def test_without_being_asked_nothing_is_compressed(run, reg, open_registry, backend):
    save(run, 1, 2, 3, last=2)
    assert reg.repack().recoded == 0
    assert codecs_of(open_registry(backend).run("run").latest()) == {RAW}


def test_a_dry_run_tells_exactly_what_would_be_saved(run, reg, backend):
    save(run, 1, 2, 3, last=2)
    before = contents(backend)
    planned = reg.repack(compression="zstd", dry_run=True)
    assert contents(backend) == before
    report = reg.repack(compression="zstd")
    assert report.recoded
    assert {one.reason for one in report.rewritten} == {"recoded", "small"}
    assert planned == replace(report, dry_run=True)


def test_what_is_compressed_stays_unless_another_codec_is_asked_for(
    run, reg, backend, open_registry
):
    save(run, 1, 2, storing=Storing(compression="lz4"))
    save(run, 3)
    reg.repack(compression="lz4")
    old, new = open_registry(backend).run("run").checkpoints()[1:]
    assert form(old) == form(new) == (LZ4, None)
    assert open_registry(backend).repack(compression="zstd").recoded == 6
    assert {form(ck) for ck in open_registry(backend).run("run").checkpoints()} == {(ZSTD, None)}
    loads(open_registry(backend))
    settles(backend, compression="zstd")


def test_none_stores_everything_raw_again(reg, run, backend, open_registry):
    chain(reg, run, 2, 1, 2, 3)
    open_registry(backend).repack(compression="zstd")
    report = open_registry(backend).repack(compression="none")
    assert report.recoded_after > report.recoded_before
    for checkpoint in open_registry(backend).run("run").checkpoints():
        assert codecs_of(checkpoint) == {RAW}
        assert not checkpoint.handle.reader.placement.extra
    loads(open_registry(backend))
    settles(backend, compression="none")


def test_chunks_of_digest_lists_are_compressed_and_lists_are_not(run, reg, backend, open_registry):
    with small_grid(2048, list_threshold=8):
        save(run, 1, 2)
        reg.repack(compression="zstd")
        fresh = open_registry(backend)
        loads(fresh)
        checkpoint = fresh.run("run").latest()
        locations = locations_of([checkpoint.handle.reader.base()])
        assert checkpoint.manifest.chunk_lists
        assert {locations[digest].codec for digest in checkpoint.manifest.chunk_lists} == {0}
        assert codecs_of(checkpoint) == {RAW, ZSTD}
        settles(backend, compression="zstd")


def test_a_tensor_is_given_up_after_its_first_chunk(run, reg, backend, open_registry, monkeypatch):
    with small_grid(512 * 1024):
        noise = np.random.default_rng(0).integers(0, 256, 3 * 2**20, np.uint8)
        run.save({"noise": noise}, step=1)
        tried = []
        encode = codecs.encode
        monkeypatch.setattr(
            codecs, "encode", lambda data, *more: tried.append(len(data)) or encode(data, *more)
        )
        read: list = []
        metered = open_registry(Metered(backend, read))
        assert not metered.repack(compression="zstd").recoded
        assert tried == [128 * 1024]
        assert sum(call.key.startswith("packs/") for call in read) <= 3  # two tables and a chunk


def test_tiny_chunks_are_left_alone(run, reg, backend):
    """What a longer line in the table costs is more than they would shrink by."""
    for n in range(5):
        tiny = np.frombuffer(np.random.default_rng(n).bytes(200), np.uint8) % 16
        run.save({"t": {"a": tiny}}, step=n)
        assert len(codecs.encode(tiny, 1, ZSTD)) < 0.95 * 200
    reg.repack()
    settles(backend, compression="zstd")


def test_several_runs_share_what_is_compressed(run, reg, backend, open_registry):
    save(run, 1, 2)
    reg.fork(run.latest(), "fork")
    report = reg.repack(compression="zstd")
    assert set(report.runs) == {"run", "fork"}
    fresh = open_registry(backend)
    run_packs, fork_packs = (
        {pack.key for pack in fresh.run(name).latest().handle.reader.placement.packs}
        for name in ("run", "fork")
    )
    assert run_packs & fork_packs
    assert form(fresh.run("fork").latest()) == (ZSTD, None)
    collected(backend)
    loads(open_registry(backend))


def test_of_some_runs_only_what_no_other_pack_holds(run, reg, backend, open_registry):
    save(run, 1)
    other = reg.create_run("other")
    mixed = state(1)["model"] | {"z": weights(9)}
    other.save({"m": mixed}, step=1)
    report = reg.repack(["other"], compression="zstd")
    assert report.freed_bytes == sum(one.size_bytes for one in report.rewritten) > 0
    fresh = open_registry(backend)
    assert fresh.verify(deep=True).findings == ()
    assert codecs_of(fresh.run("run").latest()) == {RAW}
    locations = locations_of([fresh.run("other").latest().handle.reader.base()])
    assert sorted(CODECS[location.codec] for location in locations.values()) == [ZSTD, RAW, RAW]
    assert same(fresh.run("other").latest().load(), {"m": mixed})


def test_a_damaged_chunk_is_not_compressed(run, reg, backend):
    save(run, 1)
    (key,) = [k for k in contents(backend) if k.startswith("packs/")][:1]
    flip(backend, key, 50)
    before = contents(backend)
    with pytest.raises(Damaged, match=key):
        reg.repack(compression="zstd")
    assert contents(backend) == before


@pytest.mark.parametrize(
    "wrong", [{"compression": "gzip"}, {"compression": ""}, {"keyframe_every": 0}]
)
def test_options_that_are_none_are_refused(reg, wrong):
    with pytest.raises(InvalidInput):
        reg.repack(**wrong)


def test_the_chunk_cache_is_left_out_of_it(run, reg, backend, tmp_path):
    save(run, 1, 2)
    with open_on(backend) as cached:
        cached.handle.store.cache = ChunkCache(tmp_path / "cache", max_bytes=2**20)
        assert cached.repack(compression="zstd").recoded
        cached.verify(deep=True)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_what_is_encoded_to_other_bytes_than_planned_is_not_written(run, reg, backend, monkeypatch):
    save(run, 1)
    plan = plan_repack(reg.handle.store, codec=ZSTD)
    encode = codecs.encode
    monkeypatch.setattr(codecs, "encode", lambda *all_: encode(*all_)[:-1] + b"?")
    with pytest.raises(Damaged, match="other bytes than a moment ago"):
        repack_packs.make_body(reg.handle.store, plan.new[0])


def test_what_is_encoded_together_is_bounded(reg, monkeypatch):
    monkeypatch.setattr(repack_chunks, "_BATCH_BYTES", 100)
    pack = PackRef(ObjectKey("packs", Digest.of(b""), 0), 10**6)
    names = [Digest.of(b"%d" % n) for n in range(10)]
    stored = {name: (pack, PackEntry(name, 40 * n, 40, 40)) for n, name in enumerate(names)}
    batches = list(repack_chunks.RawChunks(reg.handle.store, stored).batches(names))
    assert [len(batch) for batch in batches] == [2] * 5
    assert [name for batch in batches for name in batch] == names


# Bases that nothing names


def test_bases_that_nothing_names_go(reg, run, backend, open_registry):
    chain(reg, run, 1, 1, 2, 3, 4, 5)
    (kept,) = open_registry(backend).run("run").checkpoints()
    assert len(kept.handle.reader.placement.extra) == 4
    before = collected(backend)
    report = open_registry(backend).repack()
    assert (report.recoded, report.bases) == (1, 4)
    fresh = open_registry(backend)
    (kept,) = fresh.run("run").checkpoints()
    assert form(kept) == (ZSTD, None)
    assert not kept.handle.reader.placement.extra
    loads(fresh)
    assert collected(backend) < before - report.bases_bytes + report.recoded_after
    loads(open_registry(backend))
    settles(backend)


def test_deltas_on_what_states_name_stay(reg, run, backend, open_registry):
    chain(reg, run, 3, 1, 2, 3)
    assert not open_registry(backend).repack().recoded
    newest = open_registry(backend).run("run").latest()
    assert form(newest)[1] == weights_of(open_registry(backend).run("run").checkpoints()[1])


def test_a_chain_without_its_middle_is_joined_to_the_nearest_that_is_named(
    reg, run, backend, open_registry
):
    save(run, 1, 2, 3, 4, 5)
    link(reg, "run", {2: 1, 3: 2, 4: 3, 5: 4})
    open_registry(backend).run("run").retention.prune(Retention(every=4, last=1))
    kept = open_registry(backend).run("run").checkpoints()
    assert [checkpoint.step for checkpoint in kept] == [4, 5] or len(kept) >= 2
    open_registry(backend).repack()
    fresh = open_registry(backend)
    loads(fresh)
    first, *others = fresh.run("run").checkpoints()
    assert form(first) == (ZSTD, None)
    assert all(form(one)[1] is not None for one in others)
    settles(backend)


@pytest.mark.parametrize("small", [2**24, 0])  # the beginning comes into the batch, in any case
def test_the_middle_of_a_chain_goes_and_the_end_stands_on_the_beginning(
    reg, run, backend, open_registry, small, monkeypatch
):
    monkeypatch.setattr(repack_plan, "SMALL_BYTES", small)
    save(run, 1, 2, 3, 4)
    link(reg, "run", {2: 1, 3: 2, 4: 3})
    reg.run("run").pins.tags.set("first", run.checkpoints()[0])
    opened = open_registry(backend).run("run")
    opened.retention.prune(Retention(last=1))
    first, last = open_registry(backend).run("run").checkpoints()
    assert (first.step, last.step) == (1, 4)
    report = open_registry(backend).repack()
    assert (report.recoded, report.bases) == (1, 2)
    first, last = open_registry(backend).run("run").checkpoints()
    assert form(last) == (ZSTD, weights_of(first))
    assert not last.handle.reader.placement.extra or list(last.handle.reader.placement.extra) == [
        weights_of(first)
    ]
    collected(backend)
    loads(open_registry(backend))
    settles(backend)


def test_a_base_of_many_is_kept_while_it_saves_more_than_it_costs(reg, run, backend, open_registry):
    """Each delta against it is shorter than one against another of them."""
    steps = range(1, 9)
    for step in steps:
        run.save({"model": {"w": spread(step)}}, step=step, storing=Storing(compression="zstd"))
    stars(reg, run, spread)
    before = collected(backend)
    fresh = open_registry(backend)
    fresh.run("run").retention.prune(Retention(last=7))
    assert not open_registry(backend).repack().recoded
    # One alone costs more with its base than without.
    open_registry(backend).run("run").retention.prune(Retention(last=1))
    assert open_registry(backend).repack().recoded == 1
    assert collected(backend) < before
    (kept,) = open_registry(backend).run("run").checkpoints()
    assert same(kept.load(), {"model": {"w": spread(8)}})
    settles(backend)


def spread(step: int) -> np.ndarray:
    """Return weights that differ from the first ones in a part of their own."""
    values = weights(0)
    if step > 1:
        values[600 * (step - 2) : 600 * (step - 1)] = weights(50, 1.0, 600)
    return values


def stars(reg: Registry, run, make) -> None:
    """Place every other state as a delta against the first."""
    saved = run.checkpoints()
    first = locations_of([saved[0].handle.reader.base()])
    (root,) = first
    for checkpoint in saved[1:]:
        (digest,) = checkpoint.manifest.direct_chunks
        delta = memoryview(bytearray(make(checkpoint.step).tobytes()))
        codecs.join(delta, make(saved[0].step).tobytes())
        stored = frames.encode(delta, 4, ZSTD)
        entry = PackEntry(digest, 0, len(stored), len(delta), ZSTD, root, Digest.of(stored))
        table = PackTable((entry,)).encode()
        body = stored + table + trailer(table)
        pack = PackRef(ObjectKey("packs", Digest.of(table), 0), len(body))
        reg.handle.store.backend.put(str(pack.key), body)
        locations = first | {digest: ChunkLocation(pack, 0, len(stored), CODECS.index(ZSTD), root)}
        placement = build_placement(checkpoint.manifest, {}, locations)
        place = checkpoint.handle.reader.place.changed(placement=placement.digest)
        reg.handle.store.backend.put(str(place.placement_key), placement.encode())
        run.handle.log.append(lambda _, place=place: [place])


def test_a_chunk_in_two_encodings_has_one_in_the_end(reg, run, backend, open_registry):
    save(run, 1, 2)
    other = reg.create_run("other")
    other.save(state(2), step=2, storing=Storing(compression="zstd"))
    link(reg, "run", {2: 1})
    before = collected(backend)
    open_registry(backend).repack()
    fresh = open_registry(backend)
    assert form(fresh.run("run").latest()) == form(fresh.run("other").latest()) == (ZSTD, None)
    assert collected(backend) < before
    loads(open_registry(backend))
    settles(backend)


def test_what_is_only_kept_elsewhere_is_not_called_recoded(reg, run, backend):
    save(run, 1, 2)
    reg.create_run("other").save(state(2), step=2, storing=Storing(compression="zstd"))
    link(reg, "run", {2: 1})
    with open_on(backend) as other:
        plain, asked = other.repack(dry_run=True), other.repack(dry_run=True, compression="lz4")
    assert (plain.recoded, plain.bases) == (0, 0)
    assert "dead" in {one.reason for one in plain.rewritten}
    assert "recoded" not in {one.reason for one in plain.rewritten}
    assert "recoded" in {one.reason for one in asked.rewritten}


def hostile(backend, run, *entries: tuple[bytes | None, int, bytes | None]) -> None:
    """Place the weights of the newest checkpoint in a pack whose table says what is given.

    Each is a chunk: its name (`None`: the one that it is), its length as the table has it, and its
    base. The first is named by the state, the others are bases of deltas.
    """
    checkpoint = run.latest()
    own = weights_of(checkpoint)
    digests = [own if name is None else Digest.of(name) for name, *_ in entries]
    stored = frames.encode(np.zeros_like(weights(1)), 4, ZSTD)  # shorter than any length given
    lines, rows = [], []
    for number, (_, length, base) in enumerate(entries):
        below = None if base is None else Digest.of(base)
        at, size = number * len(stored), len(stored)
        digest = digests[number]
        lines.append(PackEntry(digest, at, size, length, ZSTD, below, Digest.of(stored)))
        under = NO_BASE if below is None else digests.index(below)
        rows.append(ChunkRow(0, at, size, CODECS.index(ZSTD), under))
    table = PackTable(tuple(lines)).encode()
    body = stored * len(lines) + table + trailer(table)
    pack = PackRef(ObjectKey("packs", Digest.of(table), 0), len(body))
    backend.put(str(pack.key), body)
    before = checkpoint.handle.reader.placement
    placement = Placement(before.manifest, (pack,), Rows(rows), Digests(digests[1:]))
    place = checkpoint.handle.reader.place.changed(placement=placement.digest)
    backend.put(str(place.placement_key), placement.encode())
    run.handle.log.append(lambda _: [place])


@pytest.mark.parametrize("length", [3000, 2**42])
@pytest.mark.parametrize("compression", ["none", "lz4"])
@pytest.mark.parametrize("dry_run", [False, True])
def test_a_length_that_no_manifest_has_stops_it(run, backend, length, compression, dry_run):
    save(run, 1)
    hostile(backend, run, (None, length, None))
    before = contents(backend)
    with open_on(backend) as other, pytest.raises(Malformed, match="as its manifest has it"):
        other.repack(compression=compression, dry_run=dry_run)
    assert contents(backend) == before


@pytest.mark.parametrize("dry_run", [False, True])
def test_a_chunk_of_no_manifest_stops_it(run, backend, dry_run):
    save(run, 1)
    hostile(backend, run, (b"another", 2**42, None))
    with open_on(backend) as other, pytest.raises(Malformed, match="that no manifest has"):
        other.repack(compression="none", dry_run=dry_run)


@pytest.mark.parametrize("length", [3000, 2**42])
@pytest.mark.parametrize("options", [{}, {"compression": "lz4"}, {"keyframe_every": 1}])
@pytest.mark.parametrize("dry_run", [False, True])
def test_a_base_of_another_length_than_its_delta_stops_it(run, backend, length, options, dry_run):
    save(run, 1)
    whole = weights(1).nbytes
    hostile(backend, run, (None, whole, b"base"), (b"base", length, None))
    before = contents(backend)
    with open_on(backend) as other, pytest.raises(Malformed, match="as its base has"):
        other.repack(dry_run=dry_run, **options)
    assert contents(backend) == before


@pytest.mark.parametrize(("links", "ends"), [(MAX_DEPTH, True), (MAX_DEPTH + 1, False)])
def test_no_longer_chain_is_followed_than_a_reader_would(links, ends):
    names = [Digest.of(b"%d" % number) for number in range(links + 1)]
    bases = [None, *names]
    entries = [
        PackEntry(name, 9 * n, 9, 100, ZSTD, base, Digest.of(b"stored"))
        for n, (name, base) in enumerate(zip(names, bases, strict=False))
    ]
    survey = Survey(is_recoded=True)
    key = ObjectKey("packs", Digest.of(b"pack"), 0)
    survey.packs[key] = PackRef(key, 9999)
    survey.within.add(key)
    survey.tables[key] = {entry.offset: entry for entry in entries}
    survey.ranks[key] = {entry.offset: rank for rank, entry in enumerate(entries)}
    survey.own[key] = dict.fromkeys(survey.ranks[key], 1)
    if ends:
        assert plan_recoding(None, survey).replacements == {}
        return
    with pytest.raises(Malformed, match="too long"):
        plan_recoding(None, survey)


def test_a_base_that_only_a_later_run_named_comes_to_the_earlier_one(
    reg, run, backend, open_registry
):
    """Of two chains under a chunk the shorter one is kept; now both runs name what it is on."""
    other = reg.create_run("z-other")
    chain(reg, run, 1, 1, 2, 3)
    save(other, 0, 3)
    link(reg, "z-other", {3: 0})
    zeroth = open_registry(backend).run("z-other").checkpoints()[0]
    open_registry(backend).repack()
    (third,) = open_registry(backend).run("run").checkpoints()
    assert list(third.handle.reader.placement.extra) == [weights_of(zeroth)]
    loads(open_registry(backend))
    settles(backend)


def test_a_damaged_base_stops_it(reg, run, backend, open_registry):
    chain(reg, run, 1, 1, 2, 3)
    (kept,) = open_registry(backend).run("run").checkpoints()
    locations = locations_of([kept.handle.reader.base()])
    bottom = next(
        locations[d] for d in kept.handle.reader.placement.extra if locations[d].base is None
    )
    flip(backend, str(bottom.pack.key), 8 * bottom.offset + 99)
    before = contents(backend)
    with pytest.raises(Damaged, match="damaged chunk"):
        open_registry(backend).repack()
    assert contents(backend) == before


# Chains


@pytest.mark.parametrize(("every", "longest"), [(1, 0), (2, 1), (3, 2), (8, 5)])
def test_chains_are_cut_where_that_is_asked_for(reg, run, backend, open_registry, every, longest):
    chain(reg, run, 6, 1, 2, 3, 4, 5, 6)
    open_registry(backend).repack(keyframe_every=every)
    fresh = open_registry(backend)
    loads(fresh)
    links: dict[Digest, int] = {}
    for checkpoint in fresh.run("run").checkpoints():
        base = form(checkpoint)[1]
        links[weights_of(checkpoint)] = 0 if base is None else links[base] + 1
    assert max(links.values()) == longest
    assert list(links.values()).count(0) == -(-6 // every)
    collected(backend)
    loads(open_registry(backend))
    settles(backend, keyframe_every=every)


def test_a_delta_takes_on_another_codec_and_keeps_its_base(reg, run, backend, open_registry):
    chain(reg, run, 3, 1, 2, 3)
    open_registry(backend).repack(compression="lz4")
    first, *others = open_registry(backend).run("run").checkpoints()
    assert form(first) == (LZ4, None)
    assert {form(one)[0] for one in others} == {LZ4}
    assert all(form(one)[1] for one in others)
    loads(open_registry(backend))
    settles(backend, compression="lz4")


# Any history


@st.composite
def histories(draw) -> tuple[dict[int, int], set[int], str | None]:
    """Draw which of seven states is a delta on which, which are kept, and what is asked for."""
    below = {step: draw(st.integers(1, step - 1)) for step in range(2, 8) if draw(st.booleans())}
    kept = draw(st.sets(st.integers(1, 7), min_size=1))
    return below, kept, draw(st.sampled_from([None, None, "zstd", "lz4"]))


@given(histories())
@examples(15)
def test_no_history_gets_larger_and_every_one_settles(drawn):
    below, kept, compression = drawn
    backend = new_backend()
    with without_threads(open_on(backend)) as registry:
        run = registry.create_run("run", seed=1)
        save(run, *range(1, 8), storing=Storing(compression="none"))
        link(registry, "run", below)
    with without_threads(open_on(backend)) as registry:
        run = registry.run("run")
        for checkpoint in run.checkpoints():
            if checkpoint.step in kept:
                run.pins.tags.set(f"kept-{checkpoint.step}", checkpoint)
        run.save(state(8), step=8)
        run.retention.prune(Retention(last=1))
    before = collected(backend)
    with open_on(backend) as registry:
        registry.repack()  # small packs are put together, whatever else is done
        registry.repack(compression=compression)
    after = collected(backend)
    assert after <= before
    with open_on(backend) as registry:
        assert {ck.step for ck in registry.run("run").checkpoints()} == kept | {8}
        loads(registry)
    settles(backend, compression=compression)


# Others meanwhile


@pytest.fixture
def mixed(reg, run, backend) -> MemoryBackend:
    """A run with raw chunks and a chain whose middle was evicted, and a fork of it."""
    save(run, 1, 2, 3, 4)
    link(reg, "run", {2: 1, 3: 2, 4: 3})
    with open_on(backend) as other:
        opened = other.run("run")
        other.fork(opened.latest(), "fork")
        opened.save(state(5), step=5)
        opened.retention.prune(Retention(last=2))
    return backend


def test_a_collection_between_every_two_writes(mixed, open_registry):
    """Each time all that nobody names yet goes; then nobody collects, and it gets through."""
    hooked = Hooked(mixed)
    left = [8]

    def collects(method: str, key: str) -> None:
        if method in ("put", "put_if_absent") and left[0]:
            left[0] -= 1
            collected(mixed)

    hooked.before = hooked.after = collects
    try:
        open_registry(hooked).repack(compression="zstd")
    except Conflict:
        assert not left[0]
    loads(open_registry(mixed))
    left[0] = 0
    open_registry(mixed).repack(compression="zstd")
    collected(mixed)
    loads(open_registry(mixed))
    settles(mixed, compression="zstd")


@pytest.mark.parametrize("at", ["manifests/", "placements/", "packs/", ""])
def test_a_reader_that_holds_the_old_placement(mixed, open_registry, at):
    hooked = Hooked(mixed)
    checkpoint = open_registry(hooked).run("run").latest()

    def move() -> None:
        with open_on(mixed) as other:
            assert other.repack(compression="zstd").recoded
        collected(mixed)

    if at:
        hooked.before = Once(at, move, "get")
    else:
        assert same(checkpoint.load(), state(checkpoint.step))
        move()
    assert same(checkpoint.load(), state(checkpoint.step))
    assert not at or hooked.before.done


@pytest.mark.parametrize("prefix", ["packs/", "placements/", "runs/run/log/"])
@pytest.mark.parametrize("method", ["get", "put_if_absent"])
def test_a_run_that_lets_go_meanwhile(mixed, open_registry, prefix, method):
    hooked = Hooked(mixed)

    def evict() -> None:
        with open_on(mixed) as other:
            other.run("run").retention.prune(Retention(last=1))
        collected(mixed)

    hooked.before = Once(prefix, evict, method)
    open_registry(hooked).repack(compression="zstd")
    assert hooked.before.done
    loads(open_registry(mixed))
    collected(mixed)
    loads(open_registry(mixed))


def saves_on_it(other):
    """The base of its delta moves to another encoding before the next slot."""
    other.run("run").save(state(6), step=6)
    link(other, "run", {6: 5})


def undoes(other):
    assert other.run("run").retention.undo()


def asks_for_something_else(other):
    other.repack(compression="lz4")


@pytest.mark.parametrize("act", [saves_on_it, undoes, asks_for_something_else])
def test_what_another_does_before_the_slot_is_put(mixed, open_registry, act):
    hooked = Hooked(mixed)

    def meanwhile() -> None:
        with open_on(mixed) as other:
            act(other)

    hooked.before = Once("runs/run/log/", meanwhile, "put_if_absent")
    open_registry(hooked).repack(compression="zstd")
    assert hooked.before.done
    loads(open_registry(mixed))
    collected(mixed)
    loads(open_registry(mixed))
    open_registry(mixed).repack(compression="zstd")
    collected(mixed)
    loads(open_registry(mixed))
    settles(mixed, compression="zstd")


def overtaken(backend, at: str, monkeypatch: pytest.MonkeyPatch) -> list[RepackReport]:
    """Repack with zstd; another with lz4 comes in after the plan, or before a slot is put."""
    reports: list[RepackReport] = []
    hooked = Hooked(backend)

    def other() -> None:
        with open_on(backend) as second:
            reports.append(second.repack(compression="lz4"))

    def planned(*args, **options) -> list[RepackPlan]:
        monkeypatch.undo()
        plans = list(repack_plan.plan_repack(*args, **options))
        other()
        return plans

    if at == "plan":
        monkeypatch.setattr(repack, "plan_repack", planned)
    else:
        hooked.before = Once(at, other, "put_if_absent")
    with open_on(hooked) as first:
        reports.append(first.repack(compression="zstd"))
    return reports


@pytest.mark.parametrize("at", ["plan", "packs/", "placements/", "runs/run/log/"])
def test_who_is_overtaken_tells_that_nothing_came_of_it(
    run, backend, open_registry, monkeypatch, at
):
    save(run, 1, 2, 3)
    before = set(contents(backend))
    winner, loser = overtaken(backend, at, monkeypatch)
    after = contents(backend)
    assert (winner.checkpoints, winner.placed_meanwhile, winner.packs_in_vain) == (3, 0, 0)
    assert winner.freed_bytes == sum(len(after[k]) for k in before if k.startswith("packs/"))
    assert (loser.checkpoints, loser.runs, loser.placed_meanwhile) == (0, (), 3)
    assert (loser.recoded, loser.recoded_before, loser.recoded_after) == (0, 0, 0)
    assert loser.freed_bytes == 0  # the other one's
    assert loser.packs_read == winner.packs_read  # what it looked at, it did look at
    named = {str(p.key) for c in open_registry(backend).run("run").checkpoints() for p in packs(c)}
    vain = {k for k in after.keys() - before - named if k.startswith("packs/")}
    assert loser.packs_in_vain == loser.packs_written == len(vain) == (at != "plan")
    assert loser.in_vain_bytes == sum(len(after[key]) for key in vain)
    collected(backend)
    loads(open_registry(backend))
    again = open_registry(backend).repack(compression="zstd")
    assert (again.checkpoints, again.placed_meanwhile, again.packs_in_vain) == (3, 0, 0)
    assert {form(c)[0] for c in open_registry(backend).run("run").checkpoints()} == {ZSTD}


def packs(checkpoint) -> tuple[PackRef, ...]:
    return checkpoint.handle.reader.placement.packs


def test_bases_in_packs_that_somebody_else_freed_are_not_told(mixed, monkeypatch):
    winner, loser = overtaken(mixed, "plan", monkeypatch)
    assert winner.bases
    assert (loser.checkpoints, loser.bases, loser.bases_bytes) == (0, 0, 0)


@pytest.mark.parametrize("at", ["run", "fork"])
def test_of_two_that_share_the_work_each_old_pack_is_freed_by_one(
    run, reg, backend, monkeypatch, at
):
    """The other one comes in before the first run's slot, or between the two."""
    save(run, 1, 2, 3)
    reg.fork(run.latest(), "fork")
    with open_on(backend) as other:
        order = list(plan_repack(other.handle.store, codec=LZ4).places)
    assert order == ["run", "fork"]
    winner, loser = overtaken(backend, f"runs/{at}/log/", monkeypatch)
    assert loser.runs == (() if at == "run" else ("run",))
    assert loser.checkpoints == (0 if at == "run" else 3)
    assert loser.placed_meanwhile == (4 if at == "run" else 1)
    # In the end nobody needs what either has read. Where both had, the last one to leave a pack
    # has freed it: the other one, which came upon it while the fork was there yet.
    theirs = {one.pack for one in winner.rewritten}
    assert winner.freed_bytes == sum(one.size_bytes for one in winner.rewritten)
    alone = [one.size_bytes for one in loser.rewritten if one.pack not in theirs]
    assert loser.freed_bytes == sum(alone)
    assert len(alone) < len(loser.rewritten)
    assert bool(alone) == (at == "fork")


def test_what_is_placed_meanwhile_and_let_go_then_is_nobodys_loss(run, backend, open_registry):
    save(run, 1, 2, 3)
    hooked = Hooked(backend)

    def other() -> None:
        with open_on(backend) as second:
            second.repack(compression="lz4")
            second.run("run").retention.prune(Retention(last=1))

    hooked.before = Once("runs/run/log/", other, "put_if_absent")
    report = open_registry(hooked).repack(compression="zstd")
    assert hooked.before.done
    assert (report.checkpoints, report.placed_meanwhile, report.packs_in_vain) == (0, 1, 1)


_MOVES = {
    "repacked": ({}, False),
    "collected": ({}, True),
    "lz4": ({"compression": "lz4"}, True),
    "none": ({"compression": "none"}, True),
}


@pytest.mark.parametrize(
    ("at", "options", "collects"),
    [
        pytest.param(
            at, *move, id=f"{at}-{name}", marks=pytest.mark.soak if (row + column) % 2 else ()
        )
        for row, at in enumerate(["packs/", "placements/", "runs/run/log/"])
        for column, (name, move) in enumerate(_MOVES.items())
    ],
)
def test_a_trainer_that_saves_deltas_goes_on(backend, open_registry, at, collects, options):
    """The base of its next state moves during the save."""
    hooked = Hooked(backend)
    with open_on(backend) as other:
        other.create_run("run", seed=1)
    trainer = open_registry(hooked).run("run")
    how = {"storing": Storing(compression="zstd", keyframe_every=8)}
    save(trainer, 1, 2, 3, last=1, **how)
    assert form(trainer.latest())[1] is not None

    def move() -> None:
        with open_on(backend) as other:
            assert other.repack(**options).checkpoints
        if collects:
            collected(backend)

    hooked.before = Once(at, move, "put_if_absent")
    save(trainer, 4, **how)
    assert hooked.before.done
    save(trainer, 5, 6, last=2, **how)
    loads(open_registry(backend))
    collected(backend)
    loads(open_registry(backend))
    with open_on(backend) as other:
        other.repack()
    collected(backend)
    loads(open_registry(backend))
    settles(backend)


def test_a_base_of_deltas_in_another_batch_stays(mixed, open_registry, monkeypatch):
    surveys: list[Survey] = []
    survey = catalog.Catalog.survey
    monkeypatch.setattr(catalog, "BATCH_CHUNKS", 2)
    monkeypatch.setattr(
        catalog.Catalog, "survey", lambda *args: surveys.append(survey(*args)) or surveys[-1]
    )
    report = open_registry(mixed).repack()
    assert (report.bases, report.recoded) == (0, 0)
    tables = [[e for one in made.tables.values() for e in one.values()] for made in surveys]
    found = set()
    for made in surveys:
        loose = {
            table[offset].digest
            for key, table in made.tables.items()
            for offset in made.ranks[key].keys() - made.own[key].keys()
        }
        elsewhere = (one for one, other in zip(tables, surveys, strict=True) if other is not made)
        needed = loose & {entry.base for entries in elsewhere for entry in entries}
        assert needed <= made.fixed
        found |= needed
    assert found
    loads(open_registry(mixed))


@pytest.mark.parametrize(
    ("base", "sound"), [(b"a", False), (b"b", True), (b"nowhere", False), (None, True)]
)
def test_a_state_that_would_never_end_is_left_alone(base, sound):
    """The state has a delta against the chunk that this plan makes a delta against it."""
    x, a, b = (Digest.of(name) for name in (b"x", b"a", b"b"))
    stored = Digest.of(b"stored")
    going, staying = (PackRef(ObjectKey("packs", Digest.of(n), 0), 999) for n in (b"1", b"2"))
    of = None if base is None else Digest.of(base)
    codec, digest = (RAW, None) if of is None else (ZSTD, stored)
    entry = PackEntry(x, 0, 100 if of is None else 50, 100, codec, of, digest)
    target = Target(PackTable((entry,)), (None,))
    on_x = PackEntry(a, 0, 50, 100, ZSTD, x, stored)
    alone = PackEntry(b, 50, 100, 100)
    plan = RepackPlan(
        rewritten={},
        new=(target,),
        moves={going.key: {0: (target, entry)}},
        places={},
        locations={b: (Target(PackTable((alone,)), (None,)), alone)},
        tables={going.key: {0: PackEntry(x, 0, 100, 100)}},
        bases={},
        moved={},
    )
    before = Placement(a, (going, staying), Rows([ChunkRow(0, 0, 100), ChunkRow(1, 0, 50, 1, 0)]))
    new = NewPlacement(before, plan, lambda pack: PackTable((on_x,)))
    assert new.is_sound == sound


def test_what_is_left_alone_keeps_its_packs(mixed, open_registry, monkeypatch):
    monkeypatch.setattr(NewPlacement, "is_sound", False)
    with open_on(mixed) as other:
        places = other.run("run").manifest.places
    report = open_registry(mixed).repack(compression="zstd")
    assert (report.checkpoints, report.freed_bytes, report.packs_written) == (0, 0, 0)
    assert open_registry(mixed).run("run").manifest.places == places
    collected(mixed)
    loads(open_registry(mixed))


# Crashes


def test_a_crash_at_any_write_costs_nothing(mixed):
    backend = mixed.copy()
    points = attempt(Faulty(backend), compression="zstd")
    clean = settled(backend, loads, compression="zstd")
    for at in points:
        for after in (False, True):
            backend = mixed.copy()
            with pytest.raises(InjectedCrash):
                attempt(Faulty(backend, [Fault(at, after=after)]))
            with without_threads(open_on(backend)) as registry:
                loads(registry)
            assert settled(backend, loads, compression="zstd") == clean
    assert len(points) >= 6  # two packs, three placements, two slots; one of them shared


def test_one_that_broke_off_between_runs_is_finished(run, reg, backend, open_registry):
    """One run has deltas on another base then, which the other one's states do not name as yet."""
    other = reg.create_run("other")
    for one, name in ((run, "run"), (other, "other")):
        for step in (1, 2, 3):
            one.save({"model": {"w": spread(step)}}, step=step)
        stars(reg, one, spread)
        open_registry(backend).run(name).retention.prune(Retention(last=2))
    hooked = Hooked(backend)

    def dies() -> None:
        raise InjectedCrash

    hooked.before = Once("runs/other/log/", dies, "put_if_absent")
    with pytest.raises(InjectedCrash):
        without_threads(open_on(Faulty(hooked))).repack()
    collected(backend)
    # One run has the shorter delta of the newest state, and nothing needs its base any more.
    report = open_registry(backend).repack()
    assert (report.runs, report.packs_written, report.recoded) == (("other",), 0, 0)
    collected(backend)
    assert open_registry(backend).verify(deep=True).findings == ()
    second, third = open_registry(backend).run("other").checkpoints()
    assert form(second) == (ZSTD, None)
    assert form(third) == (ZSTD, weights_of(second))
    assert list(third.handle.reader.placement.extra) == [weights_of(second)]
    assert same(third.load(), {"model": {"w": spread(3)}})
    settles(backend)


def test_planning_takes_no_notice_of_threads(mixed, open_registry):
    plans = [plan_repack(open_registry(mixed).handle.store, codec=ZSTD) for _ in range(2)]
    assert plans[0].new
    first, second = ([target.name for target in plan.new] for plan in plans)
    assert first == second
