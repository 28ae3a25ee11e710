"""What `du` counts: every byte on the store once, and what letting go really frees."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast import Retention, Storing
from holdfast.backends import ObjectInfo
from holdfast.backends.memory import MemoryBackend
from holdfast.backends.wrappers import Metered
from holdfast.registry.errors import Damaged, Malformed, MissingObject, StorageError
from holdfast.registry.face.factory import open_on
from holdfast.registry.face.registry import Registry
from holdfast.registry.history.actions import Evict, Eviction
from holdfast.registry.objects import codecs
from holdfast.registry.objects.keys import ObjectKey, slot_key
from holdfast.registry.objects.pack import PackEntry, PackTable
from holdfast.registry.objects.placement import ChunkRow, PackRef, Placement, Rows
from holdfast.registry.store import Outcome
from holdfast.registry.upkeep import sorted_rows
from holdfast.registry.upkeep.gc import Collector
from holdfast.registry.upkeep.gc_report import Tally
from holdfast.registry.upkeep.live import Listing
from holdfast.registry.upkeep.repacking import survey
from holdfast.registry.upkeep.shards import Shard
from holdfast.registry.upkeep.usage import StateUsage, Usage, _holders, measure
from holdfast.registry.values import Digest
from tests.registry.upkeep.thinning import as_delta
from tests.support.faults import Hooked, Once, flip
from tests.support.stores import bytes_in, contents, needed, new_backend, objects, small_grid
from tests.support.strategies import examples

PART = 1200


def part(i: int) -> np.ndarray:
    return np.frombuffer(np.random.default_rng(i).bytes(PART), np.uint8)


def state(*parts: int) -> dict:
    return {"model": {f"w{at}": part(i) for at, i in enumerate(parts)}}


def chunk_bytes(reg: Registry) -> int:
    """Return the bytes of all chunks by the tables of all packs."""
    packs = [
        PackRef(ObjectKey.parse(info.key), info.size_bytes)
        for info in reg.handle.store.backend.list("packs/")
    ]
    return sum(e.stored_bytes for pack in packs for e in reg.handle.store.read_table(pack))


def of(usage: Usage, ref: str):
    (found,) = [one for run in usage.runs for one in run.states if one.ref == ref]
    return found


def small_files(checkpoint) -> int:
    """Return the bytes of a state's manifest and placement."""
    backend = checkpoint.handle.store.backend
    place = checkpoint.handle.log.run.by_manifest[checkpoint.digest]
    return sum(len(backend.get(str(key))) for key in (place.manifest_key, place.placement_key))


def evict(run, checkpoint) -> None:
    gone = Evict(evictions=(Eviction(checkpoint=checkpoint.handle.n, reason="for room"),))
    run.handle.committer.commit(lambda _: [gone])


def settle(reg: Registry) -> None:
    """Let everything go that nothing needs."""
    reg.gc(grace_s=0)
    reg.repack(min_dead=1e-9)
    reg.gc(grace_s=0)


def test_an_empty_registry(reg, backend):
    usage = measure(reg.handle.store)
    assert usage == Usage((), 0, 0, 0, 0, 0, 0, bytes_in(backend))
    assert usage.total_bytes == bytes_in(backend) > 0


def test_a_registry_tells_its_usage(run, reg):
    run.save(state(1, 2), step=1)
    usage = reg.usage()
    assert usage == measure(reg.handle.store)
    assert [one.run for one in usage.runs] == ["run"]
    assert usage.own_bytes > 2 * PART


def test_own_and_shared(run, reg, backend):
    first, second = run.save(state(0, 1), step=1), run.save(state(0, 2), step=2)
    usage = measure(reg.handle.store)
    one, two = usage.runs[0].states
    assert (one.ref, two.ref) == (first.ref, second.ref)
    assert (one.id, two.id) == (first.digest, second.digest)
    assert [one.own_bytes, two.own_bytes] == [PART + small_files(c) for c in (first, second)]
    assert one.shared_bytes == two.shared_bytes == usage.shared_bytes == PART
    assert (one.freed_bytes, two.freed_bytes) == (one.own_bytes, two.own_bytes)
    assert usage.runs[0].own_bytes == one.own_bytes + two.own_bytes + PART
    assert usage.runs[0].shared_bytes == usage.dead_bytes == usage.unneeded_bytes == 0
    assert usage.runs[0].log_bytes == usage.log_bytes
    assert usage.log_bytes == bytes_in(backend, "runs/")


def test_what_is_dead_in_a_pack_and_what_is_all_of_an_object(run, reg, backend):
    first = run.save(state(0, 1), step=1)
    gone = small_files(first)
    run.save(state(0, 2), step=2)
    run.retention.prune(Retention(last=1))
    usage = measure(reg.handle.store)
    assert (usage.dead_bytes, usage.unneeded_bytes) == (PART, gone)
    assert usage.total_bytes == bytes_in(backend)
    run.retention.drop("over", now=True)
    usage = measure(reg.handle.store)
    objects = {k: v for k, v in contents(backend).items() if k[:4] in ("pack", "mani", "plac")}
    assert usage.unneeded_bytes == sum(map(len, objects.values()))
    assert usage.runs[0].states == ()
    assert usage.runs[0].own_bytes == usage.dead_bytes == usage.table_bytes == 0


def test_a_hidden_run_is_needed_until_gc_may_free_it(run, reg, backend):
    run.save(state(0, 1), step=1)
    run.pins.artifacts.set("a", state(2))
    (before,) = measure(reg.handle.store).runs
    run.retention.drop("over")
    usage = measure(reg.handle.store)
    (hidden,) = usage.runs
    assert hidden == replace(before, is_hidden=True, log_bytes=hidden.log_bytes)
    assert hidden.freed_bytes > 3 * PART
    assert usage.unneeded_bytes == reg.gc(grace_s=0).freed_bytes == 0
    assert measure(reg.handle.store, by=lambda run, phase, ref: phase).own_bytes == usage.own_bytes
    run.retention.drop("over", now=True)
    usage = measure(reg.handle.store)
    assert usage.runs[0].states == ()
    assert not usage.runs[0].is_hidden
    assert usage.unneeded_bytes == reg.gc(grace_s=0).freed_bytes > hidden.freed_bytes - 1


def test_what_lies_twice_counts_once(run, reg):
    """Two artifacts have a part in common, each in a pack of its own."""
    run.pins.artifacts.set("a", state(0, 1))
    run.pins.artifacts.set("b", state(0, 2))
    usage = measure(reg.handle.store)
    a, b = of(usage, "run/artifacts/a"), of(usage, "run/artifacts/b")
    assert a.shared_bytes == b.shared_bytes == usage.shared_bytes == usage.dead_bytes == PART
    assert a.id is b.id is a.freed_bytes is b.freed_bytes is None


def test_the_base_of_a_delta_counts_for_whoever_needs_it(run, reg, monkeypatch):
    monkeypatch.setattr(codecs, "CODECS", ("raw", "xor"))
    first, second = (
        run.save({"w": np.full(200, n, np.uint8), "v": np.full(150, 10 + n, np.uint8)}, step=n)
        for n in (1, 2)
    )
    as_delta(reg, second, next(iter(first.manifest.direct_chunks)), b"few bytes")
    run.refresh()
    usage = measure(reg.handle.store)
    one, two = usage.runs[0].states
    assert one.own_bytes == 150 + small_files(first)
    assert two.own_bytes == len(b"few bytes") + 150 + small_files(second)
    assert one.shared_bytes == two.shared_bytes == 200
    assert usage.dead_bytes == 400  # what the delta replaced, and a copy of the base


def test_bytes_are_counted_as_they_are_stored(run, reg):
    saved = run.save({"w": np.zeros(2**18, np.uint8)}, step=1, storing=Storing(compression="zstd"))
    stored = sum(row.stored_bytes for row in saved.handle.reader.placement.rows)
    assert stored < 2**12
    assert of(measure(reg.handle.store), saved.ref).own_bytes == stored + small_files(saved)


def test_what_goes_while_this_looks_is_no_error(backend, open_registry):
    writer = open_registry(backend)
    run = writer.create_run("run", seed=1)
    for step in (1, 2):
        run.save(state(step), step=step)

    def let_go() -> None:
        run.retention.prune(Retention(last=1))
        writer.gc(grace_s=0)

    store = Hooked(backend)
    store.before = Once("placements/", let_go)
    with open_on(store) as reg:
        usage = measure(reg.handle.store)
    assert [one.ref for one in usage.runs[0].states] == ["run/main/step00000002"]
    assert usage.total_bytes == bytes_in(backend)


def test_what_a_companion_has_in_common_with_its_checkpoint_is_its_own(run, reg):
    saved = run.save(state(1, 2), step=1, companions={"ema": state(1)})
    files = small_files(saved) + small_files(saved.companion("ema"))
    found = of(measure(reg.handle.store), saved.ref)
    assert (found.own_bytes, found.shared_bytes) == (2 * PART + files, 0)


@pytest.mark.parametrize("kind", ["tags", "gates"])
def test_a_pin_keeps_what_it_names(run, reg, kind):
    saved = run.save(state(1), step=1, companions={"ema": state(2)})
    run.save(state(3), step=2)
    before = of(measure(reg.handle.store), saved.ref)
    assert before.own_bytes == before.freed_bytes
    getattr(run.pins, kind).set("name", saved)
    after = of(measure(reg.handle.store), saved.ref)
    assert (after.own_bytes, after.freed_bytes) == (before.own_bytes, 0)
    assert len(measure(reg.handle.store).runs[0].states) == 2


def test_the_pool_keeps_its_part(run, reg):
    saved = run.save(state(1), step=1)
    run.pool.promote(saved, mu=1.0, sigma=1.0)
    usage = measure(reg.handle.store)
    shared = PART + small_files(saved)
    assert of(usage, saved.ref) == StateUsage(saved.ref, saved.digest, 0, shared, 0)
    assert of(usage, "run/pool/v0001") == StateUsage("run/pool/v0001", None, 0, shared, None)


def test_a_fork_shares(run, reg):
    saved = run.save(state(1), step=1)
    fork = reg.fork(saved, "fork")
    fork.save(state(1, 2), step=2)
    child, parent = measure(reg.handle.store).runs
    assert (child.run, parent.run) == ("fork", "run")
    assert parent.own_bytes == 0
    assert child.shared_bytes == parent.shared_bytes == PART + small_files(saved)
    fork.retention.drop("over", now=True)
    assert measure(reg.handle.store).runs[1].own_bytes == parent.shared_bytes


def test_a_superseded_checkpoint_is_named_by_its_id(run, reg):
    first = run.save(state(1), step=1)
    second = run.save(state(2), step=2)
    run.restore(at=first)
    run.save(state(3), step=2)
    names = [one.ref for one in measure(reg.handle.store).runs[0].states]
    assert names[1] == f"run/{second.digest.short}"


def test_a_run_that_cannot_be_read_hides_no_other(run, reg, backend):
    checkpoint = run.save(state(1), step=1)
    reg.create_run("sound").save(state(2), step=1)
    (key,) = [str(pack.key) for pack in checkpoint.handle.reader.placement.packs]
    harms = {
        key: (lambda: flip(backend, key, -400), Damaged),
        str(checkpoint.handle.reader.place.placement_key): (None, MissingObject),
        slot_key("run", 1): (lambda: flip(backend, slot_key("run", 1)), Damaged),
    }
    for name, (harm, error) in harms.items():
        whole = backend.get(name)
        (harm or (lambda name=name: backend.delete(name)))()
        with open_on(backend) as opened:
            usage = measure(opened.handle.store)
        assert [one.run for one in usage.runs] == ["sound"]
        assert {name: type(why) for name, why in usage.damaged.items()} == {"run": error}
        assert usage.total_bytes == bytes_in(backend)
        backend.put(name, whole)
    backend.delete(key)
    with open_on(backend) as opened:
        usage = measure(opened.handle.store)
    assert type(usage.damaged["run"]) is MissingObject
    assert [one.run for one in usage.runs] == ["sound"]


def test_no_chunk_is_read(run, backend):
    with small_grid(4096):
        run.save({"w": np.zeros(2**20, np.uint8) + np.arange(2**20) % 251}, step=1)
    metered = Metered(backend)
    with open_on(metered) as opened, metered.measure() as made:
        measure(opened.handle.store)
    assert 0 < made.read_bytes < 2**19


# Random lives


@st.composite
def lives(draw) -> list[tuple]:
    numbers = st.integers(0, 5)
    acts = st.one_of(
        st.tuples(st.just("save"), st.lists(numbers, min_size=1, max_size=3, unique=True)),
        st.tuples(st.just("companion"), numbers, numbers),
        st.tuples(st.sampled_from(["evict", "tag", "gate", "pool", "fork", "artifact"]), numbers),
        st.tuples(st.just("settle"), numbers),
        st.tuples(st.just("gc"), numbers),
    )
    return draw(st.lists(acts, min_size=2, max_size=12))


def live(backend: MemoryBackend, life: list[tuple]) -> None:
    """Live a life; the same one leaves the same."""
    with open_on(backend) as reg:
        runs = [reg.create_run("r0", seed=1)]
        for number, (act, *rest) in enumerate(life):
            run = (
                runs[rest[0] % len(runs)] if isinstance(rest[0], int) else runs[number % len(runs)]
            )
            kept = run.checkpoints()
            match act:
                case "save":
                    run.save(state(*rest[0]), step=number + 1)
                case "companion":
                    run.save(state(rest[0]), step=number + 1, companions={"c": state(rest[1])})
                case "artifact":
                    run.pins.artifacts.set(f"a{number}", state(rest[0], 7))
                case "gc":
                    reg.gc(grace_s=0)
                case "settle":
                    settle(reg)
                case _ if not kept:
                    pass
                case "evict":
                    run.retention.prune(Retention(last=1 + rest[0]))
                case "tag":
                    run.pins.tags.set("t", kept[rest[0] % len(kept)])
                case "gate":
                    run.pins.gates.set(f"g{number}", kept[rest[0] % len(kept)])
                case "pool":
                    run.pool.promote(kept[rest[0] % len(kept)], mu=1.0, sigma=1.0)
                case "fork":
                    runs.append(reg.fork(kept[rest[0] % len(kept)], f"r{number + 1}"))


def counted(reg: Registry) -> dict[str, tuple[int, int]]:
    """Count own and shared bytes of each state and run, chunk by chunk and all in memory."""
    store, size, states, runs = reg.handle.store, {}, defaultdict(set), defaultdict(set)
    for name in reg.run_names():
        for holder in _holders(reg.run(name).manifest):
            for place in holder.places:
                placement = store.placement(place.placement_key)
                things = {
                    str(key): len(store.backend.get(str(key)))
                    for key in (place.manifest_key, place.placement_key)
                }
                for row in placement.rows:
                    entry = store.read_table(placement.packs[row.pack]).at(row.offset)
                    things[survey.chunk_of(entry)] = row.stored_bytes
                size |= things
                for thing in things:
                    states[thing].add(holder.ref)
                    runs[thing].add(name)
    own, shared = Counter(), Counter()
    for by_thing in (states, runs):
        for thing, names in by_thing.items():
            for name in names:
                (own if len(names) == 1 else shared)[name] += size[thing]
    return {name: (own[name], shared[name]) for name in own | shared}


def in_few_rows(reg: Registry, rows: int, packs: int) -> Usage:
    """Count with so few rows and packs in memory that all others go to files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sorted_rows, "_ROWS", rows)
        patch.setattr(survey, "_PACKS", packs)
        return measure(reg.handle.store)


needs = st.tuples(st.integers(0, 5), st.integers(0, 7), st.integers(0, 7))


@examples(60)
@given(needed=st.lists(needs, max_size=30), rows=st.integers(1, 40))
def test_any_lives_of_chunks_add_up(needed, rows):
    """Chunk, first and last holder of each row; eight holders, of which each two are a run's."""
    size = [7, 11, 13, 17, 19, 23]
    who = defaultdict(set)
    holders = [survey.Holder(number // 2, str(number), None) for number in range(8)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sorted_rows, "_ROWS", rows)
        tally = survey.Tally(["a", "b", "c", "d"], holders, {})
        for chunk, one, other in needed:
            first, last = min(one, other), max(one, other)
            who[chunk] |= set(range(first, last + 1))
            for run in range(first // 2, last // 2 + 1):  # no row leaves its run
                row = (
                    (chunk << 58, chunk),
                    0,
                    size[chunk],
                    max(first, 2 * run),
                    min(last, 2 * run + 1),
                )
                tally._needs.add(np.array([row], survey._NEED))
        tally.add_up()
    runs = {chunk: {number // 2 for number in held} for chunk, held in who.items()}
    for number in range(8):
        mine = [chunk for chunk, held in who.items() if number in held]
        assert tally.needed[number] == sum(size[chunk] for chunk in mine)
        assert tally.own[number] == sum(size[chunk] for chunk in mine if len(who[chunk]) == 1)
    for run in range(4):
        mine = [chunk for chunk, held in runs.items() if run in held]
        assert tally.run_needed[run] == sum(size[chunk] for chunk in mine)
        assert tally.run_own[run] == sum(size[chunk] for chunk in mine if len(runs[chunk]) == 1)
    assert tally.shared == sum(size[chunk] for chunk, held in who.items() if len(held) > 1)
    assert tally.by_kind == [sum(size[chunk] for chunk in who), 0, 0]


def test_no_run_is_blamed_for_a_full_temporary_folder(run, reg, monkeypatch):
    run.save(state(1, 2), step=1)

    def full(**_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sorted_rows.tempfile, "TemporaryFile", full)
    with pytest.raises(StorageError, match=r"temporary file.*No space left.*TMPDIR"):
        in_few_rows(reg, 1, 0)
    assert measure(reg.handle.store).damaged == {}  # few rows need no file


def test_encodings_of_a_chunk_are_apart():
    entry = PackEntry(Digest(bytes(32)), 0, 1, 1)
    others = [entry, entry._replace(codec="zstd"), entry._replace(codec="zstd", base=entry.digest)]
    assert len({survey._chunk_key(one) for one in others}) == 3
    assert survey._chunk_key(entry) == survey._chunk_key(entry._replace(offset=5))


def test_generations_of_a_pack_are_packs_of_their_own():
    table = PackTable([PackEntry(Digest(bytes(32)), 0, 5, 5)])
    keys = [ObjectKey("packs", Digest(bytes([7]) * 32), generation) for generation in (0, 1)]
    tally = survey.Tally(["run"], [survey.Holder(0, str(key), None) for key in keys], {})
    lives = survey.Lives(tally._lives)
    for number, key in enumerate(keys):
        packs = (PackRef(key, 100 + number),)
        lives.take(0, number, Placement(Digest(bytes(32)), packs, Rows([ChunkRow(0, 0, 5)])))
    lives.step()

    def each(_, units, take, **__):
        for unit in list(units):
            take(unit, Outcome(table))

    listing = Listing(Shard())
    listing.add([ObjectInfo(str(key), 100 + number, 0.0) for number, key in enumerate(keys)])
    tally.resolve(SimpleNamespace(each=each), listing.rows)
    tally.need_files(listing.rows)
    tally.add_up()
    assert (tally.packs, tally.tables, tally.shared) == (201, 10, 5)


def test_a_placement_that_its_pack_contradicts_is_damage(run, reg, backend):
    saved = run.save(state(1), step=1)
    for row in (ChunkRow(0, 1, PART), ChunkRow(0, 2**40, PART)):
        placement = saved.handle.reader.placement
        other = replace(placement, rows=Rows([row]))
        with open_on(backend) as opened:
            store = opened.handle.store
            place = saved.handle.reader.place
            store.remember(place.placement_key, other)
            usage = measure(store)
        assert type(usage.damaged["run"]) is Malformed
        assert usage.runs == ()


@examples(20)
@given(life=lives(), chosen=st.integers(0, 5))
def test_parts_add_up_and_what_is_freed_goes(life, chosen):
    """Removing a checkpoint, or a run, frees to the byte what was said, copies and all."""
    backend = new_backend()
    live(backend, life)
    with open_on(backend) as reg:
        usage = measure(reg.handle.store)
        told = [(one.ref, one) for run in usage.runs for one in run.states]
        told += [(run.run, run) for run in usage.runs]
        found = {name: (one.own_bytes, one.shared_bytes) for name, one in told}
        assert {name: one for name, one in found.items() if any(one)} == counted(reg)
        assert in_few_rows(reg, chosen + 1, chosen % 2) == usage
        assert usage.total_bytes == bytes_in(backend)
        states = [one for run in usage.runs for one in run.states]
        assert usage.own_bytes == sum(one.own_bytes for one in states)
        for run in usage.runs:
            assert bool(reg.run(run.run).manifest.held) == bool(run.states)
        checkpoints = [one for one in states if one.id is not None]
        if not checkpoints:
            return
        one = checkpoints[chosen % len(checkpoints)]
        if any(pin.checkpoint == number_of(reg, one.ref) for pin in pins(reg, one.ref)):
            assert one.freed_bytes == 0
        else:
            frees(backend, one.freed_bytes, lambda reg: let_go(reg, one.ref))
        run = usage.runs[chosen % len(usage.runs)]
        frees(backend, run.own_bytes, lambda reg: reg.run(run.run).retention.drop("over", now=True))


@examples(8)
@given(life=lives(), rows=st.integers(1, 40), sealed=st.booleans())
def test_few_rows_in_memory_collect_the_same(life, rows, sealed):
    """Listing, needs and sweep go to files, also in collections that begin with notes or seals."""
    backend = new_backend()
    with pytest.MonkeyPatch.context() as patch, open_on(backend) as reg:
        patch.setattr(sorted_rows, "_ROWS", rows)
        if sealed:
            reg.upgrade()
        live(backend, [*life, ("gc", 0), ("save", [0, 5]), ("evict", 1)])
        gone = objects(backend) - needed(reg)
        plan = Collector(reg.handle.store, grace_s=0).choose(dry_run=True)
        assert set(map(str, plan.to_condemn)) == gone
        sizes = {info.key: info.size_bytes for info in backend.list()}
        told = {str(key): size for key, size in plan.to_condemn.sizes()}
        assert told == {key: sizes[key] for key in gone}
        few = sorted((sizes[key] for key in gone), reverse=True)[:3]
        assert sorted((size for _, size in plan.to_condemn.largest(3).sizes()), reverse=True) == few
        assert plan.objects == Tally.of(sizes[key] for key in objects(backend))
        assert reg.gc(grace_s=0).deleted == Tally.of(sizes[key] for key in gone)
        assert objects(backend) == needed(reg)
        assert reg.verify().findings == ()


def number_of(reg: Registry, ref: str) -> int:
    return reg.checkpoint(ref).handle.n


def pins(reg: Registry, ref: str) -> list:
    state = reg.run(ref.split("/")[0]).manifest
    return [pin for pin in state.pins if pin.kind in ("gate", "tag")]


def let_go(reg: Registry, ref: str) -> None:
    evict(reg.run(ref.split("/")[0]), reg.checkpoint(ref))


def frees(backend: MemoryBackend, nbytes: int, remove) -> None:
    """Compare what is left in two copies of a store, one of them with and one without a removal."""
    left = []
    for act in (lambda reg: None, remove):
        copy = MemoryBackend()
        for key, data in contents(backend).items():
            copy.put(key, data)
        with open_on(copy) as reg:
            act(reg)
            placements = gone_placements(backend, reg)
            settle(reg)
            left.append(chunk_bytes(reg) + bytes_in(copy, "manifests/") - placements)
    assert left[0] - left[1] == nbytes


def gone_placements(backend: MemoryBackend, reg: Registry) -> int:
    """Return the bytes of the placements of before that no run needs now.

    A repack writes the others again.
    """
    needed = set()
    for name in reg.run_names():
        state = reg.run(name).refresh().manifest
        needed |= {
            str(place.placement_key) for place in state.places if place.manifest in state.held
        }
    return sum(len(v) for k, v in contents(backend, "placements/").items() if k not in needed)
